"""Words and tables on studies compared: two, or several over the size of the model or the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.base.errors import cut
from ablate.reports.words.format import cost, coverage, interval, make_table, percents, signed, tokens
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.reports.findings.compare import Comparison, Line
    from ablate.reports.words.format import Table

    Said = tuple[str, str, Line, Callable[[Any], str]]

_LONGEST_VALUE = 60
UNITS = {"parameters": "parameters", "tokens": "training tokens", "": "study"}
"""Units of the studies' places."""


def line_tables(found: Comparison) -> tuple[Table, ...]:
    """Make the tables of token costs and of loss gaps, one row an arm; one without rows is not shown."""
    heads, last = [study.name for study in found.studies], "Change"
    about = f"The change is from {heads[0]} to {heads[-1]}."
    if found.axis:
        heads = [f"{name} ({tokens(place)})" for name, place in zip(heads, found.places, strict=True)]
        last = "Change per tenfold"
        about = (
            f"The change is for each tenfold of {UNITS[found.axis]}, an average slope: its interval holds "
            "the error of the runs, not that of the straight line, so see whether the points follow it."
        )
    about += f" Brackets: {coverage(*found.rules)} intervals, each for its own comparison."
    captions = {
        "Token cost": f"Token cost over {found.against} in each study, at the study's own target; and "
        f"what (1 + token cost) changes by: above zero the cost grows. {about}",
        "Loss gap": f"Validation loss ({found.loss_unit}) minus that of {found.against} in "
        f"each study, at the last evaluation that all runs of both have; and what it changes by. {about}",
    }
    return tuple(
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
    )


def study_tables(found: Comparison) -> tuple[Table, ...]:
    """Make the tables of the studies, and of what else they differ in."""
    studies = [
        {
            "Study": study.name,
            "Parameters": study.parameters and f"{study.parameters:,}",
            "Tokens": study.tokens and f"{study.tokens:,}",
            "Baseline": study.baseline,
            "Target": study.target,
        }
        for study in found.studies
    ]
    names = [study.name for study in found.studies]
    rows = []
    for key, each in found.differs.items():
        values = (
            f"{int(one):,}" if one.isascii() and one.isdigit() else cut(one, _LONGEST_VALUE) for one in each
        )
        rows.append({"Key": key} | dict(zip(names, values, strict=True)))
    return (
        make_table(
            "studies",
            "The studies",
            "Parameters of the baseline's model, all of them, and its budget in tokens; the target that "
            "costs are read at.",
            studies,
            {1, 2},
        ),
        make_table(
            "differences",
            "What else the studies differ in",
            "What else the studies differ in, as their files say it; an arm's keys as far as they are not "
            "those of its baseline.",
            rows or [{"Key": "Nothing that their files tell"}],
        ),
    )


def _lines(found: Comparison) -> Iterator[Said]:
    """Yield the arm's name, the figure's name, its line, and the format of its points and change.

    A line with no figure in any study is left out.
    """
    for arm in found.arms:
        for figure, line, tell in (
            ("token cost", arm.token_cost, lambda v: percents(v) if type(v) is Interval else cost(v)),
            ("loss gap", arm.loss_gap, lambda value: interval(value, signed)),
        ):
            if {(one.estimate, one.low, one.high) for one in line.points if one} - {(None, None, None)}:
                yield arm.name, figure, line, tell


def comparison_sentences(found: Comparison) -> Iterator[str]:
    """Say which figures grow or shrink, which changes are not settled, and what limits the result."""
    noun = {"parameters": "size", "tokens": "budget", "": ""}[found.axis]
    unsettled, without = [], []
    for name, figure, line, tell in _lines(found):
        low, high = line.change.low, line.change.high
        if low is None or high is None:
            without.append(f"{figure} of {name} ({line.change.note})")
        elif low <= 0 <= high:
            unsettled.append(f"{figure} of {name} ({tell(line.change)})")
        else:
            rows = zip(found.studies, found.places, line.points, strict=True)
            known = [(study, place) for study, place, point in rows if point and point.estimate is not None]
            first, last = (tokens(place) if noun else study.name for study, place in (known[0], known[-1]))
            yield (
                f"{name}: its {figure} {'grows' if low > 0 else 'shrinks'}{f' with {noun}' if noun else ''}: "
                f"{'(1 + token cost)' if figure == 'token cost' else 'it'} changes by {tell(line.change)} "
                + (f"for each tenfold of {UNITS[found.axis]}, over {len(known)} studies " if noun else "")
                + f"from {first} to {last}."
            )
    if unsettled:
        yield f"Inconclusive, for the interval holds zero: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if found.left_out:
        yield f"Left out: {', '.join(f'{name} ({reason})' for name, reason in found.left_out.items())}."
    if noun and len(set(found.places)) == 2:
        yield f"There are two {noun}s alone: nothing can show whether the change is the same between them."
    if noun and (span := found.places[-1] / found.places[0]) < 10:
        yield f"The {noun}s span a factor of {span:.3g}: a tenfold lies beyond them."
