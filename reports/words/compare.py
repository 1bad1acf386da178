"""Words and tables on studies compared: two, or several over the size of the model or the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ablate.base.errors import cut
from ablate.reports.words.format import (
    Column,
    cost,
    coverage,
    difference,
    make_table,
    number,
    percents,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ablate.reports.findings.compare import ComparedArm, Comparison, Line
    from ablate.reports.words.format import Table
    from ablate.results.intervals import Interval

_LONGEST_VALUE = 60
UNITS = {"parameters": "parameters", "tokens": "training tokens", "": "study"}
"""Units of the studies' places."""
_NOUNS = {"parameters": "size", "tokens": "budget", "": ""}


@dataclass(frozen=True)
class _Figure:
    """What is followed over the studies. ``field``: of the arm's line; ``changes``: what the change is of."""

    name: str
    field: str
    write_point: Callable[[Any], str]
    write_change: Callable[[Interval], str]
    changes: str

    def line(self, arm: ComparedArm) -> Line | None:
        """Return an arm's line; None if no study has a figure of the arm."""
        line: Line = getattr(arm, self.field)
        for point in line.points:
            if point and {point.estimate, point.low, point.high} != {None}:
                return line
        return None


_TOKEN_COST = _Figure("token cost", "token_cost", cost, percents, "(1 + token cost)")
_LOSS_GAP = _Figure("loss gap", "loss_gap", difference, difference, "it")


def line_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Make the tables of token costs and of loss gaps, one row an arm; one without rows is not shown."""
    about = f"The change is from {comparison.studies[0].name} to {comparison.studies[-1].name}."
    if comparison.axis:
        about = (
            f"The change is for each tenfold of {UNITS[comparison.axis]}, an average slope: its interval "
            "holds the error of the runs, not that of the straight line, so see whether the points follow it."
        )
    about += f" Brackets: {coverage(*comparison.rules)} intervals, each for its own comparison."
    costs = (
        f"Token cost over {comparison.against} in each study, at the study's own target; and what (1 + token "
        f"cost) changes by: above zero the cost grows. {about}"
    )
    gaps = (
        f"Validation loss ({comparison.loss_unit}) minus that of {comparison.against} in each study, at the "
        f"last evaluation that all runs of both have; and what it changes by. {about}"
    )
    pairs = f"Each arm over each other one in each study. {about}"
    figure = _LOSS_GAP
    if any(_TOKEN_COST.line(pair) for pair in comparison.pairs):
        figure = _TOKEN_COST
    pair_table = _line_table(comparison, figure, pairs, comparison.pairs)
    return (
        _line_table(comparison, _TOKEN_COST, costs, comparison.arms),
        _line_table(comparison, _LOSS_GAP, gaps, comparison.arms),
        replace(pair_table, name="Pairs", title="Arm against arm"),
    )


def _line_table(
    comparison: Comparison,
    figure: _Figure,
    caption: str,
    arms: Sequence[ComparedArm],
) -> Table:
    def point(i: int, row: tuple[str, Line]) -> str | None:
        value = row[1].points[i]
        return None if value is None else figure.write_point(value)

    columns = [Column("Arm", itemgetter(0))]
    for i, study in enumerate(comparison.studies):
        place = f" ({tokens(comparison.places[i])})" if comparison.axis else ""
        columns.append(number(study.name + place, partial(point, i)))
    change = "Change per tenfold" if comparison.axis else "Change"
    columns.append(number(change, lambda row: figure.write_change(row[1].change)))
    lines = [(arm.name, figure.line(arm)) for arm in arms]
    return make_table(
        figure.name.capitalize().replace(" ", "-"),
        figure.name.capitalize(),
        caption,
        columns,
        [row for row in lines if row[1] is not None],
    )


def study_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Make the tables of the studies, and of what else they differ in."""
    columns = [Column("Key", itemgetter(0))]
    for i, study in enumerate(comparison.studies):
        columns.append(Column(study.name, partial(_value, i)))
    return (
        make_table(
            "studies",
            "The studies",
            "Parameters of the baseline's model, all of them, and its budget in tokens; the target that "
            "costs are read at.",
            [
                Column("Study", "name"),
                number("Parameters", "parameters", "{:,}".format),
                number("Tokens", "tokens", "{:,}".format),
                Column("Baseline", "baseline"),
                Column("Target", "target"),
            ],
            comparison.studies,
        ),
        make_table(
            "differences",
            "What else the studies differ in",
            "What else the studies differ in, as their files say it; an arm's keys as far as they are not "
            "those of its baseline.",
            columns,
            list(comparison.differs.items())
            or [("Nothing that their files tell", None)],
        ),
    )


def _value(i: int, difference: tuple[str, tuple[str, ...] | None]) -> str | None:
    """Return what a key is in a study."""
    values = difference[1]
    if values is None:
        return None
    if values[i].isascii() and values[i].isdigit():
        return f"{int(values[i]):,}"
    return cut(values[i], _LONGEST_VALUE)


def comparison_sentences(comparison: Comparison) -> Iterator[str]:
    """Say which figures grow or shrink, which changes are not settled, and what limits the result."""
    noun = _NOUNS[comparison.axis]
    unsettled = []
    without = []
    for arm in comparison.arms:
        for figure in (_TOKEN_COST, _LOSS_GAP):
            line = figure.line(arm)
            if line is None:
                continue
            low = line.change.low
            high = line.change.high
            if low is None or high is None:
                without.append(f"{figure.name} of {arm.name} ({line.change.note})")
            elif arm.name not in comparison.holding[figure.field]:
                unsettled.append(
                    f"{figure.name} of {arm.name} ({figure.write_change(line.change)})"
                )
            else:
                yield _change_sentence(comparison, arm.name, figure, line)
    if unsettled:
        yield f"Inconclusive, counting the changes of all arms: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if comparison.left_out:
        reasons = [f"{name} ({reason})" for name, reason in comparison.left_out.items()]
        yield f"Left out: {', '.join(reasons)}."
    if not noun:
        return
    if len(set(comparison.places)) == 2:
        yield f"There are two {noun}s alone: nothing can show whether the change is the same between them."
    span = comparison.places[-1] / comparison.places[0]
    if span < 10:
        yield f"The {noun}s span a factor of {span:.3g}: a tenfold lies beyond them."


def _change_sentence(
    comparison: Comparison, arm: str, figure: _Figure, line: Line
) -> str:
    """Say from where to where a figure changes, and by how much."""
    places = []
    for study, place, point in zip(
        comparison.studies, comparison.places, line.points, strict=True
    ):
        if point and point.estimate is not None:
            places.append(tokens(place) if comparison.axis else study.name)
    direction = "grows" if (line.change.low or 0) > 0 else "shrinks"
    change = f"{figure.changes} changes by {figure.write_change(line.change)}"
    if comparison.axis:
        direction += f" with {_NOUNS[comparison.axis]}"
        change += (
            f" for each tenfold of {UNITS[comparison.axis]}, over {len(places)} studies"
        )
    return f"{arm}: its {figure.name} {direction}: {change} from {places[0]} to {places[-1]}."
