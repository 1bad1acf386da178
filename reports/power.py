"""What so many seeds could have shown, and how many more would settle what is open.

From the spread of log T that the runs themselves show; 80 % power at the 5 % level, two-sided, by Student's t
on the difference of two means. With few seeds the spread is itself uncertain, and so are these figures: they
are for planning, not for claims.

How it fails: it does not raise. Without two runs of known T on each side there is nothing to go by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from ablate.reports.intervals import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.crossing import Outcome

POWER = 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Power:
    """One comparison's: spread of log T of either side, and what follows from it.

    ``smallest_cost``: the smallest token cost that these seeds would have shown with a chance of 80 %.
    ``more_seeds``: how many more of each arm would settle the comparison if the cost is what it seems;
    0 where it is settled, None where more than 1,000 would be needed.
    """

    spread: float
    spread_baseline: float
    smallest_cost: float
    more_seeds: int | None


def power_of(
    arm: Sequence[Outcome], baseline: Sequence[Outcome], *, settled: bool, estimate: float | None
) -> Power | None:
    """Return what the runs of two arms could show; None without two of known T on each side."""
    x, y = (np.log([run.high for run in runs if run.exact]) for runs in (arm, baseline))
    if min(len(x), len(y)) < 2:
        return None
    var_x, var_y = float(np.var(x, ddof=1)), float(np.var(y, ddof=1))
    if var_x + var_y == 0:
        return None
    error = var_x / len(x) + var_y / len(y)
    degrees = error**2 / ((var_x / len(x)) ** 2 / (len(x) - 1) + (var_y / len(y)) ** 2 / (len(y) - 1))
    return Power(
        spread=math.sqrt(var_x),
        spread_baseline=math.sqrt(var_y),
        smallest_cost=math.exp(_reach(degrees) * math.sqrt(error)) - 1,
        more_seeds=0 if settled else _more(var_x + var_y, min(len(x), len(y)), estimate),
    )


def _reach(degrees: float) -> float:
    """Return how many standard errors a difference must be, to be found with the power."""
    return quantile(degrees) + float(stdtrit(degrees, POWER))


def _more(variance: float, n: int, estimate: float | None) -> int | None:
    if estimate is None or estimate <= -1:
        return None
    effect = abs(math.log1p(estimate))
    for seeds in range(n, MOST_SEEDS + 1):
        if effect >= _reach(2 * (seeds - 1)) * math.sqrt(variance / seeds):
            return max(1, seeds - n)
    return None
