"""What the seeds could have shown, and how many more would settle an open comparison.

The variance is that of the comparison's own interval, paired and moderated in the same way; 80 % power at the
5 % level, two-sided, by the noncentral t distribution. With few seeds the variance is itself uncertain: the
figures are for planning.

A comparison without an interval, such as a bound, has no power: the spread of only the runs that hit would
leave out the slow ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import nctdtr

from ablate.results.cost import is_settled, stands
from ablate.results.intervals import ALPHA, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.results.cost import Cost
    from ablate.results.intervals import Estimate
    from ablate.run.outcome import Outcome

POWER = 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Power:
    """The power of one comparison: standard deviations of log T, and what follows from them.

    ``spread_of_the_pairs``: of the differences of log T over seeds in common; None without pairs.
    ``smallest_cost``: the smallest token cost that these seeds would have shown with a chance of 80 %.
    ``more_seeds``: how many more seeds of each arm would settle the comparison if the true cost equals the
    estimate: that it is not zero or, with a margin, whether it is within. 0 if settled, None above 1,000.
    """

    spread_of_log_tokens: float
    spread_of_the_baseline: float
    spread_of_the_pairs: float | None
    smallest_cost: float
    more_seeds: int | None


def power_of(
    cost: Cost,
    arm: Sequence[Outcome],
    baseline: Sequence[Outcome],
    margin: tuple[Estimate, float] | None = None,
    alpha: float = ALPHA,
) -> Power | None:
    """Compute the power of the runs behind a token cost; None if the cost has no interval.

    ``margin``: the figure that it limits, and the limit on either side of zero; ``alpha``: the chance that
    each of its two tests errs.
    """
    found = cost.figure
    if cost.kind != "interval" or found is None:
        return None
    logs = [[math.log(run.high) for run in runs if run.exact] for runs in (arm, baseline)]
    # Runs that differ only by rounding have no spread.
    if math.sqrt(found.variance) <= 8 * math.ulp(max(map(max, logs))):
        return None
    spreads = [float(np.std(side, ddof=1)) for side in logs]
    pairs = None
    if cost.pairs:
        x, y = ({run.seed: math.log(run.high) for run in runs if run.exact} for runs in (arm, baseline))
        pairs = float(np.std([x[seed] - y[seed] for seed in x if seed in y], ddof=1))
    figure, limit = margin or (found, 0.0)
    settled = is_settled(cost) if margin is None else stands(figure, limit, alpha) != "open"
    return Power(
        spread_of_log_tokens=spreads[0],
        spread_of_the_baseline=spreads[1],
        spread_of_the_pairs=pairs,
        smallest_cost=math.expm1(_reach(found.degrees) * math.sqrt(found.variance)),
        more_seeds=0 if settled else _more(figure, limit, cost),
    )


def _chance(effect: float, degrees: float) -> float:
    """Return the chance that a difference of ``effect`` standard errors is found."""
    edge = quantile(degrees)
    return 1 - _below(edge, degrees, effect) + _below(-edge, degrees, effect)


def _below(edge: float, degrees: float, effect: float) -> float:
    """Return the chance of a t below ``edge``; ``nctdtr`` gives NaN where it is next to none."""
    return float(np.nan_to_num(nctdtr(degrees, effect, edge)))


def _reach(degrees: float) -> float:
    """Return the difference, in standard errors, that is found with the chance ``POWER``."""
    low, high = 0.0, 2 * quantile(degrees) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(middle, degrees) < POWER else (low, middle)
    return high


def _chance_of_margin(effect: float, limit: float, degrees: float) -> float:
    """Return the chance that a difference is shown within or outside a limit, both in standard errors."""
    edge = quantile(degrees, 2 * ALPHA)
    if abs(effect) > limit:
        return 1 - _below(edge, degrees, abs(effect) - limit)
    return max(0.0, 1 - _below(edge, degrees, limit + effect) - _below(edge, degrees, limit - effect))


def _more(figure: Estimate, limit: float, cost: Cost) -> int | None:
    """Return how many more seeds settle a figure: not zero or, with a limit, within or outside of it."""
    n, per_seed = (cost.pairs, 1) if cost.pairs else (min(cost.n, cost.n_baseline), 2)

    def shown(seeds: int) -> bool:
        error = math.sqrt(figure.variance * n / seeds)
        degrees = figure.degrees + per_seed * (seeds - n)
        effect = abs(figure.value) / error
        chance = _chance_of_margin(effect, limit / error, degrees) if limit else _chance(effect, degrees)
        return chance >= POWER

    # The chance rises with the seeds.
    more = bisect_left(range(n, MOST_SEEDS + 1), x=True, key=shown)
    return None if n + more > MOST_SEEDS else max(1, more)
