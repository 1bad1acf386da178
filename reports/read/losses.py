"""A table of final losses over sizes and budgets, one row a run, as papers and sweeps have them.

Columns ``arm``, ``parameters``, ``tokens`` (of the whole run) and ``val_loss`` in nats per token; ``seed``
where a size and budget has several runs of an arm; ``run`` where one run stands for several budgets, which it
can at a constant learning rate alone. Other columns are not read.

How it fails: ``UserError`` with one line for the first row that is none, naming file, line and column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.reports.read.tables import read_csv

if TYPE_CHECKING:
    from pathlib import Path

_NEEDED = ("arm", "parameters", "tokens", "val_loss")
_LARGEST = 1e6
"""A loss beyond, in nats, is one of a run that diverged."""


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """The loss (nats per token) of a model of ``parameters`` trained for ``tokens``.

    ``run``: whose it is; a run has several where the learning rate was constant.
    """

    arm: str
    parameters: int
    tokens: int
    seed: int
    loss: float
    run: str


def read_losses(path: Path) -> tuple[list[LossPoint], dict[str, str]]:
    """Return the runs of a table, and the arms left out for a run that diverged, with the reason.

    Raises:
        UserError: no rows, a column that is missing, a cell that is no number, a run that stands twice.
    """
    found, faults = read_csv(path)
    rows = list(found)
    if faults:
        raise UserError(f"--losses: {faults[0]}")
    if not rows:
        raise UserError(f"--losses: {path} has no rows (expected columns {', '.join(_NEEDED)})")
    if missing := [name for name in _NEEDED if name not in rows[0][1]]:
        raise UserError(
            Problem(
                what=f"--losses: {path} has no column '{missing[0]}' (has {', '.join(rows[0][1])})",
                hint=f"expected {', '.join(_NEEDED)}, and seed where there are several runs of one",
            )
        )
    points: list[LossPoint] = []
    known: dict[tuple[Any, ...], int] = {}
    diverged: dict[str, int] = {}
    for line, row in rows:
        where = f"--losses: {path}:{line}"
        size, budget = (_count(row[name], name, where) for name in ("parameters", "tokens"))
        seed = _count(row["seed"], "seed", where, least=0) if row.get("seed") else 0
        key = (row["arm"], size, budget, seed)
        if key in known:
            raise UserError(
                f"{where}: '{row['arm']}' of {size:,} parameters and {budget:,} tokens stands in line "
                f"{known[key]}, too (runs of one size and budget need a column 'seed' that tells them apart)"
            )
        known[key] = line
        loss = _number(row["val_loss"], "val_loss", where)
        if loss <= 0:
            raise UserError(f"{where}: expected a loss above 0 nats in 'val_loss', got {row['val_loss']!r}")
        if not loss < _LARGEST:
            diverged[row["arm"]] = diverged.get(row["arm"], 0) + 1
            continue
        name = row.get("run") or f"line {line}"
        points.append(
            LossPoint(arm=row["arm"], parameters=size, tokens=budget, seed=seed, loss=loss, run=name)
        )
    left_out = {
        arm: f"diverged: {count} of its losses not finite or beyond 1e6" for arm, count in diverged.items()
    }
    return [point for point in points if point.arm not in left_out], left_out


def _number(text: str, column: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{where}: expected a number in '{column}', got {text!r}") from None


def _count(text: str, column: str, where: str, *, least: int = 1) -> int:
    number = _number(text, column, where)
    if not math.isfinite(number) or number < least or number != round(number):
        raise UserError(f"{where}: expected a whole number from {least} on in '{column}', got {text!r}")
    return int(number)
