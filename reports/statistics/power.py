"""What so many seeds could have shown, and how many more would settle what is open.

From the variance that the comparison's own interval is made of, paired and moderated as that is; 80 % power
at the 5 % level, two-sided, by the noncentral t distribution. With few seeds the variance is itself
uncertain: the figures are for planning.

How it fails: it does not raise. A comparison without an interval, such as a bound, has nothing to go by: the
spread of the runs that hit alone would leave out the slow ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import nctdtr

from ablate.reports.statistics.cost import is_settled
from ablate.reports.statistics.intervals import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.statistics.cost import Cost
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


def power_of(cost: Cost, arm: Sequence[Outcome], baseline: Sequence[Outcome]) -> Power | None:
    """Return what the runs behind a token cost could show; None where it has no interval."""
    found = cost.log_ratio
    if cost.kind != "interval" or found is None:
        return None
    logs = [[math.log(run.high) for run in runs if run.exact] for runs in (arm, baseline)]
    # Runs that agree but for rounding have no spread to go by.
    if math.sqrt(found.variance) <= 8 * math.ulp(max(map(max, logs))):
        return None
    pairs = [a - b for a, b in _pairs(arm, baseline)] if cost.pairs else []
    n = cost.pairs or min(cost.n, cost.n_baseline)
    per_seed = 1 if cost.pairs else 2
    error = math.sqrt(found.variance)
    return Power(
        spread_of_log_tokens=float(np.std(logs[0], ddof=1)),
        spread_of_the_baseline=float(np.std(logs[1], ddof=1)),
        spread_of_the_pairs=float(np.std(pairs, ddof=1)) if pairs else None,
        smallest_cost=math.expm1(_reach(found.degrees) * error),
        more_seeds=0 if is_settled(cost) else _more(abs(found.value), error, found.degrees, n, per_seed),
    )


def _pairs(arm: Sequence[Outcome], baseline: Sequence[Outcome]) -> list[tuple[float, float]]:
    x, y = ({run.seed: math.log(run.high) for run in runs if run.exact} for runs in (arm, baseline))
    return [(x[seed], y[seed]) for seed in x if seed in y]


def _chance(effect: float, degrees: float) -> float:
    """Return the chance that a difference of so many standard errors is found."""
    edge = quantile(degrees)
    if effect > edge + 8:  # beyond what the function can do, and certain
        return 1.0
    return float(1 - nctdtr(degrees, effect, edge) + nctdtr(degrees, effect, -edge))


def _reach(degrees: float) -> float:
    """Return how many standard errors a difference must be, to be found with the power."""
    low, high = 0.0, 2 * quantile(degrees) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(middle, degrees) < POWER else (low, middle)
    return high


def _more(effect: float, error: float, degrees: float, n: int, per_seed: int) -> int | None:
    """Return how many more seeds are needed, each of which adds ``per_seed`` degrees of freedom."""
    low, high = n, MOST_SEEDS + 1  # the chance rises with the seeds
    while low < high:
        seeds = (low + high) // 2
        shown = _chance(effect / error * math.sqrt(seeds / n), degrees + per_seed * (seeds - n)) >= POWER
        low, high = (low, seeds) if shown else (seeds + 1, high)
    return None if low > MOST_SEEDS else max(1, low - n)
