"""Long tables of evaluations: CSV and JSON lines with columns by any name, and charts exported by W&B."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""
NEEDED = ("tokens", "val_loss")
OPTIONAL = ("run", "seed", "arm")
_EXTREMES = ("__MIN", "__MAX")
_LARGEST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns are called: ours → theirs. Without ``run`` a file is one run, or one for each seed."""

    names: Mapping[str, str]
    tokens_per_unit: float = 1.0
    """Tokens of one unit of the ``tokens`` column: the tokens of a step, where it counts steps."""

    def of(self, name: str) -> str:
        """Return the column that holds ``tokens``, ``val_loss``, ``run``, ``seed`` or ``arm``."""
        return self.names.get(name, name)


Row = tuple[int, dict[str, Any]]


def inert(value: Any) -> Any:
    """Put a ' in front of a text that a spreadsheet would take for a formula; ``read_csv`` takes it away."""
    computed = isinstance(value, str) and value.lstrip("'").startswith(_COMPUTED)
    return f"'{value}" if computed else value


def _as_written(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_COMPUTED) else cell


def read_csv(path: Path) -> tuple[list[Row], list[str]]:
    """Return a CSV's rows with their line numbers, and the faults."""
    text, faults = _text(path)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows = []
    for row in reader:
        if None in row or None in row.values():
            fields = len(reader.fieldnames or ())
            faults.append(f"{path}:{reader.line_num}: expected {fields} fields")
            continue
        rows.append((reader.line_num, {name: _as_written(cell) for name, cell in row.items()}))
    return rows, faults


def read_jsonl(path: Path) -> tuple[list[Row], list[str]]:
    """Return the objects of a file of JSON lines with their line numbers, and the faults."""
    text, faults = _text(path)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            faults.append(f"{path}:{number}: not a JSON object")
    return rows, faults


def read_wandb_chart(path: Path, metric: str | None = None) -> tuple[list[Row], list[str]]:
    """Return the rows of a chart's CSV export as (tokens, val_loss, run), and the faults.

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.
    """
    rows, faults = read_csv(path)
    if not rows:
        return [], faults
    step, *others = rows[0][1]
    series = [name for name in others if " - " in name and not name.endswith(_EXTREMES)]
    if metric is not None:
        series = [name for name in series if name.rsplit(" - ", 1)[1] == metric]
    metrics = sorted({name.rsplit(" - ", 1)[1] for name in series})
    if len(metrics) != 1:
        shown = ", ".join(metrics) or "none"
        return [], [
            *faults,
            f"{path}:1: expected columns 'RUN - METRIC' of one metric, found: {shown} (--metric)",
        ]
    long = [
        (number, {"tokens": row[step], "val_loss": row[name], "run": name.rsplit(" - ", 1)[0]})
        for number, row in rows
        for name in series
        if row[name] not in ("", None)
    ]
    return long, faults


def _text(path: Path) -> tuple[str, list[str]]:
    try:
        return path.read_text(encoding="utf-8-sig"), []
    except OSError as error:
        return "", [f"{path}: cannot be read: {error.strerror or error}"]
    except UnicodeDecodeError as error:
        return "", [f"{path}: not UTF-8: {error.reason} at byte {error.start}"]


def runs_of(
    path: Path, rows: Iterable[Row], columns: Columns
) -> tuple[dict[str | None, list[ImportedRun]], list[str]]:
    """Group rows into runs, by arm where there is such a column; returns them and the faults."""
    faults: list[str] = []
    points: dict[tuple[str | None, str, int | None], dict[int, float]] = {}
    for number, row in rows:
        where = f"{path}:{number}"
        missing = [columns.of(name) for name in NEEDED if columns.of(name) not in row]
        if missing:
            faults.append(
                f"{where}: no column '{missing[0]}' (has {', '.join(map(str, row))}); see --columns"
            )
            break
        tokens, loss = (_number(row[columns.of(name)]) for name in NEEDED)
        if loss is None and row[columns.of("val_loss")] in ("", None):
            continue  # a row of training between evaluations
        if tokens is None or not 0 <= tokens * columns.tokens_per_unit < _LARGEST or loss is None:
            bad = columns.of("tokens" if loss is not None else "val_loss")
            faults.append(f"{where}: expected a number in '{bad}', got {row[bad]!r}")
            continue
        seed = _seed(row.get(columns.of("seed")))
        arm = row.get(columns.of("arm"))
        key = (None if arm is None else str(arm), str(row.get(columns.of("run"), "")), seed)
        points.setdefault(key, {})[round(tokens * columns.tokens_per_unit)] = loss
    found: dict[str | None, list[ImportedRun]] = {}
    for (arm, name, seed), curve in points.items():
        own = found.setdefault(arm, [])
        own.append(
            run_of_losses(
                curve,
                [path.name, arm, name, seed],
                source=f"{path}{f' ({name})' if name else ''}",
                seed=len(own) if seed is None else seed,
            )
        )
    return found, faults


def by_pattern(
    runs: Sequence[ImportedRun], names: Sequence[str], arms: Mapping[str, str]
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Sort runs into arms by shell patterns on their names; a run of no arm is a fault."""
    found: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    faults = []
    for run, name in zip(runs, names, strict=True):
        arm = next((arm for arm, pattern in arms.items() if fnmatchcase(name, pattern)), None)
        if arm is None:
            faults.append(f"{run.source}: in no arm (patterns: {', '.join(arms.values())})")
        else:
            found[arm].append(run)
    return found, faults


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _seed(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) < _LARGEST and number.is_integer() else None
