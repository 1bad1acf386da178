"""Studies beside each other in words: two compared, or several over the size of the model or the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.findings.trend import cut
from ablate.reports.words import words
from ablate.reports.words.table import Table
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.trend import Line, Trend
    from ablate.results.cost import Cost

_LONGEST_VALUE = 60


def compare_table(comparison: Comparison) -> Table:
    """Return the comparison as text in cells."""
    return Table(
        caption=f"Token cost of each arm in both studies, with its {words.coverage(*comparison.rules)} "
        f"interval, and the ratio of (1 + token cost) in {comparison.right} over {comparison.left}, minus "
        "one: above zero the arm costs more there.",
        columns=("Arm", comparison.left, comparison.right, "Ratio"),
        rows=tuple(
            (arm.name, words.cost(arm.left), words.cost(arm.right), words.percent_interval(arm.ratio))
            for arm in comparison.arms
        ),
        numeric=range(1, 4),
    )


def trend_tables(found: Trend) -> tuple[tuple[str, Table], ...]:
    """Return the trends of token costs and of loss gaps as text in cells, with their titles."""
    unit = "parameters" if found.axis == "parameters" else "training tokens"
    figures = {
        "Token cost": (
            f"Token cost over {found.against} in each study, at the study's own target",
            f"(1 + token cost) changes by for each tenfold of {unit}: above zero the cost grows",
        ),
        "Loss gap": (
            (
                f"Validation loss (nats/token) minus that of {found.against} in each study, at the last "
                "evaluation that all runs of both have"
            ),
            f"it changes by for each tenfold of {unit}",
        ),
    }
    heads = (f"{study.name} ({place_text(found, i)})" for i, study in enumerate(found.studies))
    columns = ("Arm", *heads, "Change per tenfold")
    more = (
        "Each interval is for its own comparison. That of the change holds the error of the runs, not that "
        "of the straight line, which is an average slope: see whether the points follow it."
    )
    tables = []
    for title, (what, change) in figures.items():
        rows = tuple(
            (
                name,
                *(words.DASH if point is None else tell(point) for point in line.points),
                tell(line.change),
            )
            for name, figure, line, tell in _lines(found)
            if figure == title.lower()
        )
        if rows:
            caption = f"{what}, with its {words.coverage(*found.rules)} interval; and what {change}. {more}"
            numeric = range(1, len(columns))
            tables.append((title, Table(caption=caption, columns=columns, rows=rows, numeric=numeric)))
    return tuple(tables)


def _lines(found: Trend) -> Iterator[tuple[str, str, Line, Callable[[Any], str]]]:
    """Yield each arm's name, its figure in words, the line, and what tells a point or the change."""
    for arm in found.arms:
        if arm.cost is not None:
            yield arm.name, "token cost", arm.cost, _cost
        if arm.gap is not None:
            yield arm.name, "loss gap", arm.gap, _gap


def _cost(value: Cost | Interval) -> str:
    return words.percent_interval(value) if isinstance(value, Interval) else words.cost(value)


def _gap(value: Interval) -> str:
    return words.loss_interval(value, difference=True)


def place_text(found: Trend, index: int) -> str:
    """Return a study's place on the axis: its parameters, or its tokens."""
    tell = words.parameters if found.axis == "parameters" else words.tokens
    return tell(found.places[index])


def trend_sentences(found: Trend) -> Iterator[str]:
    """Say which figures grow or shrink, which trends are not settled, and what limits them."""
    noun, unit = ("size", "parameters") if found.axis == "parameters" else ("budget", "training tokens")
    unsettled, without = [], []
    for name, figure, line, tell in _lines(found):
        low, high = line.change.low, line.change.high
        if low is None or high is None:
            without.append(f"{figure} of {name} ({line.change.note})")
        elif low <= 0 <= high:
            unsettled.append(f"{figure} of {name} ({tell(line.change)})")
        else:
            known = [i for i, point in enumerate(line.points) if point and point.estimate is not None]
            yield (
                f"{name}: its {figure} {'grows' if low > 0 else 'shrinks'} with {noun}: "
                f"{'(1 + token cost)' if figure == 'token cost' else 'it'} changes by {tell(line.change)} "
                f"for each tenfold of {unit}, over {len(known)} studies from {place_text(found, known[0])} "
                f"to {place_text(found, known[-1])}."
            )
    if unsettled:
        yield f"Inconclusive, for the interval holds zero: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if found.left_out:
        yield f"Left out: {', '.join(f'{name} ({reason})' for name, reason in found.left_out.items())}."
    if len(set(found.places)) == 2:
        yield f"There are two {noun}s alone: nothing can show whether the change is the same between them."
    if found.span < 10:
        yield f"The {noun}s span a factor of {found.span:.3g}: a tenfold lies beyond them."


def differences_text(found: Trend) -> tuple[str, ...]:
    """Say what the studies differ in besides the model: in targets by their nature, in more by choice."""
    targets = {study.target for study in found.studies}
    each = "; ".join(f"{study.name}: {study.target}" for study in found.studies)
    own = f"Each study has its own target. {each}."
    first = own if len(targets) > 1 else f"Target of every study: {targets.pop()}."
    differs = (f"{key} {' / '.join(map(_grouped, values))}" for key, values in found.differs.items())
    what = "model" if found.axis == "parameters" else "budget"
    more = f"The studies differ in more than the {what}: {'; '.join(differs)}."
    return (first, more) if found.differs else (first,)


def _grouped(value: str) -> str:
    return f"{int(value):,}" if value.isascii() and value.isdigit() else cut(value, _LONGEST_VALUE)
