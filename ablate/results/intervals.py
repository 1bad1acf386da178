"""The report's intervals: of means, of sums of independent estimates, of several arms against one baseline.

All are two-sided Student's t intervals, at 95 % or at the level of a study's looks (``stop_rule``), with
Welch's and Satterthwaite's degrees of freedom. ``scipy.special`` is used because ``scipy.stats`` takes three
times as long to import; the tests compare the results with ``scipy.stats``.

Where there is no interval (one value, no spread, a spread too large to compute with) ``low`` and ``high`` are
None and ``note`` says why. Equal values do not prove a width of zero.

Several arms against one baseline: each comparison's variance is moderated by those of the others. With three
seeds an arm's own variance is poorly known: its interval is mostly that of Student's t with two degrees of
freedom. But the arms of a study have similar spreads. So each variance is drawn towards their mean, as if the
mean were known from ``d0`` more degrees of freedom (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3: 3; here
``d0`` is fixed and small, so that an arm with another spread is not overruled). Coverage is then the average
over a study's comparisons: an arm that spreads more than the others is covered less often, and is named.
Without pairs the baseline keeps its own variance, because an error in it enters every comparison and does not
average out. A single arm and its baseline are moderated by each other, unless the baseline stands out.
A paired arm whose variance stands out keeps it from ``KNOWN_DEGREES`` on; with fewer pairs that test misses
most of such arms, and whoever passed it by chance would have an interval of twice the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import fdtri, stdtrit

from ablate.plan.estimate import moderating_degrees

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    Values = Sequence[tuple[int, float]]
    """Seed and value of each run."""

ALPHA = 0.05
"""The chance that an interval misses: 95 % intervals, unless the study has looks (``stop_rule``)."""
ONE_RUN = "n = 1: no interval"
NO_SPREAD = "all runs gave the same figure: no interval"
NO_PAIRS = "no seed in common: compared unpaired"
TOO_LARGE = "the figures lie too far apart: no interval"
_UNPAIRED_D0 = 1.0
_STANDS_OUT = 0.93
KNOWN_DEGREES = 4
"""From so many degrees of freedom, of five pairs, an arm's variance is known well enough to be told from others'."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its interval; None where there is no honest figure."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None

    def each(self, change: Callable[[float], float | None]) -> Interval:
        """Apply a function to the estimate and to both ends, where they are known."""
        parts = {}
        for name in ("estimate", "low", "high"):
            value = getattr(self, name)
            parts[name] = None if value is None else change(value)
        return Interval(**parts, note=self.note)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How arms are compared with a baseline.

    ``paired``: by the differences of seeds in common; ``moderated``: each variance by those of the other
    arms; ``alpha``: the chance that an interval misses.
    """

    paired: bool = False
    moderated: bool = True
    alpha: float = ALPHA


def quantile(degrees: float, alpha: float) -> float:
    """Return the value that |t| exceeds with probability ``alpha``, for Student's t."""
    return -float(stdtrit(degrees, alpha / 2))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the variance of its error, and that variance's degrees of freedom.

    ``degrees`` is zero where the variance is unknown, as for a single value.
    """

    value: float
    variance: float
    degrees: float


def mean_estimate(values: ArrayLike) -> Estimate:
    """Return the mean of at least one value, with its variance."""
    x = np.asarray(values, dtype=float)
    mean = float(np.mean(x))
    # Rounding must not give equal values a spread.
    variance = float(np.var(x, ddof=1)) / len(x) if len(x) > 1 and np.ptp(x) else 0.0
    return Estimate(value=mean, variance=variance, degrees=len(x) - 1)


def combination(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return Σ weight · estimate of independent estimates, with Satterthwaite's degrees of freedom.

    A part may be such a sum itself: v²/d adds up, so the order of combining does not matter.
    """
    value = sum(weight * part.value for weight, part in parts)
    variance = sum(weight**2 * part.variance for weight, part in parts)
    if not all(part.degrees for _, part in parts):
        return Estimate(value=value, variance=0.0, degrees=0.0)
    if not variance:
        degrees = sum(part.degrees for _, part in parts)
        return Estimate(value=value, variance=0.0, degrees=degrees)
    inverse = 0.0
    for weight, part in parts:
        # By shares of the variance, whose squares neither overflow nor vanish.
        share = weight**2 * part.variance / variance
        inverse += share**2 / part.degrees
    return Estimate(value=value, variance=variance, degrees=1 / inverse)


def difference(left: Estimate, right: Estimate) -> Estimate:
    """Subtract two independent estimates; for two means the degrees of freedom are Welch's."""
    return combination([(1.0, left), (-1.0, right)])


def t_interval(estimate: Estimate, alpha: float = ALPHA) -> Interval:
    """Return the estimate with its t interval, or with a note why it has none."""
    if not estimate.degrees:
        return Interval(estimate=estimate.value, note=ONE_RUN)
    if not estimate.variance:
        return Interval(estimate=estimate.value, note=NO_SPREAD)
    half = quantile(estimate.degrees, alpha) * math.sqrt(estimate.variance)
    if not math.isfinite(half):
        return Interval(estimate=estimate.value, note=TOO_LARGE)
    return Interval(
        estimate=estimate.value, low=estimate.value - half, high=estimate.value + half
    )


def combined_interval(
    parts: Sequence[tuple[float, Estimate]], alpha: float = ALPHA
) -> Interval:
    """Return Σ weight · estimate with its t interval, which there is only if each estimate has one."""
    whole = t_interval(combination(parts), alpha)
    if whole.note:
        return whole
    for _, part in parts:
        note = t_interval(part, alpha).note
        if note:
            return Interval(estimate=whole.estimate, note=note)
    return whole


def mean_interval(values: ArrayLike, alpha: float = ALPHA) -> Interval:
    """Return the mean with its t interval; for paired differences this is the paired t interval.

    >>> mean = mean_interval([0.11, 0.14, 0.08])
    >>> round(mean.estimate, 3), round(mean.low, 3), round(mean.high, 3)
    (0.11, 0.035, 0.185)
    """
    x = np.asarray(values, dtype=float)
    if len(x):
        return t_interval(mean_estimate(x), alpha)
    return Interval(note="no values")


def exponential(interval: Interval, *, minus: float = 0.0) -> Interval:
    """Return exp(interval) − minus, part by part; a part that overflows or is NaN is None."""

    def part(value: float) -> float | None:
        result = math.exp(value) - minus if value < 700 else math.inf
        return result if math.isfinite(result) else None

    return interval.each(part)


def change_interval(log_ratio: Estimate, alpha: float = ALPHA) -> Interval:
    """Return exp(estimate) − 1 with its t interval: the change that a log ratio stands for."""
    return exponential(t_interval(log_ratio, alpha), minus=1.0)


@dataclass(frozen=True, kw_only=True)
class Compared(Interval):
    """How far an arm is from the baseline, and how many runs of both sides are compared.

    ``left_out``: how many runs have a result, but no partner of their seed on the other side.
    ``figure``: the same with its variance, for intervals at other levels.
    """

    n: int = 0
    n_baseline: int = 0
    left_out: int = 0
    figure: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Mean of an arm minus mean of the baseline: moderated, and from its ``own`` variance alone.

    ``pairs``: the seeds that were compared as pairs; empty if unpaired. ``stands_out``: the arm spreads so
    much more than the others that its own interval is safer. ``baseline_stands_out``: unpaired, and the
    baseline spreads that much more than the arms.
    """

    estimate: Estimate
    own: Estimate
    pairs: tuple[int, ...] = ()
    stands_out: bool = False
    baseline_stands_out: bool = False

    def interval(self, method: Method) -> Interval:
        """Return the moderated difference with its t interval; a note says if there were no pairs."""
        interval = t_interval(self.estimate, method.alpha)
        if method.paired and not self.pairs and interval.note is None:
            return replace(interval, note=NO_PAIRS)
        return interval


def contrast(arm: Values, baseline: Values, *, paired: bool) -> Contrast:
    """Compare one arm with the baseline, each with one value a run, by their own variance.

    ``paired``: by differences of the seeds in common, if there are any and no seed has two runs; else by
    Welch's method. A single pair has no interval.
    """
    x = dict(arm)
    y = dict(baseline)
    seeds: tuple[int, ...] = ()
    # If a seed has two runs, the pair is not known.
    if paired and len(x) == len(arm) and len(y) == len(baseline):
        seeds = tuple(sorted(x.keys() & y.keys()))
    if not seeds:
        unpaired = difference(_mean(arm), _mean(baseline))
        return Contrast(estimate=unpaired, own=unpaired)
    gaps = [x[seed] - y[seed] for seed in seeds]
    # A constant difference still varies by the rounding of its two sides, which is no spread.
    greatest = max(abs(value) for value in (*x.values(), *y.values()))
    if max(gaps) - min(gaps) <= 8 * math.ulp(greatest):
        gaps = gaps[:1] * len(gaps)
    mean_gap = mean_estimate(gaps)
    return Contrast(estimate=mean_gap, own=mean_gap, pairs=seeds)


def contrasts(
    sides: Mapping[str, tuple[Values, Values]], method: Method
) -> dict[str, Contrast]:
    """Compare each arm with the baseline.

    ``sides``: the arm's runs, and the runs of the baseline that it is compared with.
    """
    by_arm = {}
    paired: dict[str | None, Estimate] = {}
    for arm, values in sides.items():
        by_arm[arm] = contrast(*values, paired=method.paired)
        if by_arm[arm].pairs:
            paired[arm] = by_arm[arm].own
    if not method.moderated:
        return by_arm
    pool = _Pool(paired)
    for arm, compared in by_arm.items():
        if arm not in pool.variances:
            continue
        d0 = moderating_degrees(len(pool.variances), pool.others(arm))
        stands_out = pool.stands_out(arm)
        estimate = compared.own
        if not stands_out or estimate.degrees < KNOWN_DEGREES:
            estimate = pool.moderate(estimate, d0)
        by_arm[arm] = replace(compared, estimate=estimate, stands_out=stands_out)
    if len(paired) < len(by_arm):
        _moderate_unpaired(by_arm, sides)
    return by_arm


def _mean(values: Values) -> Estimate:
    return mean_estimate([value for _, value in values])


def _moderate_unpaired(
    by_arm: dict[str, Contrast], sides: Mapping[str, tuple[Values, Values]]
) -> None:
    """Replace the contrasts without pairs by moderated ones."""
    # The baseline's variance is taken from all of its runs that any arm is compared with.
    baseline = _mean(max((values for _, values in sides.values()), key=len))
    arms: dict[str | None, Estimate] = {
        arm: _mean(values) for arm, (values, _) in sides.items()
    }
    pool = _Pool(arms)
    pool_with_baseline = _Pool(arms | {None: baseline})
    baseline_stands_out = pool_with_baseline.stands_out(None)
    baseline_d0 = 0.0
    if not baseline.variance or not (baseline_stands_out or len(pool.variances) > 1):
        pool = pool_with_baseline
        baseline_d0 = min(_UNPAIRED_D0, pool.others(None))
    for arm, contrast in by_arm.items():
        if contrast.pairs or not contrast.own.degrees or not contrast.own.variance:
            continue
        estimate = difference(
            pool.moderate(arms[arm], min(_UNPAIRED_D0, pool.others(arm))),
            pool.moderate(_mean(sides[arm][1]), baseline_d0),
        )
        degrees = min(estimate.degrees, pool_with_baseline.degrees)
        by_arm[arm] = replace(
            contrast,
            estimate=replace(estimate, degrees=degrees),
            stands_out=pool.stands_out(arm),
            baseline_stands_out=baseline_stands_out,
        )


class _Pool:
    """Variances of single runs (or pairs) of several arms, each with its degrees of freedom."""

    def __init__(self, means: Mapping[str | None, Estimate]) -> None:
        self.variances = {}
        self.degrees: float = 0
        total = 0.0
        for arm, mean in means.items():
            if mean.variance:
                variance = mean.variance * (mean.degrees + 1)
                self.variances[arm] = (variance, mean.degrees)
                self.degrees += mean.degrees
                total += variance * mean.degrees
        self._mean = total / self.degrees if self.degrees else 0.0

    def others(self, arm: str | None) -> float:
        """Return the degrees of freedom of the other arms together."""
        return self.degrees - self.variances.get(arm, (0.0, 0))[1]

    def moderate(self, mean: Estimate, d0: float) -> Estimate:
        """Draw the variance of a mean towards that of all, which counts as ``d0`` degrees."""
        if not d0:
            return mean
        n = mean.degrees + 1
        degrees = d0 + n - 1
        variance = (d0 * self._mean + (n - 1) * mean.variance * n) / degrees
        return Estimate(value=mean.value, variance=variance / n, degrees=degrees)

    def stands_out(self, arm: str | None) -> bool:
        """Tell whether an arm's variance over that of the others exceeds the 93 % quantile of F."""
        rest = self.others(arm)
        if arm not in self.variances or not rest:
            return False
        variance, degrees = self.variances[arm]
        others = (self._mean * self.degrees - variance * degrees) / rest
        return variance > others * float(fdtri(degrees, rest, _STANDS_OUT))
