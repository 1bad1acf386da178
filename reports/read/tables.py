"""Runs of logs: rows of tables, of charts exported by W&B, and of any log that ``ablate.run.log_rows`` reads.

A table or text that tells no place holds final losses: of a table one row for each run, of a text the last.

How it fails: every reader adds a line to ``faults`` for a row that it cannot use, and reads the rest; a file
that cannot be opened is an ``OSError``. A file that can be read in two ways is a ``UserError``.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, safe_text
from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses
from ablate.run.evaluations import AmbiguousError, Places, RunRows, named
from ablate.run.log_rows import LARGEST, PLACES, LogReader, is_blank, is_set, number
from ablate.run.log_text import open_text, texts_of
from ablate.run.loss_units import to_stored

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.run.evaluations import Curve
    from ablate.run.log_rows import Evaluations, LogSource
    from ablate.run.loss_units import LoggedUnit

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins with one of these is a formula in a spreadsheet."""
COLUMNS = (
    "tokens", "step", "samples", "val_loss", "run", "seed", "arm", "set", "loss", "seconds", "ms",
    "val_loss_bf16",
)  # fmt: skip
_ONLY_NAMED = ("set", "loss", "seconds", "ms")
"""Columns that are read if ``--columns`` names them: of that name alone they may be something else."""
_SAMPLE_COUNTS = ("consumed_samples", "consumed_train_samples")
"""What trainers call the column of samples seen."""
_TIMES = {"ms": 1e3, "seconds": 1.0}
"""Columns of time, and how many of their units a second has."""

Row = tuple[int, Mapping[str, Any]]
"""A line's number, and its values by column."""
Stages = tuple[tuple[float, float], ...]
"""(first step, tokens of each step from there on), by rising steps from 0."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows of files become evaluations.

    ``names``: names of a table's columns, ours → theirs. ``stages``: the tokens of a step, or of the unit in
    which a table counts tokens. ``sample_tokens``: of a sample. ``set_name``: the evaluation set that counts.
    ``loss_unit``: of the losses (``ablate.run.loss_units``). ``evaluations``: which rows are evaluations,
    where the user says it. ``is_repeated``: whether the trainer repeats its last one.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    stages: Stages | None = None
    sample_tokens: int | None = None
    set_name: str | None = None
    loss_unit: LoggedUnit = "nats"
    evaluations: Evaluations | None = None
    is_repeated: bool = False

    def new_run(self) -> RunRows:
        """Return a run without rows."""
        step_tokens = None if self.stages is None else partial(tokens_at, stages=self.stages)
        places = Places(step_tokens, self.sample_tokens)
        return RunRows(places=places, rule=self.evaluations, is_repeated=self.is_repeated)


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
    with open_text(path, newline="") as file:
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
    with open_text(path) as file:
        first = next(file, "")
        lines: Iterable[str] = itertools.chain([first], file)
        if first.lstrip().startswith("["):
            text = first + file.read()
            try:
                lines = [json.dumps(entry) for entry in parse_json(text)]
            except ValueError:
                lines = text.splitlines()
        for line_number, line in enumerate(lines, 1):
            try:
                row = parse_json(line) if line.strip() else None
            except ValueError as error:
                fault = f"not JSON: {error}" if _is_text(line) else "not UTF-8"
                faults.append(f"{path}:{line_number}: {fault}")
                continue
            if isinstance(row, dict):
                yield line_number, row
            elif line.strip():
                faults.append(f"{path}:{line_number}: not a JSON object")


def read_wandb_chart(path: Path, faults: list[str], metric: str | None = None) -> Iterator[Row]:
    """Yield the rows of a chart's CSV export as (tokens, val_loss, run).

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.

    Raises:
        UserError: its values are means of several points, so that they are no evaluations of a run.
    """
    series: dict[str, tuple[str, str]] = {}
    for line_number, row in read_csv(path, faults):
        step, *others = row
        if not series:
            named = ((name, name.rpartition(" - ")) for name in others if not name.endswith(_BOUNDS))
            series = {name: (run, kind) for name, (run, _, kind) in named if run and metric in (None, kind)}
            metrics = sorted({kind for _, kind in series.values()})
            if len(metrics) != 1:
                faults.append(
                    f"{path}:1: expected columns 'RUN - METRIC' of one metric, found: "
                    f"{', '.join(metrics) or 'none'} (--metric)"
                )
                return
        for name, (run, _) in series.items():
            low, high = (number(row.get(f"{name}{bound}")) for bound in _BOUNDS)
            if low is not None and high is not None and low < high:
                raise UserError(
                    f"{path}:{line_number}: '{run}' is a mean of values from {low:g} to {high:g}, so its "
                    "seeds are gone (export the chart without grouping, and without sampling)"
                )
            yield line_number, {"tokens": row[step], "val_loss": row[name], "run": run}


_BOUNDS = ("__MIN", "__MAX")

_Key = tuple[str | None, str, int | str | None]
"""Arm (None without a column of arms), name and seed of a run."""
_ONLY_RUN: _Key = (None, "", None)


def runs_of_table(
    path: Path, rows: Iterable[Row], faults: list[str], reading: Reading
) -> dict[str | None, list[ImportedRun]]:
    """Group a table's rows into runs by arm, or under None without a column of arms.

    Without ``run`` a file is one run, or one for each seed. ``seconds`` and ``ms`` are since training began.

    Raises:
        UserError: a named column is missing; rows belong to several runs that nothing distinguishes; tokens
            are not whole numbers and have no unit.
    """
    table = _Table(path, reading, faults)
    for line_number, row in rows:
        table.add(line_number, row)
    table.check_columns()
    if table.finals:
        return _final_runs(path, table.finals, hint=table.hint)
    return _runs(path, table.runs, faults, reading, hint=table.hint)


class _Table:
    """A table as it is read: its columns, and the rows of its runs."""

    def __init__(self, path: Path, reading: Reading, faults: list[str]) -> None:
        self._path = path
        self._reading = reading
        self._faults = faults
        names = reading.names
        self._columns = {name: names.get(name, name) for name in COLUMNS if name not in _ONLY_NAMED}
        self._columns |= names
        self._has: dict[Any, None] = {}
        self._keys: Collection[Any] = ()
        self._present: dict[str, str] = {}
        self._has_sets = self._has_names = False
        self._more: list[str] = []
        self._place_names: tuple[str, ...] | None = None
        self._sets: dict[str, None] = {}
        self.runs: dict[_Key, RunRows] = {}
        self.finals: list[tuple[_Key, int, float]] = []

    @property
    def hint(self) -> str:
        """What to type if a file holds several runs."""
        return f"--columns run=NAME, of {safe_text(', '.join(map(str, self._has)))}"

    def add(self, line_number: int, row: Mapping[str, Any]) -> None:
        """Add a row; one that cannot be used is a fault."""
        if row.keys() != self._keys:
            self._take_columns(row)
        values = {name: row[column] for name, column in self._present.items()}
        if self._has_sets and not self._is_wanted(values):
            return
        loss = number(values.get("val_loss"))
        if loss is None and not is_blank(values.get("val_loss")):
            self._expected_number(line_number, "val_loss", values)
            return
        key = _key(values) if self._has_names else _ONLY_RUN
        if self._place_names is None and loss is not None:
            self._place_names = self._places_of(row)
        if self._place_names == ():
            if loss is not None:
                self.finals.append((key, line_number, loss))
            return
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self._reading.new_run()
        if loss is None:
            run.add_blank()
            return
        entry = self._read_places(line_number, values)
        if entry is None:
            return
        entry["val_loss"] = loss
        for name in self._more:
            if (value := number(values[name])) is not None:
                entry[name] = value
        run.add(entry)

    def _take_columns(self, row: Mapping[str, Any]) -> None:
        """Note which of the columns a row has; those of a CSV have all the same."""
        self._keys = row.keys()
        self._has.update(dict.fromkeys(row))
        self._present = {name: column for name, column in self._columns.items() if column in row}
        for column in _SAMPLE_COUNTS:
            if column in row:
                self._present.setdefault("samples", column)
        if "samples" in self._present and "tokens" in self._reading.names and self._reading.stages is None:
            # The samples show whether these are steps of equal size.
            self._reading = replace(self._reading, stages=((0.0, 1.0),))
        self._has_sets = "set" in self._present
        self._has_names = not self._present.keys().isdisjoint(("arm", "run", "seed"))
        self._more = [name for name in ("val_loss_bf16", "loss", *_TIMES) if name in self._present]

    def _is_wanted(self, values: Mapping[str, Any]) -> bool:
        """Tell whether a row is of the evaluation set that counts."""
        name = values.get("set")
        if is_blank(name):
            return True
        self._sets[str(name)] = None
        wanted = self._reading.set_name
        return wanted is None or is_set(str(name), wanted)

    def _places_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return which columns tell the place; none if the table holds final losses."""
        places = [name for name in ("tokens", "step") if name in self._reading.names]
        places = places or [name for name in ("tokens", "step") if name in row]
        return (*places, "samples") if "samples" in self._present else tuple(places)

    def _read_places(self, line_number: int, values: Mapping[str, Any]) -> dict[str, float] | None:
        places: dict[str, float] = {}
        names = self._place_names or ()
        for name in names:
            place = number(values.get(name))
            if place is not None and 0 <= place < LARGEST:
                places[name] = place
        if not places:
            self._expected_number(line_number, names[0], values)
            return None
        stages = self._reading.stages
        if "tokens" in places and stages is not None and "step" not in places:
            places["step"] = places.pop("tokens")  # in the user's unit
        if "tokens" in places and not places["tokens"].is_integer():
            raise UserError(
                f"{self._path}:{line_number}: expected whole tokens in '{self._columns['tokens']}', got "
                f"{values['tokens']!r} (name their unit, such as --tokens-per-step 1e9, or the tokens of a "
                "step)"
            )
        return places

    def _expected_number(self, line_number: int, name: str, values: Mapping[str, Any]) -> None:
        expected = f"expected a number in '{self._columns[name]}', got {values.get(name)!r}"
        self._faults.append(f"{self._path}:{line_number}: {expected}")

    def check_columns(self) -> None:
        """Say which columns are missing.

        Raises:
            UserError: one that the user named is; or there are several evaluation sets.
        """
        listed = safe_text(", ".join(map(str, self._has)))
        for column in self._reading.names.values():
            if self._has and column not in self._has:
                raise UserError(f"--columns: {self._path} has no column '{column}' (has {listed})")
        losses = self._columns["val_loss"]
        if self._has and losses not in self._has:
            self._faults.append(f"{self._path}: no column '{losses}' (has {listed}); see --columns")
        check_sets(self._path, self._sets, self._reading.set_name)


def _key(values: Mapping[str, Any]) -> _Key:
    arm = values.get("arm")
    name = values.get("run")
    return (
        None if arm is None else str(arm).strip(),
        "" if name is None else str(name),
        _seed(values.get("seed")),
    )


def runs_of_log(
    path: Path, source: LogSource, faults: list[str], reading: Reading
) -> dict[str | None, list[ImportedRun]]:
    """Read the runs of a log by its format or its patterns; a file is one run, or one for each ``run``.

    Raises:
        OSError: the file cannot be read.
        UserError: the log can be read in two ways, or nothing tells its tokens.
    """
    reader = LogReader(source)
    runs: dict[_Key, RunRows] = {}
    finals: dict[_Key, tuple[_Key, int, float]] = {}
    has_loss = False
    for line_number, row in _rows_of(path, source, reader, faults):
        if "not_read" in row:
            fault = f"expected a number as validation loss, got {row['not_read']!r}"
            faults.append(f"{path}:{line_number}: {fault}")
            continue
        has_loss = has_loss or "val_loss" in row
        key = _key({"run": row.pop("run", None), "seed": row.pop("seed", None)})
        if row.keys().isdisjoint(PLACES):
            finals[key] = (key, line_number, row["val_loss"])
            continue
        times = {name: read for name in _TIMES if (read := number(row.pop(name, None))) is not None}
        if key not in runs:
            runs[key] = reading.new_run()
        runs[key].add({**row, **times})
    check_sets(path, reader.sets, reading.set_name)
    if not has_loss:
        form = f"log of {source.preset}" if source.preset else "--pattern"
        faults.append(f"{path}: no validation loss in it by the {form}")
        return {}
    hint = "name it by a group (?P<run>…) of a --pattern"
    if not runs:
        if reading.stages is not None:
            raise UserError(f"--tokens-per-step: {path} tells no step (leave the option out)")
        return _final_runs(path, finals.values(), hint=hint)
    return _runs(path, runs, faults, reading, hint=hint)


def _rows_of(
    path: Path, source: LogSource, reader: LogReader, faults: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a log with the numbers of their lines."""
    if source.form == "csv":
        for line_number, entry in read_csv(path, faults):
            yield from ((line_number, row) for row in reader.rows_of(entry))
    else:
        for line_number, text in texts_of(path, source):
            yield from ((line_number, row) for row in reader.rows(text))


def check_sets(path: Path, sets: Iterable[str], wanted: str | None) -> None:
    """Raise ``UserError`` if a log has several evaluation sets and none is named, or not the named one."""
    names = list(sets)
    listed = safe_text(", ".join(names))
    if wanted is None and len(names) > 1:
        raise UserError(f"{path}: its evaluations are on several sets: {listed} (name one: --set {names[0]})")
    if wanted is not None and not any(is_set(name, wanted) for name in names):
        raise UserError(f"--set: {path} has no set '{wanted}' (has {listed or 'no names of sets'})")


def _final_runs(
    path: Path, finals: Iterable[tuple[_Key, int, float]], *, hint: str
) -> dict[str | None, list[ImportedRun]]:
    """Make runs of final losses, one for each key."""
    losses: dict[_Key, float] = {}
    runs: dict[str | None, list[ImportedRun]] = {}
    for key, line_number, loss in finals:
        if key in losses:
            raise UserError(
                f"{path}:{line_number}: losses {losses[key]:g} and {loss:g} at the end of one run "
                f"(if there are several, name what tells them apart: {hint})"
            )
        losses[key] = loss
        run = run_of_losses({0: loss}, [path.name, *key, str(path)], source=_source(path, key), seed=key[2])
        runs.setdefault(key[0], []).append(run)
    return runs


def _source(path: Path, key: _Key) -> str:
    return f"{path} ({key[1]})" if key[1] else str(path)


def _runs(
    path: Path, rows_by_key: Mapping[_Key, RunRows], faults: list[str], reading: Reading, *, hint: str
) -> dict[str | None, list[ImportedRun]]:
    runs: dict[str | None, list[ImportedRun]] = {}
    for key, rows in rows_by_key.items():
        try:
            curve = rows.curve()
        except AmbiguousError as error:
            what = f"{path}: {error}"
            if not error.is_of_runs:
                raise UserError(what) from None
            raise UserError(
                f"{what} of one run (if there are several, name what tells them apart: {hint})"
            ) from None
        if not curve.rows and curve.diverged is None:
            continue
        source = _source(path, key)
        losses: dict[int, float] = {}
        in_bf16: dict[int, float] = {}
        for tokens, row in zip(curve.tokens, curve.rows, strict=True):
            if reading.loss_unit == "perplexity" and row["val_loss"] <= 0:
                raise UserError(f"{path}: a perplexity is above 0, not {row['val_loss']:g} at {named(row)}")
            losses[round(tokens)] = to_stored(row["val_loss"], reading.loss_unit)
            if math.isfinite(row.get("val_loss_bf16", math.nan)):
                in_bf16[round(tokens)] = to_stored(row["val_loss_bf16"], reading.loss_unit)
        run = run_of_losses(
            losses,
            [path.name, *key],
            diverged=curve.diverged,
            source=source,
            seed=key[2],
            piece=(key[1], key[2]),
            in_bf16=in_bf16,
            throughput=_throughput(curve, source, faults),
            notes=curve.notes,
        )
        runs.setdefault(key[0], []).append(run)
    return runs


def _throughput(curve: Curve, source: str, faults: list[str]) -> tuple[tuple[int, float], ...]:
    """Return the mean throughput of the whole run, as a stage may differ from it; none without times."""
    timed: list[tuple[float, float]] = []
    for tokens, row in zip(curve.tokens, curve.rows, strict=True):
        for unit, in_a_second in _TIMES.items():
            if unit in row:
                timed.append((tokens, row[unit] / in_a_second))
    if any(after < before for (_, before), (_, after) in itertools.pairwise(timed)):
        faults.append(f"{source}: the time falls, so it is not since the training began: not read")
        return ()
    if not timed:
        return ()
    first, last = timed[0], timed[-1]
    seconds = last[1] - first[1]
    return ((round(last[0]), (last[0] - first[0]) / seconds),) if 0 < seconds < LARGEST else ()


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
        if len({*names}) < len(names):  # the folders tell them apart
            names = [str(PurePath(run.source).with_suffix("")) for run in runs]
        parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=False)
        differ = [part for part in parts if len({*part}) > 1]
        if len(differ) == 1 and len({*differ[0]}) == len(names) and all(map(str.isdecimal, differ[0])):
            (seeds,) = differ
            seeded[arm] = [replace(run, seed=_seed(seed)) for run, seed in zip(runs, seeds, strict=True)]
            said.append(f"{arm}: seeds {', '.join(seeds)} by the names ({names[0]}, …)")
    return seeded, said


def _seed(value: Any) -> int | str | None:
    """Return an integer seed as int, any other as text, and None if empty."""
    if value in ("", None):
        return None
    seed = number(value)
    is_usual = seed is not None and abs(seed) < 1 << 53 and seed.is_integer()
    return int(seed) if is_usual and seed is not None else str(value).strip()
