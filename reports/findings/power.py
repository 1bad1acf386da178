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
    ``more_seeds``: how many more seeds of each arm would settle the comparison beside all others if the true
    cost equals the estimate: that it is not zero or, with a margin, whether it is within. 0 if settled, None
    above 1,000.
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
    margin: tuple[Estimate | None, float] | None = None,
    *,
    settled: bool = False,
    level: float = ALPHA,
) -> Power | None:
    """Compute the power of the runs behind a token cost; None if the cost has no interval.

    ``margin``: the figure that it limits, and the limit on either side of zero. ``settled``: whether no more
    seeds are asked for; ``level``: else the one that further seeds are to reach.
    """
    log_ratio = cost.figure
    if cost.kind != "interval" or log_ratio is None:
        return None
    logs = [math.log(run.high) for run in arm if run.exact]
    base_logs = [math.log(run.high) for run in baseline if run.exact]
    error = math.sqrt(log_ratio.variance)
    # Runs that differ only by rounding have no spread.
    if error <= 8 * math.ulp(max(*logs, *base_logs)):
        return None
    pairs = None
    if cost.pairs:
        of_seed = {run.seed: math.log(run.high) for run in baseline if run.exact}
        exact = (run for run in arm if run.exact and run.seed in of_seed)
        pairs = _spread([math.log(run.high) - of_seed[run.seed] for run in exact])
    figure, limit = margin or (log_ratio, 0.0)
    if figure is None or not figure.variance:
        figure, limit = log_ratio, 0.0
    return Power(
        spread_of_log_tokens=_spread(logs),
        spread_of_the_baseline=_spread(base_logs),
        spread_of_the_pairs=pairs,
        smallest_cost=math.expm1(_reach(log_ratio.degrees) * error),
        more_seeds=0 if settled else _more(figure, limit, cost, level),
    )


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1))


def _chance(effect: float, degrees: float, level: float = ALPHA) -> float:
    """Return the chance that a difference of ``effect`` standard errors is found."""
    edge = quantile(degrees, level)
    return 1 - _below(edge, degrees, effect) + _below(-edge, degrees, effect)


def _below(edge: float, degrees: float, effect: float) -> float:
    """Return the chance of a t below ``edge``; ``nctdtr`` gives NaN where it is next to none."""
    return float(np.nan_to_num(nctdtr(degrees, effect, edge)))


def _reach(degrees: float) -> float:
    """Return the difference, in standard errors, that is found with the chance ``POWER``."""
    low = 0.0
    high = 2 * quantile(degrees, ALPHA) + 10
    for _ in range(60):
        middle = (low + high) / 2
        if _chance(middle, degrees) < POWER:
            low = middle
        else:
            high = middle
    return high


def _chance_of_margin(
    effect: float, limit: float, degrees: float, level: float
) -> float:
    """Return the chance that a difference is shown within or outside a limit, both in standard errors."""
    edge = quantile(degrees, 2 * level)
    if abs(effect) > limit:
        return 1 - _below(edge, degrees, abs(effect) - limit)
    return max(
        0.0,
        1
        - _below(edge, degrees, limit + effect)
        - _below(edge, degrees, limit - effect),
    )


def _more(figure: Estimate, limit: float, cost: Cost, level: float) -> int | None:
    """Return how many more seeds settle a figure: not zero or, with a limit, within or outside of it."""
    n = cost.pairs or min(cost.n, cost.n_baseline)
    degrees_per_seed = 1 if cost.pairs else 2

    def shown(seeds: int) -> bool:
        error = math.sqrt(figure.variance * n / seeds)
        degrees = figure.degrees + degrees_per_seed * (seeds - n)
        effect = abs(figure.value) / error
        if limit:
            return _chance_of_margin(effect, limit / error, degrees, level) >= POWER
        return _chance(effect, degrees, level) >= POWER

    # The chance rises with the seeds.
    more = bisect_left(range(n, MOST_SEEDS + 1), x=True, key=shown)
    return None if n + more > MOST_SEEDS else max(1, more)
