"""The evaluations of a run, from the rows of its log: each counted once, at its tokens.

Logs of others show more than evaluations. NaN may fill the rows between two of them; a trainer may show its
last evaluation on every later row; a resumed run shows some steps again; the batch may grow. All readers of
logs decide these questions here.

How it fails: where a log can be read in two ways, ``AmbiguousError`` says so, and what to type.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.run.log_rows import is_nan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.run.log_rows import Evaluations

    Row = Mapping[str, Any]

_FEWEST = 4
"""Evaluations that differ, from which their distance is known; or intervals without a change that are odd."""
_MOST_EQUAL = 0.25
"""The largest share of evaluations that equal the one before because their digits are few."""
_FEW_DIGITS = 2


class AmbiguousError(ValueError):
    """A log that can be read in two ways, or whose tokens nothing tells.

    ``is_of_runs``: whether it may hold several runs.
    """

    def __init__(self, what: str, *, is_of_runs: bool = False) -> None:
        super().__init__(what)
        self.is_of_runs = is_of_runs


class Places:
    """The tokens at each place of a log: by its own count where it has one, else by steps.

    ``step_tokens``: the tokens after a number of steps. ``sample_tokens``: the tokens of a sample.
    """

    def __init__(
        self,
        step_tokens: Callable[[float], float] | None = None,
        sample_tokens: float | None = None,
    ) -> None:
        self._step_tokens = step_tokens
        self._sample_tokens = sample_tokens
        self._steps: list[float] = []
        self._tokens: list[float] = []
        self._samples: dict[float, float] = {}

    def learn(self, row: Row) -> None:
        """Note the count that a row tells at its step; what is known of later steps is forgotten."""
        step = row.get("step")
        if step is None:
            return
        if "samples" in row:
            self._samples[step] = row["samples"]
        tokens = self._counted(row)
        if tokens is None:
            return
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._tokens.pop()
        self._steps.append(step)
        self._tokens.append(tokens)

    def _counted(self, row: Row) -> float | None:
        """Return the tokens that a row itself tells."""
        if "tokens" in row:
            return float(row["tokens"])
        if "samples" in row and self._sample_tokens is not None:
            return float(row["samples"] * self._sample_tokens)
        return None

    def tokens(self, row: Row) -> float:
        """Return the tokens at a row's place.

        Raises:
            AmbiguousError: nothing tells the tokens of a step or of a sample.
        """
        tokens = self._counted(row)
        if tokens is not None:
            return tokens
        if "step" not in row:
            raise AmbiguousError("samples are counted: give --tokens-per-sample")
        if self._steps:
            return self._between(row["step"])
        if self._step_tokens is None:
            also = " or --tokens-per-sample" if self._samples else ""
            raise AmbiguousError(f"steps are counted: give --tokens-per-step{also}")
        return self._step_tokens(row["step"])

    def _between(self, step: float) -> float:
        """Return the tokens at a step: linear between the counts around it, and beyond the last two."""
        steps = self._steps
        tokens = self._tokens
        index = min(bisect_left(steps, step), len(steps) - 1)
        if steps[index] == step:
            return tokens[index]
        if len(steps) == 1:
            return tokens[0] * (step / steps[0] if steps[0] else 1.0)
        left = max(0, index - 1)
        slope = (tokens[left + 1] - tokens[left]) / (steps[left + 1] - steps[left])
        return max(0.0, tokens[left] + slope * (step - steps[left]))

    def check_batch(self) -> None:
        """Raise ``AmbiguousError`` if steps are counted, and the log's samples show that they differ in size."""
        batches = set()
        for before, after in itertools.pairwise(sorted(self._samples.items())):
            batches.add(round((after[1] - before[1]) / (after[0] - before[0]), 3))
        if len(batches) > 1 and not self._steps:
            raise AmbiguousError(
                f"its batch grows from {min(batches):g} to {max(batches):g} samples: give "
                "--tokens-per-sample instead of --tokens-per-step"
            )

    def disagreement(self) -> str | None:
        """Say where the log's own count differs from steps × their tokens, by more than a step."""
        if self._step_tokens is None or not self._steps:
            return None
        step = self._steps[-1]
        tokens = self._tokens[-1]
        by_steps = self._step_tokens(step)
        if abs(tokens - by_steps) <= self._step_tokens(1.0) * 1.01:
            return None
        return (
            f"its own count is taken: {tokens:,.0f} tokens at step {step:,.0f}, "
            f"not {by_steps:,.0f} by steps"
        )


class Repeats:
    """Tells rows that show an evaluation from rows that show the one before once more.

    A value that changes is an evaluation. One that stays is another if as much training lies between as
    between others. ``rule``: the user's word instead.
    """

    def __init__(self, rule: Evaluations | None = None) -> None:
        self._rule = rule
        self._value: float | None = None
        self._first: float | None = None
        self._place = 0.0
        self._gaps = deque[float](maxlen=31)
        self.dropped = 0

    def is_evaluation(self, place: float, value: float, *, is_fresh: bool) -> bool:
        """Whether a row is an evaluation; to be called with the rows in their order.

        ``is_fresh``: rows without a value lie between this one and the one before.
        """
        is_change = value != self._value
        if not (is_change or is_fresh or self._rule == "rows"):
            # How far evaluations are apart, as known so far.
            interval = self._first or 0.0
            if self._gaps:
                interval = statistics.median(self._gaps)
            if self._rule == "changes" or place - self._place < interval * 0.999:
                self.dropped += 1
                return False
        if self._first is None:
            self._first = place
        elif is_change:
            self._gaps.append(place - self._place)
        self._value = value
        self._place = place
        return True


def check_repeats(rows: Sequence[Row], *, is_usual: bool) -> None:
    """Raise ``AmbiguousError`` if distances do not tell which of the rows are evaluations.

    ``is_usual``: whether the trainer is known to repeat its last evaluation.
    """
    places = [place_of(row) for row in rows]
    changes = places[:1]
    for before, row in itertools.pairwise(rows):
        if row["is_fresh"] or row["val_loss"] != before["val_loss"]:
            changes.append(place_of(row))
    num_repeats = len(rows) - len(changes)
    if not num_repeats:
        return
    ambiguous = AmbiguousError(
        f"{len(rows)} evaluations, or {len(changes)} that later rows repeat? say which: --evaluations rows "
        "or --evaluations changes"
    )
    spacing = statistics.median(_gaps(places))
    gaps = _gaps(changes)
    interval = statistics.median(gaps) if gaps else places[0]
    if not gaps and places[-1] - places[0] >= interval:
        raise ambiguous
    if interval < 1.5 * spacing:  # each row is an evaluation
        if num_repeats > _MOST_EQUAL * len(rows):
            raise ambiguous
        return
    num_digits = max(len(f"{row['val_loss']!r}".partition(".")[2]) for row in rows)
    if not is_usual and (len(changes) < _FEWEST or num_digits <= _FEW_DIGITS):
        raise ambiguous
    gaps.append(places[-1] - changes[-1])
    for index, gap in enumerate(gaps):
        num_intervals = round(gap / interval)
        # the first and the last may be shorter
        is_end = index in (0, len(gaps) - 2, len(gaps) - 1)
        is_whole = abs(gap - num_intervals * interval) <= 1.01 * spacing
        if num_intervals >= _FEWEST or not (is_whole or is_end):
            raise ambiguous


def _gaps(places: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(places)]


@dataclass(frozen=True, kw_only=True)
class RunEvaluations:
    """The evaluations of a run: their rows, by rising places, each with its tokens.

    ``diverged``: why the run has diverged, else None. ``notes``: what was passed over or replaced.
    """

    rows: tuple[Row, ...]
    diverged: str | None
    notes: tuple[str, ...]


@dataclass(kw_only=True)
class RunRows:
    """The rows of one run, gathered as they are read.

    ``is_repeated``: whether the trainer is known to repeat its last evaluation on later rows.
    """

    places: Places
    rule: Evaluations | None = None
    is_repeated: bool = False
    _rows: list[Row] = field(default_factory=list)
    _num_blanks: int = 0
    _is_fresh: bool = False
    _bad: str | None = None

    def add(self, row: Row) -> None:
        """Add a row; one without a validation loss tells counts, and whether training goes on."""
        self.places.learn(row)
        loss = row.get("loss")
        if "val_loss" in row:
            self._rows.append({**row, "is_fresh": self._is_fresh})
            self._is_fresh = False
        elif loss is not None:
            self._is_fresh = True
        bad = None
        if loss is None and is_nan(row.get("grad_norm")):
            bad = f"the gradient norm is nan at {named(row)}, without a loss"
        elif loss is not None and not math.isfinite(loss):
            bad = f"the training loss is {loss:g} at {named(row)}"
        elif loss is not None or math.isfinite(row.get("val_loss", math.nan)):
            self._bad = None
        self._bad = self._bad or bad

    def add_blank(self) -> None:
        """Count a row on which no evaluation is."""
        self._num_blanks += 1
        self._is_fresh = True

    def evaluations(self) -> RunEvaluations:
        """Return the run's evaluations.

        Raises:
            AmbiguousError: the rows can be read in two ways, or nothing tells their tokens.
        """
        notes: list[str] = []
        rows = in_order(self._rows, notes)
        rows, diverged = self._without_blanks(rows)
        rows = self._without_repeats(rows, notes)
        if self._num_blanks:
            notes.append(f"{self._num_blanks:,} rows without an evaluation passed over")
        rows = [{**row, "tokens": self.places.tokens(row)} for row in rows]
        if rows:
            self.places.check_batch()
        if disagreement := self.places.disagreement():
            notes.append(disagreement)
        return RunEvaluations(
            rows=tuple(rows), diverged=diverged or self._bad, notes=tuple(notes)
        )

    def _without_blanks(self, rows: Sequence[Row]) -> tuple[list[Row], str | None]:
        """Leave out losses that are not finite; say why the run has diverged if its evaluations end so.

        NaN between two evaluations is a blank. After the last one it is a loss where an evaluation was due.
        """
        finite: list[Row] = []
        ends: list[Row] = []
        is_after_blank = self._num_blanks > 0
        for row in rows:
            if not math.isfinite(row["val_loss"]):
                ends.append(row)
                continue
            is_after_blank = is_after_blank or bool(ends)
            finite.append({**row, "is_fresh": row["is_fresh"] or bool(ends)})
            self._num_blanks += len(ends)
            ends = []
        if due := _first_due(ends, finite, has_blanks=is_after_blank):
            return finite, f"the validation loss is {due['val_loss']:g} at {named(due)}"
        self._num_blanks += len(ends)
        return finite, None

    def _without_repeats(self, rows: Sequence[Row], notes: list[str]) -> list[Row]:
        if self.rule is None and len(rows) > 1:
            check_repeats(rows, is_usual=self.is_repeated)
        repeats = Repeats(self.rule)
        evaluations = []
        for row in rows:
            is_fresh = row["is_fresh"]
            if repeats.is_evaluation(place_of(row), row["val_loss"], is_fresh=is_fresh):
                evaluations.append(row)
        if repeats.dropped:
            notes.append(
                f"{repeats.dropped:,} rows repeat the evaluation before: {len(evaluations)} evaluations"
            )
        return evaluations


def _first_due(
    ends: Sequence[Row], finite: Sequence[Row], *, has_blanks: bool
) -> Row | None:
    """Return the first of the last losses, none of which is finite, that is an evaluation; None without one.

    ``finite``: the evaluations before them. ``has_blanks``: whether NaN may be a blank here.
    """
    due = math.inf
    places = [place_of(row) for row in finite]
    if places:
        gaps = _gaps(places) or [places[0]]
        due = places[-1] + max(gaps)
    for row in ends:
        is_bad = math.isinf(row["val_loss"]) or not math.isfinite(row.get("loss", 0.0))
        if is_bad or not has_blanks or place_of(row) >= due:
            return row
    return None


def in_order(rows: Sequence[Row], notes: list[str]) -> list[Row]:
    """Return evaluations by rising places; those of a resumed run replace what is there from their place on.

    Raises:
        AmbiguousError: they are of several runs, or of ranks that say different things.
    """
    places = [place_of(row) for row in rows]
    if places == sorted(places, reverse=True):
        rows = rows[::-1]
    ordered: list[Row] = []
    values: dict[float, float] = {}  # by the places of ``ordered``
    last = -1.0
    num_conflicts = 0
    for row in rows:
        place = place_of(row)
        value = row["val_loss"]
        if place <= last:
            if place not in values:
                raise AmbiguousError(
                    f"{named(row)} comes after {named(ordered[-1])}", is_of_runs=True
                )
            known = values[place]
            if known == value or math.isnan(value):
                continue
            if place == last and math.isnan(known):
                ordered.pop()
            else:
                num_conflicts += place == last
                if place == place_of(ordered[0]) or num_conflicts > 1:
                    raise AmbiguousError(
                        f"losses {known:g} and {value:g} at {named(row)}",
                        is_of_runs=True,
                    )
                num_replaced = 0
                while place_of(ordered[-1]) >= place:
                    del values[place_of(ordered.pop())]
                    num_replaced += 1
                notes.append(
                    f"resumed: {named(row)} comes again and replaces {num_replaced} evaluations"
                )
        ordered.append(row)
        values[place] = value
        last = place
    return ordered


def place_of(row: Row) -> float:
    """Return where in the training a row is, by steps if it has them."""
    if "step" in row:
        return float(row["step"])
    return float(row["samples"] if "samples" in row else row["tokens"])


def named(row: Row) -> str:
    """Name a row's place, such as step 1,000."""
    if "step" in row:
        return f"step {row['step']:,.0f}"
    kind = "samples" if "samples" in row else "tokens"
    return f"{row[kind]:,.0f} {kind}"


def notes_of(notes_by_run: Mapping[str, Sequence[str]]) -> list[str]:
    """Say how the logs of runs were read: once for each kind of note, with the runs.

    ``notes_by_run``: by the name of the run.
    """
    kinds: dict[str, dict[str, str]] = {}
    for run, notes in notes_by_run.items():
        for note in notes:
            kinds.setdefault(re.sub(r"\d[\d,.]*", "0", note), {})[run] = note
    lines = []
    for notes_by_name in kinds.values():
        (name, note), *others = notes_by_name.items()
        runs = name
        if others:
            runs += f" and, alike, {len(others)} more runs"
        lines.append(f"{note} ({runs})")
    return lines
