"""Several arms against one baseline: each comparison's variance, moderated by those of the others.

With three seeds an arm's own variance is known so badly that its interval is mostly that of Student's t with
two degrees of freedom. The arms of a study spread much alike. So each variance is drawn towards their mean,
as if that were known from ``d0`` more degrees of freedom (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3: 3;
here ``d0`` is fixed and small, so that an arm of another spread is not overruled). Coverage is then the
average over a study's comparisons: an arm that spreads more than the others is covered less often, and is
named. Without pairs the baseline keeps its own variance, because an error in that is in every comparison and
no average makes it good. A single arm and its baseline are moderated by each other, unless the baseline
stands out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from scipy.special import fdtri

from ablate.plan.estimate import moderating_degrees
from ablate.results.intervals import Estimate, difference, mean_estimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Values = Sequence[tuple[int, float]]
    """Seed and value of each run."""

Arm = TypeVar("Arm")
NO_PAIRS = "fewer than 2 pairs of seeds: compared unpaired"
_UNPAIRED_D0 = 1.0
_STANDS_OUT = 0.9


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Mean of an arm minus mean of the baseline: moderated, and from its ``own`` variance alone.

    ``pairs``: the seeds that were compared as pairs; none where it is unpaired. ``stands_out``: the arm
    spreads so much more than the others that its own interval is the safer one. ``baseline_stands_out``:
    without pairs, the baseline spreads so much more than the arms.
    """

    estimate: Estimate
    own: Estimate
    pairs: tuple[int, ...] = ()
    stands_out: bool = False
    baseline_stands_out: bool = False


def contrasts(
    sides: Mapping[Arm, tuple[Values, Values]], *, paired: bool, moderated: bool = True
) -> dict[Arm, Contrast]:
    """Return each arm against the baseline, from one value a run of either.

    ``sides``: the arm's runs, and those of the baseline that it is compared with. ``paired``: by differences
    of seeds in common, where there are two at least and no seed stands for two runs; else by Welch's way.
    """
    seeds = {arm: _common(*both) if paired else [] for arm, both in sides.items()}
    own: dict[Arm, Contrast] = {}
    for arm, (left, right) in sides.items():
        if len(seeds[arm]) >= 2:
            x, y = dict(left), dict(right)
            gaps = [x[seed] - y[seed] for seed in seeds[arm]]
            # A constant difference is left with the rounding of its two sides, which is no spread.
            if max(gaps) - min(gaps) <= 8 * math.ulp(max(map(abs, (*x.values(), *y.values())))):
                gaps = gaps[:1] * len(gaps)
            estimate = mean_estimate(gaps)
        else:
            estimate = difference(_mean(left), _mean(right))
        own[arm] = Contrast(
            estimate=estimate, own=estimate, pairs=tuple(seeds[arm]) if len(seeds[arm]) >= 2 else ()
        )
    if not moderated:
        return own
    in_pairs = {arm: found for arm, found in own.items() if found.pairs}
    apart = {arm: found for arm, found in own.items() if not found.pairs}
    return own | _paired(in_pairs) | _unpaired(apart, sides)


def _common(left: Values, right: Values) -> list[int]:
    """Return the seeds of both; none where a seed stands for two runs: which is the pair is not known."""
    x, y = dict(left), dict(right)
    return sorted(x.keys() & y.keys()) if len(x) == len(left) and len(y) == len(right) else []


def _mean(values: Values) -> Estimate:
    return mean_estimate([value for _, value in values])


def _paired(own: Mapping[Arm, Contrast]) -> dict[Arm, Contrast]:
    pool = _Pool({arm: (found.own, len(found.pairs)) for arm, found in own.items()})
    found = {}
    for arm, one in own.items():
        d0 = moderating_degrees(len(pool.variances), pool.others(arm))
        if arm in pool.variances and d0:
            found[arm] = replace(one, estimate=pool.moderate(arm, d0), stands_out=pool.stands_out(arm))
    return found


def _unpaired(own: Mapping[Arm, Contrast], sides: Mapping[Arm, tuple[Values, Values]]) -> dict[Arm, Contrast]:
    # Of the baseline all runs that any arm is compared with.
    most = max((right for _, right in sides.values()), key=len, default=())
    parts: dict[Arm | None, tuple[Estimate, int]] = {
        arm: (_mean(left), len(left)) for arm, (left, _) in sides.items() if left
    }
    arms = _Pool(parts)
    every = _Pool(parts | ({None: (_mean(most), len(most))} if most else {}))
    out = every.stands_out(None)
    apart = None in every.variances and (out or len(arms.variances) > 1)
    pool = arms if apart else every
    base_d0 = 0.0 if apart else min(_UNPAIRED_D0, every.others(None))
    found = {}
    for arm, one in own.items():
        left, right = sides[arm]
        if not one.own.degrees or not one.own.variance:
            continue
        estimate = difference(
            pool.moderate(arm, min(_UNPAIRED_D0, pool.others(arm)), _mean(left), len(left)),
            pool.moderate(None, base_d0, _mean(right), len(right)),
        )
        estimate = replace(estimate, degrees=min(estimate.degrees, every.degrees))
        found[arm] = replace(one, estimate=estimate, stands_out=pool.stands_out(arm), baseline_stands_out=out)
    return found


class _Pool(Generic[Arm]):
    """Variances of single runs (or pairs) of several arms, each with its degrees of freedom."""

    def __init__(self, means: Mapping[Arm, tuple[Estimate, int]]) -> None:
        self._means = dict(means)
        self.variances = {
            arm: (mean.variance * n, n - 1) for arm, (mean, n) in means.items() if mean.variance
        }
        self.degrees = sum(degrees for _, degrees in self.variances.values())
        total = sum(variance * degrees for variance, degrees in self.variances.values())
        self._mean = total / self.degrees if self.degrees else 0.0

    def others(self, arm: Arm) -> int:
        """Return the degrees of freedom that the other arms have."""
        return self.degrees - self.variances.get(arm, (0.0, 0))[1]

    def moderate(self, arm: Arm, d0: float, mean: Estimate | None = None, n: int = 0) -> Estimate:
        """Return a mean with its variance drawn towards that of all; default: the arm's own mean."""
        if mean is None:
            mean, n = self._means[arm]
        if not d0:
            return mean
        degrees = n - 1
        variance = (d0 * self._mean + degrees * mean.variance * n) / (d0 + degrees)
        return Estimate(value=mean.value, variance=variance / n, degrees=d0 + degrees)

    def stands_out(self, arm: Arm) -> bool:
        """Tell whether an arm's variance is beyond the 90 % quantile of F against that of the others."""
        if arm not in self.variances or not self.others(arm):
            return False
        variance, degrees = self.variances[arm]
        rest = self.others(arm)
        others = (self._mean * self.degrees - variance * degrees) / rest
        return variance > others * float(fdtri(degrees, rest, _STANDS_OUT))
