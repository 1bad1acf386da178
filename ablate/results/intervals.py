"""The report's intervals: of means, of sums of independent estimates, of several arms against one baseline.

All are two-sided Student's t intervals, at 95 % or at the level that a look asks for, with Welch's
and Satterthwaite's degrees of freedom. ``scipy.special`` serves instead of ``scipy.stats``, which takes three
times as long to import; the tests compare the results with ``scipy.stats``.

Without an interval (one value, no spread, one too large to compute with) ``low`` and ``high`` are None and
``note`` says why. A width of zero would claim too much of equal values.

Several arms against one baseline: each comparison's variance is moderated by those of the others. With three
seeds an arm's own variance is known so badly that its interval is mostly that of Student's t with two degrees
of freedom. The arms of a study spread much alike. So each variance is drawn towards their mean, as if that
were known from ``d0`` more degrees of freedom (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3: 3; here ``d0`` is
fixed and small, so that an arm of another spread is not overruled). Coverage is then the average over a
study's comparisons: an arm that spreads more than the others is covered less often, and is named. Without
pairs the baseline keeps its own variance, because an error in that is in every comparison and no average
makes it good. A single arm and its baseline are moderated by each other, unless the baseline stands out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from scipy.special import fdtri, stdtrit

from ablate.plan.estimate import moderating_degrees

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    Values = Sequence[tuple[int, float]]
    """Seed and value of each run."""

Arm = TypeVar("Arm")

ALPHA = 0.05
"""The chance that an interval misses: 95 % intervals, unless a look asks for another (``stopping``)."""
ONE_RUN = "n = 1: no interval"
NO_SPREAD = "all runs gave the same figure: no interval"
NO_PAIRS = "fewer than 2 pairs of seeds: compared unpaired"
TOO_LARGE = "the figures lie too far apart: no interval"
_UNPAIRED_D0 = 1.0
_STANDS_OUT = 0.9


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval; None where there is no honest figure."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None

    def each(self, change: Callable[[float], float | None]) -> Interval:
        """Return the interval with its estimate and its ends changed, where they are known."""
        low, middle, high = (
            None if part is None else change(part) for part in (self.low, self.estimate, self.high)
        )
        return replace(self, estimate=middle, low=low, high=high)


def quantile(degrees: float, alpha: float = ALPHA) -> float:
    """Return the two-sided quantile of Student's t that is exceeded with the probability ``alpha``."""
    return -float(stdtrit(degrees, alpha / 2))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the variance of its error, and the degrees of freedom that this variance is known with.

    ``degrees`` is zero where the variance is not known, as of a single value.
    """

    value: float
    variance: float
    degrees: float


def mean_estimate(values: ArrayLike) -> Estimate:
    """Return the mean of one value at least."""
    x = np.asarray(values, dtype=float)
    mean = float(np.mean(x))
    # Rounding must make no spread where there is none.
    variance = float(np.var(x, ddof=1)) / len(x) if len(x) > 1 and np.ptp(x) else 0.0
    return Estimate(value=mean, variance=variance, degrees=len(x) - 1)


def combination(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return Σ weight · estimate of independent estimates, with Satterthwaite's degrees of freedom.

    A part may be such a sum itself: its v²/d is the sum of its parts', so that the result is the formula over
    all parts whatever the order in which they are put together.
    """
    value = sum(weight * part.value for weight, part in parts)
    variances = [weight**2 * part.variance for weight, part in parts]
    variance = sum(variances)
    if not all(part.degrees for _, part in parts):
        return Estimate(value=value, variance=0.0, degrees=0.0)
    if not variance:
        return Estimate(value=value, variance=0.0, degrees=sum(part.degrees for _, part in parts))
    # By shares of the variance, whose squares neither overflow nor vanish.
    shares = ((own / variance, part.degrees) for own, (_, part) in zip(variances, parts, strict=True))
    return Estimate(value=value, variance=variance, degrees=1 / sum(w**2 / d for w, d in shares))


def difference(left: Estimate, right: Estimate) -> Estimate:
    """Return left − right of two independent estimates: of two means, with Welch's degrees of freedom."""
    return combination([(1.0, left), (-1.0, right)])


def t_interval(estimate: Estimate, alpha: float = ALPHA) -> Interval:
    """Return an estimate with its t interval."""
    if not estimate.degrees:
        return Interval(estimate=estimate.value, note=ONE_RUN)
    if not estimate.variance:
        return Interval(estimate=estimate.value, note=NO_SPREAD)
    half = quantile(estimate.degrees, alpha) * math.sqrt(estimate.variance)
    if not math.isfinite(half):
        return Interval(estimate=estimate.value, note=TOO_LARGE)
    return Interval(estimate=estimate.value, low=estimate.value - half, high=estimate.value + half)


def mean_interval(values: ArrayLike, alpha: float = ALPHA) -> Interval:
    """Return the mean with its t interval; of paired differences this is the paired t interval."""
    x = np.asarray(values, dtype=float)
    return t_interval(mean_estimate(x), alpha) if len(x) else Interval(note="no values")


def exponential(interval: Interval, *, minus: float = 0.0) -> Interval:
    """Return exp(interval) − minus, part by part; what overflows is no figure."""

    def part(value: float) -> float | None:
        result = math.exp(value) - minus if value < 700 else math.inf
        return result if math.isfinite(result) else None

    return interval.each(part)


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


def contrast(left: Values, right: Values, *, paired: bool) -> Contrast:
    """Return one arm against the baseline, from one value a run of either, by their own variance.

    ``paired``: by differences of seeds in common, where there are two at least and no seed stands for two
    runs; else by Welch's way.
    """
    x, y = dict(left), dict(right)
    # Where a seed stands for two runs it is not known which are the pair.
    paired = paired and len(x) == len(left) and len(y) == len(right)
    seeds = tuple(sorted(x.keys() & y.keys())) if paired else ()
    if len(seeds) < 2:
        found = difference(_mean(left), _mean(right))
        return Contrast(estimate=found, own=found)
    gaps = [x[seed] - y[seed] for seed in seeds]
    # A constant difference is left with the rounding of its two sides, which is no spread.
    if max(gaps) - min(gaps) <= 8 * math.ulp(max(map(abs, (*x.values(), *y.values())))):
        gaps = gaps[:1] * len(gaps)
    found = mean_estimate(gaps)
    return Contrast(estimate=found, own=found, pairs=seeds)


def contrasts(
    sides: Mapping[Arm, tuple[Values, Values]], *, paired: bool, moderated: bool = True
) -> dict[Arm, Contrast]:
    """Return each arm against the baseline.

    ``sides``: the arm's runs, and those of the baseline that it is compared with.
    """
    found = {arm: contrast(*both, paired=paired) for arm, both in sides.items()}
    if moderated:
        pool = _Pool({arm: (one.own, len(one.pairs)) for arm, one in found.items() if one.pairs})
        for arm in pool.variances:
            if d0 := moderating_degrees(len(pool.variances), pool.others(arm)):
                one = found[arm]
                drawn = pool.moderate(one.own, len(one.pairs), d0)
                found[arm] = replace(one, estimate=drawn, stands_out=pool.stands_out(arm))
        found |= _unpaired({arm: one for arm, one in found.items() if not one.pairs}, sides)
    return found


def _mean(values: Values) -> Estimate:
    return mean_estimate([value for _, value in values])


def _unpaired(own: Mapping[Arm, Contrast], sides: Mapping[Arm, tuple[Values, Values]]) -> dict[Arm, Contrast]:
    # Of the baseline all runs that any arm is compared with.
    most = max((right for _, right in sides.values()), key=len, default=())
    parts: dict[Arm | None, tuple[Estimate, int]] = {
        arm: (_mean(left), len(left)) for arm, (left, _) in sides.items() if left
    }
    pool = _Pool(parts)
    every = _Pool(parts | ({None: (_mean(most), len(most))} if most else {}))
    out = every.stands_out(None)
    apart = None in every.variances and (out or len(pool.variances) > 1)
    if not apart:
        pool = every
    found = {}
    for arm, one in own.items():
        if one.own.degrees and one.own.variance:
            left, right = sides[arm]
            base_d0 = 0.0 if apart else min(_UNPAIRED_D0, every.others(None))
            estimate = difference(
                pool.moderate(_mean(left), len(left), min(_UNPAIRED_D0, pool.others(arm))),
                pool.moderate(_mean(right), len(right), base_d0),
            )
            found[arm] = replace(
                one,
                estimate=replace(estimate, degrees=min(estimate.degrees, every.degrees)),
                stands_out=pool.stands_out(arm),
                baseline_stands_out=out,
            )
    return found


class _Pool(Generic[Arm]):
    """Variances of single runs (or pairs) of several arms, each with its degrees of freedom."""

    def __init__(self, means: Mapping[Arm, tuple[Estimate, int]]) -> None:
        self.variances = {
            arm: (mean.variance * n, n - 1) for arm, (mean, n) in means.items() if mean.variance
        }
        self.degrees = sum(degrees for _, degrees in self.variances.values())
        total = sum(variance * degrees for variance, degrees in self.variances.values())
        self._mean = total / self.degrees if self.degrees else 0.0

    def others(self, arm: Arm) -> int:
        """Return the degrees of freedom that the other arms have."""
        return self.degrees - self.variances.get(arm, (0.0, 0))[1]

    def moderate(self, mean: Estimate, n: int, d0: float) -> Estimate:
        """Return a mean of n with its variance drawn towards that of all."""
        if not d0:
            return mean
        variance = (d0 * self._mean + (n - 1) * mean.variance * n) / (d0 + n - 1)
        return Estimate(value=mean.value, variance=variance / n, degrees=d0 + n - 1)

    def stands_out(self, arm: Arm) -> bool:
        """Tell whether an arm's variance is beyond the 90 % quantile of F against that of the others."""
        if arm not in self.variances or not self.others(arm):
            return False
        variance, degrees = self.variances[arm]
        rest = self.others(arm)
        others = (self._mean * self.degrees - variance * degrees) / rest
        return variance > others * float(fdtri(degrees, rest, _STANDS_OUT))
