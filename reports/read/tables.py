"""Long tables of evaluations: CSV, JSON lines, charts exported by W&B, and plain text by the user's patterns.

A table without a column of tokens is one of final losses, a row a run.

How it fails: a row that does not fit is a line in the faults, and the rest goes on. A pattern that cannot
work is a ``UserError``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""
NEEDED = ("tokens", "val_loss")
OPTIONAL = ("run", "seed", "arm", "seconds", "ms", "val_loss_bf16")
_COUNTS = ("step", "tokens")
_GROUPS = (*_COUNTS, "val_loss", "seconds", "ms", "seed")
_EXTREMES = ("__MIN", "__MAX")
_LARGEST = 1 << 62
_LONGEST_LINE = 1 << 16
"""Characters of a text's line that are looked at together: a file need not have any line breaks."""

Stages = tuple[tuple[float, float], ...]
"""(first step, tokens of a step from there on), steps rising from 0."""
TOKENS: Stages = ((0.0, 1.0),)
"""Where what is called a step is a token."""


def tokens_at(step: float, stages: Stages) -> float:
    """Return the tokens of so many steps, whose size may change from stage to stage."""
    ends = [start for start, _ in stages[1:]] + [step]
    return sum(
        max(0.0, min(step, end) - start) * tokens for (start, tokens), end in zip(stages, ends, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns are called: ours → theirs. Without ``run`` a file is one run, or one for each seed.

    ``stages``: the tokens of a step, where the ``tokens`` column counts steps. ``seconds`` and ``ms``, since
    training began, are read only if they are named: a column of that name may be the time of a step.
    """

    names: Mapping[str, str]
    stages: Stages = TOKENS

    def of(self, name: str) -> str:
        """Return the column that holds ours of that name."""
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
    """Return the objects of a file of JSON lines with their line numbers, and the faults.

    A file that is one array has its objects numbered instead.
    """
    text, faults = _text(path)
    rows = []
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            text = "\n".join(json.dumps(one) for one in parse_json(text))
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


def check_patterns(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Return regular expressions ready for use.

    Raises:
        UserError: one that is none, a group of another name, or no group for what is needed.
    """
    found = []
    for text in patterns:
        try:
            found.append(re.compile(text))
        except re.error as error:
            raise UserError(f"--pattern: '{text}' is no regular expression: {error}") from None
    groups = {name for pattern in found for name in pattern.groupindex}
    expected = f"(expected {', '.join(_GROUPS)})"
    for name in groups:
        if name not in _GROUPS:
            raise UserError(f"--pattern: no group of ours is '{name}' {expected}")
    if "val_loss" not in groups:
        raise UserError(f"--pattern: no group (?P<val_loss>…) {expected}")
    if {"step", "tokens"} <= groups:
        raise UserError("--pattern: groups for step and for tokens (expected one of them)")
    if not groups & set(_COUNTS) and (timed := groups & {"seconds", "ms"}):
        raise UserError(
            f"--pattern: a group '{min(timed)}', and none of {' or '.join(_COUNTS)} to hold the time against "
            "(leave it out to compare final losses)"
        )
    return tuple(found)


def read_text(path: Path, patterns: Sequence[re.Pattern[str]]) -> tuple[list[Row], list[str]]:
    """Return a row for each ``val_loss`` that a pattern finds in a text, and the faults.

    What a group found in an earlier line holds until it finds again. A file is a run; its first seed counts.
    Patterns that count neither steps nor tokens find its final loss, the last.
    """
    rows: list[Row] = []
    known: dict[str, Any] = {}
    seed = None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
                for match in filter(None, (pattern.search(line) for pattern in patterns)):
                    found = {name: text for name, text in match.groupdict().items() if text is not None}
                    seed = found.pop("seed", None) if seed is None else seed
                    known |= found
                    if "val_loss" in found:
                        rows.append((number, known.copy()))
    except OSError as error:
        return [], [f"{path}: cannot be read: {error.strerror or error}"]
    if not rows:
        return [], [f"{path}: no line matches the --pattern of val_loss"]
    if not any(name in pattern.groupindex for pattern in patterns for name in _COUNTS):
        del rows[:-1]
    return [(number, {**row, "seed": seed}) for number, row in rows], []


def runs_of(
    path: Path, rows: Sequence[Row], columns: Columns
) -> tuple[dict[str | None, list[ImportedRun]], list[str]]:
    """Group rows into runs, by arm where there is such a column; returns them and the faults."""
    has = dict.fromkeys(name for _, row in rows for name in row)
    finals = "tokens" not in {*columns.names, *has}
    lacking = [columns.of(name) for name in NEEDED[finals:] if columns.of(name) not in has]
    listed = f"(has {', '.join(map(str, has))}); see --columns"
    if rows and lacking:
        return {}, [f"{path}:{rows[0][0]}: no column '{lacking[0]}' {listed}"]
    faults: list[str] = []
    runs: dict[tuple[Any, ...], _Rows] = {}
    for number, row in rows:
        told = {name: row.get(columns.of(name)) for name in (*NEEDED, *OPTIONAL)}
        if told["val_loss"] in ("", None):
            continue  # a row of training between evaluations
        step, loss = (0.0 if finals else _number(told["tokens"])), _number(told["val_loss"])
        if (
            step is None
            or not 0 <= step < _LARGEST
            or loss is None
            or tokens_at(step, columns.stages) >= _LARGEST
        ):
            bad = "val_loss" if loss is None else "tokens"
            faults.append(f"{path}:{number}: expected a number in '{columns.of(bad)}', got {told[bad]!r}")
            continue
        arm, name, seed = told["arm"], told["run"], _seed(told["seed"])
        # Of final losses two files may well say the same.
        own = (str(path),) if finals else ()
        key = (None if arm is None else str(arm), "" if name is None else str(name), seed, *own)
        run = runs.setdefault(key, _Rows(losses={}, in_bf16={}, seconds={}))
        if finals and run.losses:
            wanted = f"no column 'tokens'{'' if name or seed is not None else ', run or seed'}"
            return {}, [f"{path}:{number}: a second loss of one run, and {wanted} {listed}"]
        tokens = round(tokens_at(step, columns.stages))
        run.losses[tokens] = loss
        if (second := _number(told["val_loss_bf16"])) is not None and math.isfinite(second):
            run.in_bf16[tokens] = second
        seconds, ms = (_number(told[name]) if name in columns.names else None for name in ("seconds", "ms"))
        if seconds is not None or ms is not None:
            run.seconds[tokens] = (ms or 0.0) / 1e3 if seconds is None else seconds
    found: dict[str | None, list[ImportedRun]] = {}
    for key, run in runs.items():
        arm, name, seed = key[:3]
        source = f"{path}{f' ({name})' if name else ''}"
        times = [run.seconds[tokens] for tokens in sorted(run.seconds)]
        rises = all(one <= other for one, other in pairwise(times))
        if not rises:
            faults.append(f"{source}: the time falls, so it is not since the training began: not read")
        found.setdefault(arm, []).append(
            run_of_losses(
                run.losses,
                [path.name, *key],
                source=source,
                seed=seed,
                in_bf16=run.in_bf16,
                throughput=_throughput(run.seconds) if rises else (),
            )
        )
    return found, faults


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One run's rows by tokens: losses, those in bf16, and seconds since the training's start."""

    losses: dict[int, float]
    in_bf16: dict[int, float]
    seconds: dict[int, float]


def _throughput(seconds: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return the tokens/s of a whole run, from its first time to its last: a stage is not the run."""
    if len(seconds) < 2:
        return ()
    first, last = min(seconds), max(seconds)
    passed = seconds[last] - seconds[first]
    return ((last, (last - first) / passed),) if 0 < passed < _LARGEST else ()


def by_pattern(
    runs: Sequence[ImportedRun], names: Sequence[str], arms: Mapping[str, Sequence[str]]
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Sort runs into arms by shell patterns on their names; a run of no arm is a fault."""
    found: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    patterns = ", ".join(one for own in arms.values() for one in own)
    faults = []
    for run, name in zip(runs, names, strict=True):
        arm = next((arm for arm, own in arms.items() if any(fnmatchcase(name, one) for one in own)), None)
        if arm is None:
            faults.append(f"{run.source}: in no arm (patterns: {patterns})")
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
