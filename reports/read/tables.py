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
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.base.errors import UserError, safe_text
from ablate.base.files import parse_json
from ablate.reports.read.imported import run_of_losses
from ablate.run.evaluations import AmbiguousError, Places, RunRows, named
from ablate.run.log_rows import LARGEST, TIMES, LogReader, is_blank, is_set, number
from ablate.run.log_text import open_text, texts_of
from ablate.run.loss_units import to_stored

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.run.evaluations import Row as LogRow
    from ablate.run.log_rows import Evaluations, LogSource
    from ablate.run.loss_units import LoggedUnit

    RunsByArm = dict[str | None, list[ImportedRun]]
    """Under None without a column of arms."""

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
_TEXTS = ("arm", "run", "seed", "set")
"""Columns of text; all others hold numbers."""
_SEED = re.compile(r"(?:^|[/._-])(?:seed|version|run)[=_-]?(\d+)")
_LAST_NUMBER = re.compile(r"(.*)[/._-]\d+(?=[/._-]|$)")
"""A number that is no part of a word: the 0 of bf16-0, not the 16."""
_BOUNDS = ("__MIN", "__MAX")
"""What W&B adds to the name of a column that holds the least or largest of several points."""

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
        if self.stages is None:
            step_tokens = None
        else:
            step_tokens = partial(tokens_at, stages=self.stages)
        places = Places(step_tokens, self.sample_tokens)
        return RunRows(
            places=places, rule=self.evaluations, is_repeated=self.is_repeated
        )


def tokens_at(step: float, stages: Stages) -> float:
    """Convert a number of steps to tokens; the size of a step may differ between stages."""
    ends = [start for start, _ in stages[1:]] + [step]
    return sum(
        max(0.0, min(step, end) - start) * tokens
        for (start, tokens), end in zip(stages, ends, strict=True)
    )


def inert(value: Any) -> Any:
    """Put a ' before a text that a spreadsheet would take for a formula; ``read_csv`` removes it.

    Characters that do not print become visible. Values that are not text are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    text = safe_text(value, keep="\n\r\t")
    if text.lstrip("'").startswith(_COMPUTED):
        return f"'{text}"
    return text


def _as_written(cell: str) -> str:
    if cell.startswith("'") and cell.lstrip("'").startswith(_COMPUTED):
        return cell[1:]
    return cell


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
                    faults.append(
                        f"{path}:{reader.line_num}: expected {len(reader.fieldnames or ())} fields"
                    )
                elif not all(map(_is_text, row.values())):
                    faults.append(f"{path}:{reader.line_num}: not UTF-8")
                else:
                    yield (
                        reader.line_num,
                        {name: _as_written(cell) for name, cell in row.items()},
                    )
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


def read_wandb_chart(
    path: Path, faults: list[str], metric: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a chart's CSV export as (tokens, val_loss, run).

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.

    Raises:
        UserError: its values are means of several points, so that they are no evaluations of a run.
    """
    runs: dict[str, str] = {}  # by the column of their values
    for line_number, row in read_csv(path, faults):
        step, *columns = row
        if not runs:
            metrics = set()
            for column in columns:
                run, _, metric_of_run = column.rpartition(" - ")
                if (
                    run
                    and not column.endswith(_BOUNDS)
                    and metric in (None, metric_of_run)
                ):
                    runs[column] = run
                    metrics.add(metric_of_run)
            if len(metrics) != 1:
                faults.append(
                    f"{path}:1: expected columns 'RUN - METRIC' of one metric, found: "
                    f"{', '.join(sorted(metrics)) or 'none'} (--metric)"
                )
                return
        for column, run in runs.items():
            low, high = (number(row.get(column + bound)) for bound in _BOUNDS)
            if low is not None and high is not None and low < high:
                raise UserError(
                    f"{path}:{line_number}: '{run}' is a mean of values from {low:g} to {high:g}, so its "
                    "seeds are gone (export the chart without grouping, and without sampling)"
                )
            yield (
                line_number,
                {"tokens": row[step], "val_loss": row[column], "run": run},
            )


class _RunKey(NamedTuple):
    """What tells the runs of a file apart. ``arm``: None without a column of arms."""

    arm: str | None = None
    name: str = ""
    seed: int | str | None = None


_ONLY_RUN = _RunKey()


def _key_of(texts: Mapping[str, Any]) -> _RunKey:
    arm = texts.get("arm")
    name = texts.get("run")
    return _RunKey(
        arm=None if arm is None else str(arm).strip(),
        name="" if name is None else str(name),
        seed=_seed(texts.get("seed")),
    )


def runs_of_table(
    path: Path, rows: Iterable[Row], faults: list[str], reading: Reading
) -> RunsByArm:
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
    if table.final_losses:
        return _final_runs(path, table.final_losses)
    return _runs(path, table.runs, faults, reading, hint=table.hint)


class _Table:
    """The columns of a table, and the rows of its runs.

    ``final_losses``: of the runs of a table without a place.
    """

    def __init__(self, path: Path, reading: Reading, faults: list[str]) -> None:
        self._path = path
        self._reading = reading
        self._faults = faults
        self._columns = {name: name for name in COLUMNS if name not in _ONLY_NAMED}
        if "tokens" in reading.names or "step" in reading.names:
            del self._columns["tokens"], self._columns["step"]
        self._columns |= reading.names
        self._all_columns: dict[Any, None] = {}
        self._columns_of_row: Collection[Any] = ()
        self._texts: dict[str, str] = {}
        self._numbers: dict[str, str] = {}
        self._places: list[str] | None = None
        self._sets: dict[str, None] = {}
        self.runs: dict[_RunKey, RunRows] = defaultdict(
            lambda: self._reading.new_run()  # noqa: PLW0108  another reading may take its place
        )
        self.final_losses: dict[_RunKey, float] = {}

    @property
    def hint(self) -> str:
        """What to type if a file holds several runs."""
        return f"--columns run=NAME, of {self._listed_columns}"

    @property
    def _listed_columns(self) -> str:
        return safe_text(", ".join(map(str, self._all_columns)))

    def add(self, line_number: int, row: Mapping[str, Any]) -> None:
        """Add a row; one that cannot be used is a fault."""
        if row.keys() != self._columns_of_row:
            self._take_columns(row)
        key = _ONLY_RUN
        if self._texts:
            texts = {name: row[column] for name, column in self._texts.items()}
            if not self._is_wanted(texts.get("set")):
                return
            key = _key_of(texts)
        values: dict[str, float] = {}
        for name, column in self._numbers.items():
            value = number(row[column])
            if value is not None:
                values[name] = value
        if "val_loss" not in values:
            if is_blank(row.get(self._columns["val_loss"])):
                self.runs[key].add_blank()
            else:
                self._expect_number(line_number, row, "val_loss")
            return
        if self._places is None:
            self._places = self._places_in(row)
        if self._places:
            if self._check_places(line_number, row, values):
                self.runs[key].add(values)
            return
        loss = values["val_loss"]
        if key in self.final_losses:
            raise UserError(
                f"{self._path}:{line_number}: losses {self.final_losses[key]:g} and {loss:g} at the end of "
                f"one run {_several_runs(self.hint)}"
            )
        self.final_losses[key] = loss

    def _take_columns(self, row: Mapping[str, Any]) -> None:
        """Note which of the columns a row has; those of a CSV have all the same."""
        self._columns_of_row = row.keys()
        self._all_columns |= dict.fromkeys(row)
        for column in _SAMPLE_COUNTS:
            if column in row and self._columns["samples"] not in row:
                self._columns["samples"] = column
        present = {
            name: column for name, column in self._columns.items() if column in row
        }
        self._texts = {
            name: column for name, column in present.items() if name in _TEXTS
        }
        self._numbers = {
            name: column for name, column in present.items() if name not in _TEXTS
        }
        if (
            "samples" in present
            and "tokens" in self._reading.names
            and self._reading.stages is None
        ):
            # The samples show whether these are steps of equal size.
            self._reading = replace(self._reading, stages=((0.0, 1.0),))

    def _is_wanted(self, set_name: Any) -> bool:
        """Tell whether a row is of the evaluation set that counts."""
        if is_blank(set_name):
            return True
        self._sets[str(set_name)] = None
        wanted = self._reading.set_name
        return wanted is None or is_set(str(set_name), wanted)

    def _places_in(self, row: Mapping[str, Any]) -> list[str]:
        """Return which columns tell the place; none if the table holds final losses."""
        named = self._reading.names
        places = [
            name
            for name in ("tokens", "step")
            if name in named or self._columns.get(name) in row
        ]
        if "samples" in self._numbers:
            places.append("samples")
        return places

    def _check_places(
        self, line_number: int, row: Mapping[str, Any], values: dict[str, float]
    ) -> bool:
        """Leave the places that count in the values of a row; tell whether there is one."""
        assert self._places is not None
        has_place = False
        for name in self._places:
            if 0 <= values.get(name, -1.0) < LARGEST:
                has_place = True
            else:
                values.pop(name, None)
        if not has_place:
            self._expect_number(line_number, row, self._places[0])
            return False
        if "tokens" not in values:
            return True
        if self._reading.stages is not None and "step" not in values:
            values["step"] = values.pop("tokens")  # in the user's unit
        elif not values["tokens"].is_integer():
            column = self._columns["tokens"]
            raise UserError(
                f"{self._path}:{line_number}: expected whole tokens in '{column}', got {row[column]!r} (name "
                "their unit, such as --tokens-per-step 1e9, or the tokens of a step)"
            )
        return True

    def _expect_number(
        self, line_number: int, row: Mapping[str, Any], name: str
    ) -> None:
        column = self._columns[name]
        self._faults.append(
            f"{self._path}:{line_number}: expected a number in '{column}', got {row.get(column)!r}"
        )

    def check_columns(self) -> None:
        """Say which columns are missing.

        Raises:
            UserError: one that the user named is; or there are several evaluation sets.
        """
        if self._all_columns:
            for column in self._reading.names.values():
                if column not in self._all_columns:
                    raise UserError(
                        f"--columns: {self._path} has no column '{column}' (has {self._listed_columns})"
                    )
            losses = self._columns["val_loss"]
            if losses not in self._all_columns:
                listed = self._listed_columns
                self._faults.append(
                    f"{self._path}: no column '{losses}' (has {listed}); see --columns"
                )
        check_sets(self._path, self._sets, self._reading.set_name)


def runs_of_log(
    path: Path, source: LogSource, faults: list[str], reading: Reading
) -> RunsByArm:
    """Read the runs of a log by its format or its patterns; a file is one run, or one for each ``run``.

    Raises:
        OSError: the file cannot be read.
        UserError: the log can be read in two ways, or nothing tells its tokens.
    """
    reader = LogReader(source)
    runs: dict[_RunKey, RunRows] = defaultdict(reading.new_run)
    final_losses: dict[_RunKey, float] = {}
    has_place = source.has_place
    has_loss = False
    for line_number, row in _rows_of(path, source, reader, faults):
        if "not_read" in row:
            fault = f"expected a number as validation loss, got {row['not_read']!r}"
            faults.append(f"{path}:{line_number}: {fault}")
            continue
        has_loss = has_loss or "val_loss" in row
        key = _key_of({"run": row.pop("run", None), "seed": row.pop("seed", None)})
        if has_place:
            runs[key].add(row)
        elif "val_loss" in row:
            final_losses[key] = row["val_loss"]
    check_sets(path, reader.sets, reading.set_name)
    if not has_loss:
        form = f"log of {source.preset}" if source.preset else "--pattern"
        faults.append(f"{path}: no validation loss in it by the {form}")
        return {}
    if final_losses:
        if reading.stages is not None:
            raise UserError(
                f"--tokens-per-step: {path} tells no step (leave the option out)"
            )
        return _final_runs(path, final_losses)
    return _runs(
        path, runs, faults, reading, hint="name it by a group (?P<run>…) of a --pattern"
    )


def _rows_of(
    path: Path, source: LogSource, reader: LogReader, faults: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a log with the numbers of their lines."""
    if source.format.form == "csv":
        for line_number, entry in read_csv(path, faults):
            for row in reader.rows_of(entry):
                yield line_number, row
    else:
        for line_number, text in texts_of(path, source):
            for row in reader.rows(text):
                yield line_number, row


def check_sets(path: Path, sets: Iterable[str], wanted: str | None) -> None:
    """Raise ``UserError`` if a log has several evaluation sets and none is named, or not the named one."""
    names = list(sets)
    listed = safe_text(", ".join(names))
    if wanted is None and len(names) > 1:
        raise UserError(
            f"{path}: its evaluations are on several sets: {listed} (name one: --set {names[0]})"
        )
    if wanted is not None and not any(is_set(name, wanted) for name in names):
        raise UserError(
            f"--set: {path} has no set '{wanted}' (has {listed or 'no names of sets'})"
        )


def _several_runs(hint: str) -> str:
    return f"(if there are several, name what tells them apart: {hint})"


def _source(path: Path, key: _RunKey) -> str:
    return f"{path} ({key.name})" if key.name else str(path)


def _final_runs(path: Path, final_losses: Mapping[_RunKey, float]) -> RunsByArm:
    """Make runs of final losses, one for each key."""
    runs: RunsByArm = defaultdict(list)
    for key, loss in final_losses.items():
        identity = [path.name, *key, str(path)]
        runs[key.arm].append(
            run_of_losses({0: loss}, identity, source=_source(path, key), seed=key.seed)
        )
    return runs


def _runs(
    path: Path,
    rows_by_key: Mapping[_RunKey, RunRows],
    faults: list[str],
    reading: Reading,
    *,
    hint: str,
) -> RunsByArm:
    """Make runs of rows, one for each key.

    Raises:
        UserError: the rows can be read in two ways, nothing tells their tokens, or a perplexity is not
            above 0.
    """
    unit = reading.loss_unit
    runs: RunsByArm = defaultdict(list)
    for key, rows in rows_by_key.items():
        try:
            read = rows.evaluations()
        except AmbiguousError as error:
            of_runs = f" of one run {_several_runs(hint)}" if error.is_of_runs else ""
            raise UserError(f"{path}: {error}{of_runs}") from None
        if not read.rows and read.diverged is None:
            continue
        source = _source(path, key)
        losses: dict[int, float] = {}
        in_bf16: dict[int, float] = {}
        for row in read.rows:
            tokens = round(row["tokens"])
            if unit == "perplexity" and row["val_loss"] <= 0:
                raise UserError(
                    f"{path}: a perplexity is above 0, not {row['val_loss']:g} at {named(row)}"
                )
            losses[tokens] = to_stored(row["val_loss"], unit)
            if math.isfinite(row.get("val_loss_bf16", math.nan)):
                in_bf16[tokens] = to_stored(row["val_loss_bf16"], unit)
        run = run_of_losses(
            losses,
            [path.name, *key],
            diverged=read.diverged,
            source=source,
            seed=key.seed,
            piece=(key.name, key.seed),
            in_bf16=in_bf16,
            throughput=_throughput(read.rows, source, faults),
            notes=read.notes,
        )
        runs[key.arm].append(run)
    return runs


def _throughput(
    rows: Iterable[LogRow], source: str, faults: list[str]
) -> tuple[tuple[int, float], ...]:
    """Return the mean throughput of the whole run, as a stage may differ from it; none without times."""
    places: list[float] = []
    times: list[float] = []
    for row in rows:
        for name, num_per_second in TIMES.items():
            if name in row:
                places.append(row["tokens"])
                times.append(row[name] / num_per_second)
    if any(after < before for before, after in itertools.pairwise(times)):
        faults.append(
            f"{source}: the time falls, so it is not since the training began: not read"
        )
        return ()
    seconds = times[-1] - times[0] if times else 0.0
    if not 0 < seconds < LARGEST:
        return ()
    return ((round(places[-1]), (places[-1] - places[0]) / seconds),)


def by_pattern(
    runs: Sequence[ImportedRun], arms: Mapping[str, Sequence[str]], faults: list[str]
) -> dict[str, list[ImportedRun]]:
    """Sort runs into arms by shell patterns on their names; a run that matches no arm is a fault."""
    runs_by_arm: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    for run in runs:
        for arm, patterns in arms.items():
            if any(fnmatchcase(run.name, pattern) for pattern in patterns):
                runs_by_arm[arm].append(run)
                break
        else:
            listed = ", ".join(itertools.chain.from_iterable(arms.values()))
            faults.append(f"{run.source}: in no arm (patterns: {listed})")
    return runs_by_arm


def seeds_by_names(
    arms: Mapping[str, Sequence[ImportedRun]],
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Give runs without a seed that of their name, or of their file's; also return a line for each arm."""
    seeded: dict[str, list[ImportedRun]] = {}
    lines: list[str] = []
    for arm, runs in arms.items():
        seeded[arm] = list(runs)
        if any(run.seed is not None for run in runs):
            continue
        names = [run.name or PurePath(run.source).stem for run in runs]
        if len({*names}) < len(names):  # the folders tell them apart
            names = [str(PurePath(run.source).with_suffix("")) for run in runs]
        seeds = _differing_numbers(names)
        if seeds:
            seeded[arm] = [
                replace(run, seed=_seed(seed))
                for run, seed in zip(runs, seeds, strict=True)
            ]
            lines.append(
                f"{arm}: seeds {', '.join(seeds)} by the names ({names[0]}, …)"
            )
    return seeded, lines


def arms_by_folders(files: Collection[Path]) -> dict[Path, str]:
    """Name each file's arm: its path below the folder of all, without its seed and a name that all files have.

    The seed is the number after ``seed``, ``version`` or ``run``, else the last that is no part of a word; the
    name is empty where nothing else is left.
    """
    if not files:
        return {}
    folder = os.path.commonpath([file.parent for file in files])
    names = [file.relative_to(folder).with_suffix("") for file in files]
    if len({name.name for name in names}) == 1:
        names = [name.parent for name in names]
    arms = {}
    for file, name in zip(files, names, strict=True):
        text = _SEED.sub("", str(name))
        if text == str(name):
            text = _LAST_NUMBER.sub(r"\1", text)
        arms[file] = text.strip("/._-")
    return arms


def _differing_numbers(names: Sequence[str]) -> Sequence[str]:
    """Return the number after ``seed``, or the one number in which names differ; none if nothing tells it."""
    seeds = [seed for name in names for seed in _SEED.findall(name)]
    if len(seeds) == len({*seeds}) == len(names):
        return seeds
    if len({re.sub(r"\d+", "0", name) for name in names}) > 1:
        return ()
    columns = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    differing = [numbers for numbers in columns if len({*numbers}) > 1]
    if len(differing) == 1 and len({*differing[0]}) == len(names):
        return differing[0]
    return ()


def _seed(value: Any) -> int | str | None:
    """Return an integer seed as int, any other as text, and None if empty."""
    if value in ("", None):
        return None
    seed = number(value)
    if seed is not None and abs(seed) < 1 << 53 and seed.is_integer():
        return int(seed)
    return str(value).strip()
