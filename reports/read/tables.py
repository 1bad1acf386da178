"""Long tables of evaluations: CSV, JSON lines, charts exported by W&B, and plain text by the user's patterns.

A table without a column of tokens is one of final losses, a row a run.

How it fails: a row that does not fit is a line in the faults, and the rest goes on. A pattern that cannot
work is a ``UserError``.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from ablate.base.errors import UserError, safe_text
from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""
NEEDED = ("tokens", "val_loss")
OPTIONAL = ("run", "seed", "arm", "seconds", "ms", "val_loss_bf16")
_COUNTS = ("step", "tokens")
_GROUPS = (*_COUNTS, "val_loss", "seconds", "ms", "seed")
_NAMES_OF_RUNS = (
    "name", "id", "run_id", "run_name", "trial", "rep", "replicate", "repetition", "replica", "experiment",
)  # fmt: skip
"""Columns that often tell runs apart."""
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
    if len(stages) == 1:
        return float(step * stages[0][1])
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
    """Put a ' in front of a text that a spreadsheet would take for a formula; ``read_csv`` takes it away.

    What does not print becomes visible.
    """
    if not isinstance(value, str):
        return value
    text = safe_text(value, keep="\n\r\t")
    return f"'{text}" if text.lstrip("'").startswith(_COMPUTED) else text


def _as_written(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_COMPUTED) else cell


def read_csv(path: Path) -> tuple[Iterator[Row], list[str]]:
    """Return a CSV's rows with their line numbers, and the faults, which are whole after the last row."""
    faults: list[str] = []
    return _csv_rows(path, faults), faults


def _csv_rows(path: Path, faults: list[str]) -> Iterator[Row]:
    with _open(path, faults) as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                if None in row or None in row.values():
                    faults.append(f"{path}:{reader.line_num}: expected {len(reader.fieldnames or ())} fields")
                elif not all(map(_is_text, row.values())):
                    faults.append(f"{path}:{reader.line_num}: not UTF-8")
                else:
                    yield reader.line_num, {name: _as_written(cell) for name, cell in row.items()}
        except csv.Error as error:
            faults.append(f"{path}:{reader.line_num}: {error}")


def read_jsonl(path: Path) -> tuple[Iterator[Row], list[str]]:
    """Return the objects of a file of JSON lines with their line numbers, and the faults, as ``read_csv``.

    A file that is one array has its objects numbered instead.
    """
    faults: list[str] = []
    return _json_rows(path, faults), faults


def _json_rows(path: Path, faults: list[str]) -> Iterator[Row]:
    with _open(path, faults) as file:
        lines: Iterable[str] = file
        first = next(file, "")
        if first.lstrip().startswith("["):
            text = first + file.read()
            try:
                lines = [json.dumps(one) for one in parse_json(text)]
            except ValueError:
                lines = text.splitlines()
        else:
            lines = itertools.chain([first], file)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                faults.append(f"{path}:{number}: {f'not JSON: {error}' if _is_text(line) else 'not UTF-8'}")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                faults.append(f"{path}:{number}: not a JSON object")


def _open(path: Path, faults: list[str]) -> TextIO:
    """Open a text, an empty one where there is none; bytes that are not UTF-8 become lone surrogates."""
    try:
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as error:
        faults.append(f"{path}: cannot be read: {error.strerror or error}")
        return io.StringIO()


def _is_text(cell: str) -> bool:
    return cell.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in cell)


def read_wandb_chart(path: Path, metric: str | None = None) -> tuple[Sequence[Row], list[str]]:
    """Return the rows of a chart's CSV export as (tokens, val_loss, run), and the faults.

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.
    """
    found, faults = read_csv(path)
    rows = list(found)
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


def check_patterns(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Return regular expressions ready for use.

    Raises:
        UserError: an invalid expression, a group of another name, or no group for what is needed.
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
    known: dict[str, Any] = {name: None for pattern in patterns for name in pattern.groupindex}
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
    path: Path, rows: Iterable[Row], columns: Columns
) -> tuple[dict[str | None, list[ImportedRun]], list[str]]:
    """Group rows into runs, by arm where there is such a column; returns them and the faults.

    Raises:
        UserError: a column that is named is not there; rows that are several runs with nothing that tells
            them apart; tokens that are no whole numbers and have no unit.
    """
    has: dict[Any, None] = {}
    faults: list[str] = []
    runs: dict[tuple[Any, ...], _Rows] = {}
    finals: bool | None = None
    for number, told, others in _evaluations(rows, columns, has):
        if finals is None:
            finals = "tokens" not in {*columns.names, *has}
        step, loss = (0.0 if finals else _number(told["tokens"])), _number(told["val_loss"])
        at = _LARGEST if step is None or not 0 <= step < _LARGEST else tokens_at(step, columns.stages)
        if loss is None or at >= _LARGEST:
            bad = "val_loss" if loss is None else "tokens"
            faults.append(f"{path}:{number}: expected a number in '{columns.of(bad)}', got {told[bad]!r}")
            continue
        if columns.stages is TOKENS and not float(at).is_integer():
            raise UserError(
                f"{path}:{number}: expected whole tokens in '{columns.of('tokens')}', got {told['tokens']!r} "
                "(name their unit, such as --tokens-unit 1e9, or the tokens of a step: --tokens-per-step)"
            )
        arm, name, seed = told["arm"], told["run"], _seed(told["seed"])
        # Of final losses two files may well say the same.
        own = (str(path),) if finals else ()
        key = (None if arm is None else str(arm).strip(), "" if name is None else str(name), seed, *own)
        run = runs.setdefault(key, _Rows(path=path, has=has))
        if finals and run.losses:
            wanted = f"no column 'tokens'{'' if name or seed is not None else ', run or seed'}"
            return {}, [
                f"{path}:{number}: a second loss of one run, and {wanted} (has {_listed(has)}); see --columns"
            ]
        tokens = round(at)
        run.add(number, tokens, loss, others)
        if (second := _number(told["val_loss_bf16"])) is not None and math.isfinite(second):
            run.in_bf16[tokens] = second
        seconds, ms = (_number(told[name]) if name in columns.names else None for name in ("seconds", "ms"))
        if seconds is not None or ms is not None:
            run.seconds[tokens] = (ms or 0.0) / 1e3 if seconds is None else seconds
    if not has:
        return {}, []
    for column in columns.names.values():
        if column not in has:
            raise UserError(f"--columns: {path} has no column '{column}' (has {_listed(has)})")
    if columns.of("val_loss") not in has:
        return {}, [f"{path}: no column '{columns.of('val_loss')}' (has {_listed(has)}); see --columns"]
    if finals and "tokens" in has:
        return {}, [f"{path}: its first loss has no 'tokens', though others have"]
    found: dict[str | None, list[ImportedRun]] = {}
    for key, run in runs.items():
        run.check()
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
                piece=None if finals else (name, seed),
                in_bf16=run.in_bf16,
                throughput=_throughput(run.seconds) if rises else (),
            )
        )
    return found, faults


def _listed(has: Iterable[Any]) -> str:
    return safe_text(", ".join(map(str, has)))


def _evaluations(
    rows: Iterable[Row], columns: Columns, has: dict[Any, None]
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield each row with a loss: its line, what is read of it, and what may name its run.

    The others are of training between evaluations. ``has`` takes all columns.
    """
    places = {name: columns.of(name) for name in (*NEEDED, *OPTIONAL)}
    read, may_name = set(places.values()), []
    for number, row in rows:
        if not row.keys() <= has.keys():
            has |= dict.fromkeys(row)
            may_name = [name for name in has if str(name).lower() in _NAMES_OF_RUNS and name not in read]
        if row.get(places["val_loss"]) not in ("", None):
            told = {name: row.get(place) for name, place in places.items()}
            yield number, told, {name: row.get(name) for name in may_name}


@dataclass(kw_only=True)
class _Rows:
    """One run's rows by tokens: losses, those in bf16, and seconds since the training's start.

    ``has``: the file's columns; ``others``: what may name the runs, if these rows are several.
    """

    path: Path
    has: Mapping[Any, None]
    losses: dict[int, float] = field(default_factory=dict)
    in_bf16: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    others: dict[str, set[str]] = field(default_factory=dict)
    first: int = 0
    count: int = 0
    highest: int = -1
    lowest: int = _LARGEST
    fault: UserError | None = None

    def add(self, number: int, tokens: int, loss: float, others: Mapping[str, Any]) -> None:
        """Add the loss of a line; a resumed run may say again what it has said."""
        for name, value in others.items():
            self.others.setdefault(name, set()).add(str(value))
        what = None
        if self.lowest < tokens < self.highest and tokens not in self.losses:
            what = f"tokens that fall from {self.highest:,} to {tokens:,} in one run"
        before = self.losses.setdefault(tokens, loss)
        if before != loss and not (math.isnan(before) and math.isnan(loss)):
            what = f"losses {before:g} and {loss:g} at {tokens:,} tokens of one run"
        if what is not None and self.fault is None:
            self.fault = self._several(number, what)
        self.first, self.count = self.first or number, self.count + 1
        self.highest, self.lowest = max(self.highest, tokens), min(self.lowest, tokens)

    def check(self) -> None:
        """Raise ``UserError`` where these rows are those of several runs."""
        for name, values in self.others.items():
            if 1 < len(values) < self.count:
                raise self._several(self.first, f"a column '{name}' that differs within one run")
        if self.fault is not None:
            raise self.fault

    def _several(self, number: int, what: str) -> UserError:
        hint = f"if there are several, name what tells them apart: --run-column, of {_listed(self.has)}"
        return UserError(f"{self.path}:{number}: {what} ({hint})")


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


def _seed(value: Any) -> int | str | None:
    """Return a seed as a number where it is a usual one, else as its text."""
    if value in ("", None):
        return None
    number = _number(value)
    is_usual = number is not None and abs(number) < 1 << 53 and number.is_integer()
    return int(number) if is_usual and number is not None else str(value).strip()
