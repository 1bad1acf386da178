"""Runs of logs: rows of tables, of charts exported by W&B, and of any log that ``ablate.run.log_rows`` reads.

A table or text that tells no place holds final losses: of a table one row for each run, of a text the last.

How it fails: a row that cannot be used is a line in ``faults``, and the rest is read; a file that cannot be
opened is an ``OSError``. A file that can be read in two ways is a ``UserError``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.base.errors import UserError, safe_text
from ablate.reports.read.imported import run_of_losses
from ablate.reports.read.names import seed_of
from ablate.reports.read.rows import read_csv
from ablate.run.evaluations import AmbiguousError, Places, RunRows, named
from ablate.run.log_rows import LARGEST, TIMES, LogReader, is_blank, is_set, number
from ablate.run.log_text import texts_of
from ablate.run.loss_units import to_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun
    from ablate.reports.read.rows import Row
    from ablate.run.evaluations import Row as LogRow
    from ablate.run.log_rows import Evaluations, LogSource
    from ablate.run.loss_units import LoggedUnit

    RunsByArm = dict[str | None, list[ImportedRun]]
    """Under None without a column of arms."""

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
        step_tokens = None
        if self.stages is not None:
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


class _RunKey(NamedTuple):
    """What tells the runs of a file apart. ``arm``: None without a column of arms."""

    arm: str | None
    name: str
    seed: int | str | None


def _key_of(texts: Mapping[str, Any]) -> _RunKey:
    arm = texts.get("arm")
    name = texts.get("run")
    return _RunKey(
        arm=None if arm is None else str(arm).strip(),
        name="" if name is None else str(name),
        seed=seed_of(texts.get("seed")),
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
        table.add(f"{path}:{line_number}", row)
    table.check_columns()
    if table.final_losses:
        return _final_runs(path, table.final_losses)
    return _runs(path, table.runs, faults, reading, table.hint)


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
        self._all_columns: dict[Any, Any] = {}
        self._row_columns: dict[Any, Any] = {}
        self._present: dict[str, str] = {}
        self._places: list[str] | None = None
        self._sets: dict[str, None] = {}
        self.runs: dict[_RunKey, RunRows] = {}
        self.final_losses: dict[_RunKey, float] = {}

    @property
    def hint(self) -> str:
        """What to type if a file holds several runs."""
        return f"--columns run=NAME, of {self._listed_columns}"

    @property
    def _listed_columns(self) -> str:
        return safe_text(", ".join(map(str, self._all_columns)))

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        """Add a row; one that cannot be used is a fault. ``place``: its file and line."""
        if row.keys() != self._row_columns.keys():
            self._take_columns(row)
        texts = {}
        values: dict[str, float] = {}
        for name, column in self._present.items():
            if name in _TEXTS:
                texts[name] = row[column]
            elif (value := number(row[column])) is not None:
                values[name] = value
        set_name = texts.get("set")
        if not is_blank(set_name):
            self._sets[str(set_name)] = None
            wanted = self._reading.set_name
            if wanted is not None and not is_set(str(set_name), wanted):
                return
        key = _key_of(texts)
        if key not in self.runs:
            self.runs[key] = self._reading.new_run()
        if "val_loss" not in values:
            if is_blank(row.get(self._columns["val_loss"])):
                self.runs[key].add_blank()
            else:
                self._expect_number(place, row, "val_loss")
            return
        if self._places is None:
            self._places = self._find_places()
        if self._places:
            if self._check_places(place, row, values, self._places):
                self.runs[key].add(values)
            return
        loss = values["val_loss"]
        if key in self.final_losses:
            raise UserError(
                f"{place}: losses {self.final_losses[key]:g} and {loss:g} at the end of one run "
                f"{_several_runs(self.hint)}"
            )
        self.final_losses[key] = loss

    def _take_columns(self, row: Mapping[str, Any]) -> None:
        """Note which of the columns a row has; those of a CSV have all the same."""
        self._row_columns = dict.fromkeys(row)
        self._all_columns |= self._row_columns
        for column in _SAMPLE_COUNTS:
            if column in row and self._columns["samples"] not in row:
                self._columns["samples"] = column
        self._present = {
            name: column for name, column in self._columns.items() if column in row
        }
        if (
            "samples" in self._present
            and "tokens" in self._reading.names
            and self._reading.stages is None
        ):
            # The samples show whether these are steps of equal size.
            self._reading = replace(self._reading, stages=((0.0, 1.0),))

    def _find_places(self) -> list[str]:
        """Return which columns tell the place; none if the table holds final losses."""
        places = []
        for name in ("tokens", "step", "samples"):
            is_named = name != "samples" and name in self._reading.names
            if is_named or name in self._present:
                places.append(name)
        return places

    def _check_places(
        self,
        place: str,
        row: Mapping[str, Any],
        values: dict[str, float],
        names: list[str],
    ) -> bool:
        """Leave the places that count in the values of a row; tell whether there is one."""
        for name in names:
            if not 0 <= values.get(name, 0.0) < LARGEST:
                del values[name]
        if values.keys().isdisjoint(names):
            self._expect_number(place, row, names[0])
            return False
        if "tokens" not in values:
            return True
        if self._reading.stages is not None and "step" not in values:
            values["step"] = values.pop("tokens")  # in the user's unit
        elif not values["tokens"].is_integer():
            column = self._columns["tokens"]
            raise UserError(
                f"{place}: expected whole tokens in '{column}', got {row[column]!r} (name their unit, such as "
                "--tokens-per-step 1e9, or the tokens of a step)"
            )
        return True

    def _expect_number(self, place: str, row: Mapping[str, Any], name: str) -> None:
        column = self._columns[name]
        self._faults.append(
            f"{place}: expected a number in '{column}', got {row.get(column)!r}"
        )

    def check_columns(self) -> None:
        """Say which columns are missing.

        Raises:
            UserError: one that the user named is; or there are several evaluation sets.
        """
        listed = self._listed_columns
        if self._all_columns:
            for column in self._reading.names.values():
                if column not in self._all_columns:
                    raise UserError(
                        f"--columns: {self._path} has no column '{column}' (has {listed})"
                    )
            losses = self._columns["val_loss"]
            if losses not in self._all_columns:
                self._faults.append(
                    f"{self._path}: no column '{losses}' (has {listed}); see --columns"
                )
        _check_sets(self._path, self._sets, self._reading.set_name)


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
    _check_sets(path, reader.sets, reading.set_name)
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
    hint = "name it by a group (?P<run>…) of a --pattern"
    return _runs(path, runs, faults, reading, hint)


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


def _check_sets(path: Path, sets: Iterable[str], wanted: str | None) -> None:
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
    points: list[tuple[float, float]] = []
    for row in rows:
        for name, num_per_second in TIMES.items():
            if name in row:
                points.append((row["tokens"], row[name] / num_per_second))
    if not points:
        return ()
    times = [seconds for _, seconds in points]
    if times != sorted(times):
        faults.append(
            f"{source}: the time falls, so it is not since the training began: not read"
        )
        return ()
    seconds = times[-1] - times[0]
    if not 0 < seconds < LARGEST:
        return ()
    first, _ = points[0]
    last, _ = points[-1]
    return ((round(last), (last - first) / seconds),)
