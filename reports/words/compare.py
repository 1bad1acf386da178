"""Words and tables on two studies compared, or on several over the size of the model or the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.findings.compare import cut
from ablate.reports.words.format import cost, coverage, interval, make_table, percents, signed, tokens
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.reports.findings.compare import Comparison, Line
    from ablate.reports.words.format import Table

_LONGEST_VALUE = 60
UNITS = {"parameters": "parameters", "tokens": "training tokens"}
"""Units on a trend's axis."""


def compare_tables(found: Comparison) -> tuple[Table, ...]:
    """Make the tables of token costs and, in a trend, of loss gaps, one row an arm.

    A trend's table without rows is left out.
    """
    heads, last = [study.name for study in found.studies], "Ratio"
    captions = {
        "Token cost": f"Token cost of each arm in both studies, with its {coverage(*found.rules)} interval, "
        f"and the ratio of (1 + token cost) in {heads[1]} over {heads[0]}, minus one: above zero the arm "
        "costs more there.",
    }
    if found.axis:
        heads = [f"{name} ({tokens(place)})" for name, place in zip(heads, found.places, strict=True)]
        last = "Change per tenfold"
        about = (
            f"The change is for each tenfold of {UNITS[found.axis]}, an average slope: its interval holds "
            "the error of the runs, not that of the straight line, so see whether the points follow it. "
            f"Brackets: {coverage(*found.rules)} intervals, each for its own comparison."
        )
        captions = {
            "Token cost": f"Token cost over {found.against} in each study, at the study's own target; and "
            f"what (1 + token cost) changes by: above zero the cost grows. {about}",
            "Loss gap": f"Validation loss (nats/token) minus that of {found.against} in each study, at the "
            f"last evaluation that all runs of both have; and what it changes by. {about}",
        }
    tables = [
        make_table(
            title.replace(" ", "-"),
            title,
            caption,
            [
                {"Arm": name}
                | {head: point and tell(point) for head, point in zip(heads, line.points, strict=True)}
                | {last: tell(line.change)}
                for name, figure, line, tell in _lines(found)
                if figure == title.lower()
            ],
            range(1, len(heads) + 2),
        )
        for title, caption in captions.items()
    ]
    return tuple(table for table in tables if table.rows or not found.axis)


def _lines(found: Comparison) -> Iterator[tuple[str, str, Line, Callable[[Any], str]]]:
    """Yield the arm's name, the figure's name, its line, and the format of its points and change."""
    for arm in found.arms:
        if arm.cost is not None:
            yield arm.name, "token cost", arm.cost, lambda v: percents(v) if type(v) is Interval else cost(v)
        if arm.gap is not None:
            yield arm.name, "loss gap", arm.gap, lambda value: interval(value, signed)


def trend_sentences(found: Comparison) -> Iterator[str]:
    """Say which figures grow or shrink, which trends are not settled, and what limits the result.

    Of two studies nothing is said.
    """
    if not found.axis:
        return
    noun = "size" if found.axis == "parameters" else "budget"
    unsettled, without = [], []
    for name, figure, line, tell in _lines(found):
        low, high = line.change.low, line.change.high
        if low is None or high is None:
            without.append(f"{figure} of {name} ({line.change.note})")
        elif low <= 0 <= high:
            unsettled.append(f"{figure} of {name} ({tell(line.change)})")
        else:
            pairs = zip(found.places, line.points, strict=True)
            places = [place for place, point in pairs if point and point.estimate is not None]
            yield (
                f"{name}: its {figure} {'grows' if low > 0 else 'shrinks'} with {noun}: "
                f"{'(1 + token cost)' if figure == 'token cost' else 'it'} changes by {tell(line.change)} "
                f"for each tenfold of {UNITS[found.axis]}, over {len(places)} studies from "
                f"{tokens(places[0])} to {tokens(places[-1])}."
            )
    if unsettled:
        yield f"Inconclusive, for the interval holds zero: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if found.left_out:
        yield f"Left out: {', '.join(f'{name} ({reason})' for name, reason in found.left_out.items())}."
    if len(set(found.places)) == 2:
        yield f"There are two {noun}s alone: nothing can show whether the change is the same between them."
    if (span := found.places[-1] / found.places[0]) < 10:
        yield f"The {noun}s span a factor of {span:.3g}: a tenfold lies beyond them."


def differences_text(found: Comparison) -> tuple[str, ...]:
    """Say what the studies differ in besides model or budget: first their targets, then the rest, if any."""
    targets = "; ".join(f"{study.name}: {study.target}" for study in found.studies)
    differs = (f"{key} {' / '.join(map(_grouped, values))}" for key, values in found.differs.items())
    what = "model" if found.axis == "parameters" else "budget"
    more = f"The studies differ in more than the {what}: {'; '.join(differs)}."
    return (f"Targets: {targets}.", more) if found.differs else (f"Targets: {targets}.",)


def _grouped(value: str) -> str:
    return f"{int(value):,}" if value.isascii() and value.isdigit() else cut(value, _LONGEST_VALUE)
