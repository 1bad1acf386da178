"""Whether an arm is as good as the baseline, up to a margin that the study names.

Two one-sided tests (Schuirmann 1987): an arm is *within* where its 90 % interval lies inside of the margin on
both sides, which errs in 5 % of studies; *outside* where the interval lies outside; else *open*. That an
interval holds zero says nothing of the kind: a wide one holds zero and a large cost alike.

Without an interval an arm is open, unless its bound alone is outside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from ablate.reports.statistics.intervals import ALPHA, t_interval

if TYPE_CHECKING:
    from ablate.reports.statistics.cost import Cost
    from ablate.reports.statistics.intervals import Estimate
    from ablate.store.plan_file import Margin

Standing = Literal["within", "outside", "open"]


def standing(cost: Cost, loss: Estimate | None, margin: Margin, alpha: float = ALPHA) -> Standing:
    """Return where an arm stands to the margin.

    ``cost``: its token cost; ``loss``: its difference in final loss, nats per token, where it is known. A
    margin in cost is the same factor to both sides: 5 % more tokens, or 1 / 1.05 of them. ``alpha``: the
    chance that each of the two tests errs.
    """
    figure, limit = asked(cost, loss, margin)
    if figure is not None:
        return stands(figure, limit, alpha)
    # Runs that were cut at the budget cost more than is seen, but never less.
    cut = cost.restricted
    if margin.kind == "cost" and cut is not None and cut.low is not None and cut.low > margin.value:
        return "outside"
    return "open"


def asked(cost: Cost, loss: Estimate | None, margin: Margin) -> tuple[Estimate | None, float]:
    """Return the figure that a margin is of, and how far the margin reaches to either side of zero."""
    return (cost.log_ratio, math.log1p(margin.value)) if margin.kind == "cost" else (loss, margin.value)


def stands(figure: Estimate, limit: float, alpha: float = ALPHA) -> Standing:
    """Return where a figure stands to so much on either side of zero, by two tests that each err so often."""
    interval = t_interval(figure, 2 * alpha)
    if interval.low is None or interval.high is None:
        return "open"
    if -limit < interval.low and interval.high < limit:
        return "within"
    return "outside" if interval.low > limit or interval.high < -limit else "open"
