"""What so many seeds will find, before any has run: for the plan of a study, without numpy or scipy."""

from __future__ import annotations

import math

from ablate.base.t_quantile import student

SPREAD = 0.035
"""Standard deviation of the log ratio of two runs' tokens to target, of one seed: as in docs/findings."""
_MOST_D0 = 3.0


def moderating_degrees(arms: int, others: float) -> float:
    """Return how many degrees of freedom the other arms lend to a paired comparison's variance.

    ``others``: those of all arms but the one in question. Differences to one baseline go together: m of them
    tell less than m times as much.
    """
    return min(_MOST_D0, 3 * others / (arms + 3))


def cost_found(seeds: int, arms: int, *, moderated: bool, spread: float = SPREAD) -> float | None:
    """Return the token cost that paired seeds find in four of five comparisons; None of too few seeds.

    ``arms``: compared with the baseline. ``spread``: of the pairs' log ratios. The sum of two quantiles is
    within a tenth of the noncentral t distribution's here.
    """
    degrees = float(seeds - 1)
    if moderated:
        degrees += moderating_degrees(arms, degrees * (arms - 1))
    if seeds < 2 or degrees < 2:
        return None
    reach = student(0.975, degrees) + student(0.8, degrees)
    return math.expm1(reach * spread / math.sqrt(seeds))
