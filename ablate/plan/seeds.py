"""What so many seeds will find, before any has run: for the plan of a study, without numpy or scipy.

How it fails: it does not raise. Of seeds too few for the approximation there is no figure.
"""

from __future__ import annotations

import math
from statistics import NormalDist

SPREAD = 0.035
"""Standard deviation of the log ratio of two runs' tokens to target, of one seed: as in docs/findings."""
_MOST_D0 = 3.0


def moderating_degrees(arms: int, others: float) -> float:
    """Return how many degrees of freedom the other arms lend to a paired comparison's variance.

    ``others``: those of all arms but the one in question. Differences to one baseline go together: m of them
    tell less than m times as much.
    """
    return min(_MOST_D0, 3 * others / (arms + 3))


def cost_found(seeds: int, arms: int, *, moderated: bool) -> float | None:
    """Return the token cost that paired seeds find in four of five comparisons; None of too few seeds.

    ``arms``: compared with the baseline. Pairs spread by ``SPREAD``. The sum of two quantiles stands for the
    noncentral t distribution, which is within a tenth of it here.
    """
    degrees = float(seeds - 1)
    if moderated:
        degrees += moderating_degrees(arms, degrees * (arms - 1))
    if seeds < 2 or degrees < 2:
        return None
    reach = _student(0.975, degrees) + _student(0.8, degrees)
    return math.expm1(reach * SPREAD / math.sqrt(seeds))


def _student(share: float, degrees: float) -> float:
    """Return a quantile of Student's t (Fisher and Cornish 1960), to 1 % from 2 degrees of freedom up."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
