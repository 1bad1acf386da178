"""Long tables of evaluations: CSV, JSON lines, charts exported by W&B, and plain text by the user's patterns.

A table without a column of tokens holds final losses, one row for each run.

How it fails: every reader adds a line to ``faults`` for a row that it cannot use, and reads the rest; a file
that cannot be opened is an ``OSError``. A pattern that cannot work is a ``UserError``.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, safe_text
from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins with one of these is a formula in a spreadsheet."""
COLUMNS = ("tokens", "val_loss", "run", "seed", "arm", "seconds", "ms", "val_loss_bf16")
_TIMES = {"ms": 1e3, "seconds": 1.0}
"""Columns of time, and how many of their units a second has."""
_COUNTS = ("step", "tokens")
_GROUPS = (*_COUNTS, "val_loss", *_TIMES, "seed")
_LARGEST = 1 << 62
_LONGEST_LINE = 1 << 16
"""Longer lines of a text are searched in parts of so many characters, as a file may have no line breaks."""

Row = tuple[int, dict[str, Any]]
"""A line's number, and its values by column."""
Stages = tuple[tuple[float, float], ...]
"""(first step, tokens of each step from there on), by rising steps from 0."""
TOKENS: Stages = ((0.0, 1.0),)
"""For tables that count tokens, not steps."""


def tokens_at(step: float, stages: Stages) -> float:
    """Convert a number of steps to tokens; the size of a step may differ between stages."""
    ends = [start for start, _ in stages[1:]] + [step]
    return sum(
        max(0.0, min(step, end) - start) * tokens for (start, tokens), end in zip(stages, ends, strict=True)
    )


def inert(value: Any) -> Any:
    """Put a ' before a text that a spreadsheet would take for a formula; ``read_csv`` removes it.

    Characters that do not print become visible. Values that are not text are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    text = safe_text(value, keep="\n\r\t")
    return f"'{text}" if text.lstrip("'").startswith(_COMPUTED) else text


def _as_written(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_COMPUTED) else cell


def _is_text(cell: str) -> bool:
    """Tell whether a text was UTF-8: other bytes are read as lone surrogates (``surrogateescape``)."""
    return cell.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in cell)


def read_csv(path: Path, faults: list[str]) -> Iterator[Row]:
    """Yield a CSV's rows, as texts, with their line numbers."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
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


def read_jsonl(path: Path, faults: list[str]) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, or of one JSON array, with their line or place from 1."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        first = next(file, "")
        lines: Iterable[str] = itertools.chain([first], file)
        if first.lstrip().startswith("["):
            text = first + file.read()
            try:
                lines = [json.dumps(one) for one in parse_json(text)]
            except ValueError:
                lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line) if line.strip() else None
            except ValueError as error:
                faults.append(f"{path}:{number}: {f'not JSON: {error}' if _is_text(line) else 'not UTF-8'}")
                continue
            if isinstance(row, dict):
                yield number, row
            elif line.strip():
                faults.append(f"{path}:{number}: not a JSON object")


def read_wandb_chart(path: Path, faults: list[str], metric: str | None = None) -> Iterator[Row]:
    """Yield the rows of a chart's CSV export as (tokens, val_loss, run).

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.
    """
    series: dict[str, tuple[str, str]] = {}
    for number, row in read_csv(path, faults):
        step, *others = row
        if not series:
            named = ((one, one.rpartition(" - ")) for one in others if not one.endswith(("__MIN", "__MAX")))
            series = {one: (run, what) for one, (run, _, what) in named if run and metric in (None, what)}
            metrics = sorted({what for _, what in series.values()})
            if len(metrics) != 1:
                faults.append(
                    f"{path}:1: expected columns 'RUN - METRIC' of one metric, found: "
                    f"{', '.join(metrics) or 'none'} (--metric)"
                )
                return
        for one, (run, _) in series.items():
            yield number, {"tokens": row[step], "val_loss": row[one], "run": run}


def check_patterns(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Compile the user's regular expressions and check the names of their groups.

    Raises:
        UserError: an invalid expression, a group of another name, or a missing group.
    """
    try:
        found = tuple(map(re.compile, patterns))
    except re.error as error:
        raise UserError(f"--pattern: '{error.pattern!s}' is no regular expression: {error}") from None
    groups = {name for pattern in found for name in pattern.groupindex}
    counts, times = groups & set(_COUNTS), groups & set(_TIMES)
    if "val_loss" not in groups or groups - set(_GROUPS) or len(counts) > 1 or (times and not counts):
        raise UserError(
            f"--pattern: expected groups (?P<NAME>…) of {', '.join(_GROUPS)}: val_loss, either step or "
            f"tokens, and a time only beside one of these; got {', '.join(sorted(groups)) or 'none'}"
        )
    return found


def read_text(path: Path, faults: list[str], patterns: Sequence[re.Pattern[str]]) -> Iterator[Row]:
    """Yield a row for each ``val_loss`` that a pattern finds in a text.

    A group keeps its value from an earlier line until it matches again. A file is one run; its first seed
    counts. If no group counts steps or tokens, only the last loss is yielded, as the final one.
    """
    rows: list[Row] = []
    known: dict[str, Any] = {name: None for pattern in patterns for name in pattern.groupindex}
    seed = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            matches = filter(None, (pattern.search(line) for pattern in patterns))
            groups = (pair for match in matches for pair in match.groupdict().items())
            found = {name: text for name, text in groups if text is not None}
            seed = found.pop("seed", None) if seed is None else seed
            known |= found
            if "val_loss" in found:
                rows.append((number, known.copy()))
    if not rows:
        faults.append(f"{path}: no line matches the --pattern of val_loss")
    for number, row in rows if known.keys() & set(_COUNTS) else rows[-1:]:
        yield number, {**row, "seed": seed}


def runs_of(
    path: Path, rows: Iterable[Row], faults: list[str], names: Mapping[str, str], stages: Stages = TOKENS
) -> dict[str | None, list[ImportedRun]]:
    """Group rows into runs by arm, or under None without a column of arms.

    ``names``: names of the columns, ours → theirs. Without ``run`` a file is one run, or one for each seed.
    ``seconds`` and ``ms``, since training began, are read only if they are in ``names``: a column of that
    name may be the time of a step. ``stages``: the tokens of a step, if the ``tokens`` column counts steps.

    Raises:
        UserError: a named column is missing; rows belong to several runs that nothing distinguishes; tokens
            are not whole numbers and have no unit.
    """
    places = {name: names.get(name, name) for name in COLUMNS}
    has: dict[Any, None] = {}
    # Of each run its losses, losses in bf16, and seconds since its start, by tokens.
    runs: dict[tuple[Any, ...], tuple[dict[int, float], ...]] = {}
    finals, several = None, ""
    for number, row in rows:
        has |= dict.fromkeys(row)
        told = {name: row.get(place) for name, place in places.items()}
        if told["val_loss"] in ("", None):  # a training row between evaluations
            continue
        if finals is None:
            finals = "tokens" not in {*names, *has}
        step, loss = (0.0 if finals else _number(told["tokens"])), _number(told["val_loss"])
        at = _LARGEST if step is None or not 0 <= step < _LARGEST else tokens_at(step, stages)
        if loss is None or at >= _LARGEST:
            bad = "val_loss" if loss is None else "tokens"
            faults.append(f"{path}:{number}: expected a number in '{places[bad]}', got {told[bad]!r}")
            continue
        if stages is TOKENS and not float(at).is_integer():
            raise UserError(
                f"{path}:{number}: expected whole tokens in '{places['tokens']}', got {told['tokens']!r} "
                "(name their unit, such as --tokens-per-step 1e9, or the tokens of a step)"
            )
        arm, name, seed = told["arm"], told["run"], _seed(told["seed"])
        # Runs in two files may have equal final losses.
        own = (str(path),) if finals else ()
        key = (None if arm is None else str(arm).strip(), "" if name is None else str(name), seed, *own)
        (losses, in_bf16, seconds), tokens = runs.setdefault(key, ({}, {}, {})), round(at)
        before = losses.get(tokens)
        if before is not None and (finals or repr(before) != repr(loss)):
            several = several or f"{path}:{number}: losses {before:g} and {loss:g} at {tokens:,} tokens"
        losses.setdefault(tokens, loss)
        if (second := _number(told["val_loss_bf16"])) is not None and math.isfinite(second):
            in_bf16[tokens] = second
        for unit, in_a_second in _TIMES.items():
            if unit in names and (time := _number(told[unit])) is not None:
                seconds[tokens] = time / in_a_second
    listed = safe_text(", ".join(map(str, has)))
    for column in names.values():
        if has and column not in has:
            raise UserError(f"--columns: {path} has no column '{column}' (has {listed})")
    if has and places["val_loss"] not in has:
        faults.append(f"{path}: no column '{places['val_loss']}' (has {listed}); see --columns")
    if finals and "tokens" in has:
        raise UserError(f"{path}: its first loss has no 'tokens', though others have")
    for losses, *_ in runs.values():
        order = list(losses)
        if order not in (sorted(order), sorted(order, reverse=True)):
            several = several or f"{path}: tokens that rise and fall"
    if several:
        hint = "if there are several, name what tells them apart: --columns run=NAME"
        raise UserError(f"{several} of one run ({hint}, of {listed})")
    found: dict[str | None, list[ImportedRun]] = {}
    for key, (losses, in_bf16, seconds) in runs.items():
        arm, name, seed = key[:3]
        source = f"{path}{f' ({name})' * bool(name)}"
        timed = sorted(seconds)
        times = [seconds[tokens] for tokens in timed]
        if times != sorted(times):
            faults.append(f"{source}: the time falls, so it is not since the training began: not read")
            times = []
        passed = times[-1] - times[0] if times else 0.0
        found.setdefault(arm, []).append(
            run_of_losses(
                losses,
                [path.name, *key],
                source=source,
                seed=seed,
                piece=None if finals else (name, seed),
                in_bf16=in_bf16,
                # The mean over the whole run, as a stage may differ from it.
                throughput=((timed[-1], (timed[-1] - timed[0]) / passed),) if 0 < passed < _LARGEST else (),
            )
        )
    return found


def by_pattern(
    runs: Sequence[ImportedRun], arms: Mapping[str, Sequence[str]], faults: list[str]
) -> dict[str, list[ImportedRun]]:
    """Sort runs into arms by shell patterns on their names; a run that matches no arm is a fault."""
    found: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    for run in runs:
        name = run.piece[0] if run.piece else ""
        arm = next((arm for arm, own in arms.items() if any(fnmatchcase(name, one) for one in own)), None)
        if arm is None:
            patterns = ", ".join(one for own in arms.values() for one in own)
            faults.append(f"{run.source}: in no arm (patterns: {patterns})")
        else:
            found[arm].append(run)
    return found


def seeds_by_names(
    arms: Mapping[str, Sequence[ImportedRun]],
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Give runs without a seed that of their name, or of their file's; also return a line for each arm.

    It is, of an arm whose logs tell no seed, the one number in which the names differ, if they differ in
    nothing else.
    """
    seeded, said = {}, []
    for arm, runs in arms.items():
        seeded[arm] = list(runs)
        if any(run.seed is not None for run in runs):
            continue
        names = [(run.piece and run.piece[0]) or PurePath(run.source).stem for run in runs]
        parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=False)
        differ = [part for part in parts if len({*part}) > 1]
        if len(differ) == 1 and len({*differ[0]}) == len(names) and all(map(str.isdecimal, differ[0])):
            (seeds,) = differ
            seeded[arm] = [replace(run, seed=_seed(seed)) for run, seed in zip(runs, seeds, strict=True)]
            said.append(f"{arm}: seeds {', '.join(seeds)} by the names ({names[0]}, …)")
    return seeded, said


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _seed(value: Any) -> int | str | None:
    """Return an integer seed as int, any other as text, and None if empty."""
    if value in ("", None):
        return None
    number = _number(value)
    is_usual = number is not None and abs(number) < 1 << 53 and number.is_integer()
    return int(number) if is_usual and number is not None else str(value).strip()
