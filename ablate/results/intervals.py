"""The report's intervals: of a mean, of a difference of means, and of weighted sums of independent estimates.

All are two-sided Student's t intervals, at 95 % or at the level that a look asks for, with Welch's
and Satterthwaite's degrees of freedom. ``scipy.special`` serves instead of ``scipy.stats``, which takes three
times as long to import; the tests compare the results with ``scipy.stats``.

Without an interval (one value, no spread, one too large to compute with) ``low`` and ``high`` are None and
``note`` says why. A width of zero would claim too much of equal values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

ALPHA = 0.05
"""The chance that an interval misses: 95 % intervals, unless a look asks for another (``stopping``)."""
ONE_RUN = "n = 1: no interval"
NO_SPREAD = "all runs gave the same figure: no interval"
TOO_LARGE = "the figures lie too far apart: no interval"


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
