"""Studies beside each other in words: two compared, or the trend of several over the size of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.findings.trend import cut
from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.trend import Trend

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


def trend_table(found: Trend) -> Table:
    """Return the trends as text in cells."""
    return Table(
        caption=(
            f"Token cost of each arm over {found.against} in each study, by rising number of parameters, at "
            f"the study's own target, with its {words.coverage(*found.rules)} interval; and what "
            "(1 + token cost) changes by for each tenfold of parameters: above zero the cost grows with "
            "size. Each interval is for its own comparison. That of the change holds the error of the runs, "
            "not that of the straight line, which is an average slope: see whether the points follow it."
        ),
        columns=(
            "Arm",
            *(f"{study.name} ({words.parameters(study.parameters)})" for study in found.studies),
            "Change per tenfold",
        ),
        rows=tuple(
            (arm.name, *map(words.cost, arm.costs), words.percent_interval(arm.per_tenfold))
            for arm in found.arms
        ),
        numeric=range(1, len(found.studies) + 2),
    )


def trend_sentences(found: Trend) -> Iterator[str]:
    """Say which costs grow or shrink with size, which trends are not settled, and what limits them."""
    unsettled, without = [], []
    for arm in found.arms:
        change = arm.per_tenfold
        text = words.percent_interval(change)
        if change.low is None or change.high is None:
            without.append(f"{arm.name} ({change.note})")
        elif change.low <= 0 <= change.high:
            unsettled.append(f"{arm.name} ({text})")
        else:
            pairs = zip(found.studies, arm.costs, strict=True)
            known = [
                study.parameters for study, cost in pairs if cost is not None and cost.log_ratio is not None
            ]
            yield (
                f"{arm.name}: its token cost {'grows' if change.low > 0 else 'shrinks'} with size: "
                f"(1 + token cost) changes by {text} for each tenfold of parameters, over {len(known)} "
                f"studies from {words.parameters(known[0])} to {words.parameters(known[-1])}."
            )
    if unsettled:
        yield f"Inconclusive, for the interval holds zero: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if found.left_out:
        yield f"Left out: {', '.join(f'{name} ({reason})' for name, reason in found.left_out.items())}."
    if len({study.parameters for study in found.studies}) == 2:
        yield "There are two sizes alone: nothing can show whether the change is the same between them."
    if found.span < 10:
        yield f"The sizes span a factor of {found.span:.3g}: a tenfold lies beyond them."


def differences_text(found: Trend) -> tuple[str, ...]:
    """Say what the studies differ in besides the model: in targets by their nature, in more by choice."""
    targets = {study.target for study in found.studies}
    each = "; ".join(f"{study.name}: {study.target}" for study in found.studies)
    own = f"Each study has its own target. {each}."
    first = own if len(targets) > 1 else f"Target of every study: {targets.pop()}."
    differs = (f"{key} {' / '.join(map(_grouped, values))}" for key, values in found.differs.items())
    more = f"The studies differ in more than the model: {'; '.join(differs)}."
    return (first, more) if found.differs else (first,)


def _grouped(value: str) -> str:
    return f"{int(value):,}" if value.isascii() and value.isdigit() else cut(value, _LONGEST_VALUE)
