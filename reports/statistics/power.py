"""What so many seeds could have shown, and how many more would settle what is open.

From the spread of log T that the runs show, or of its paired differences; 80 % power at the 5 % level,
two-sided, by Student's t. With few seeds the spread is itself uncertain: the figures are for planning.

How it fails: it does not raise. Without two runs of known T on each side there is nothing to go by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from ablate.reports.statistics.intervals import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.run.outcome import Outcome

POWER = 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Power:
    """One comparison's: spread of log T of either side, and what follows from it.

    ``spread_of_the_pairs``: of the differences of log T over seeds in common; None without pairs.
    ``smallest_cost``: the smallest token cost that these seeds would have shown with a chance of 80 %.
    ``more_seeds``: how many more of each arm would settle the comparison if the cost is the estimate;
    0 where it is settled, None where more than 1,000 would be needed.
    """

    spread_of_log_tokens: float
    spread_of_the_baseline: float
    spread_of_the_pairs: float | None
    smallest_cost: float
    more_seeds: int | None


def power_of(
    arm: Sequence[Outcome],
    baseline: Sequence[Outcome],
    *,
    settled: bool,
    estimate: float | None,
    paired: bool = False,
) -> Power | None:
    """Return what the runs of two arms could show; None without two of known T on each side."""
    x_of, y_of = ({run.seed: math.log(run.high) for run in runs if run.exact} for runs in (arm, baseline))
    if min(len(x_of), len(y_of)) < 2:
        return None
    var_x, var_y = (float(np.var(list(logs.values()), ddof=1)) for logs in (x_of, y_of))
    pairs = [x_of[seed] - y_of[seed] for seed in x_of if seed in y_of] if paired else []
    is_paired = len(pairs) >= 2
    variance = float(np.var(pairs, ddof=1)) if is_paired else var_x + var_y
    # Runs that agree but for rounding have no spread to go by.
    if math.sqrt(variance) <= 8 * math.ulp(max(*x_of.values(), *y_of.values())):
        return None
    if is_paired:
        n, error, degrees = len(pairs), variance / len(pairs), len(pairs) - 1.0
    else:
        n = min(len(x_of), len(y_of))
        parts = (var_x / len(x_of), len(x_of) - 1), (var_y / len(y_of), len(y_of) - 1)
        error = sum(part for part, _ in parts)
        degrees = error**2 / sum(part**2 / own for part, own in parts)
    return Power(
        spread_of_log_tokens=math.sqrt(var_x),
        spread_of_the_baseline=math.sqrt(var_y),
        spread_of_the_pairs=math.sqrt(variance) if is_paired else None,
        smallest_cost=math.expm1(_reach(degrees) * math.sqrt(error)),
        more_seeds=0 if settled else _more(variance, n, estimate, 1 if is_paired else 2),
    )


def _reach(degrees: float) -> float:
    """Return how many standard errors a difference must be, to be found with the power."""
    return quantile(degrees) + float(stdtrit(degrees, POWER))


def _more(variance: float, n: int, estimate: float | None, per_seed: int) -> int | None:
    """Return how many more seeds are needed, each of which adds ``per_seed`` degrees of freedom."""
    if estimate is None or estimate <= -1:
        return None
    effect = abs(math.log1p(estimate))
    for seeds in range(n, MOST_SEEDS + 1):
        if effect >= _reach(per_seed * (seeds - 1)) * math.sqrt(variance / seeds):
            return max(1, seeds - n)
    return None
