"""The three intervals the report uses: of a mean, of a difference of means (Welch), of paired differences.

They are Student's t intervals at 95 %, two-sided. ``scipy.special`` is used instead of ``scipy.stats``, which
takes three times as long to import; the tests compare the results with ``scipy.stats``.

How it fails: it does not raise. Where no interval can be had (one value, or no spread at all), ``low`` and
``high`` are None and ``note`` says why. An interval of width nought would claim a certainty that a few equal
figures do not give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

LEVEL = 0.95
ONE_RUN = "n = 1: no interval"
NO_SPREAD = "all runs gave the same figure: no interval"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval; None where there is no honest figure."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None


def quantile(degrees: float) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    return float(stdtrit(degrees, 0.5 + LEVEL / 2))


def mean_interval(values: ArrayLike) -> Interval:
    """Return the mean with its t interval; of paired differences this is the paired t interval."""
    x = np.asarray(values, dtype=float)
    if not len(x):
        return Interval(note="no values")
    mean = float(np.mean(x))
    if len(x) == 1:
        return Interval(estimate=mean, note=ONE_RUN)
    if np.ptp(x) == 0:
        return Interval(estimate=mean, note=NO_SPREAD)
    half = quantile(len(x) - 1) * float(np.std(x, ddof=1)) / math.sqrt(len(x))
    return Interval(estimate=mean, low=mean - half, high=mean + half)


def welch_interval(left: ArrayLike, right: ArrayLike) -> Interval:
    """Return mean(left) − mean(right) with Welch's interval, which needs no equal variances."""
    x = np.asarray(left, dtype=float)
    y = np.asarray(right, dtype=float)
    if not len(x) or not len(y):
        return Interval(note="no values")
    difference = float(np.mean(x) - np.mean(y))
    if min(len(x), len(y)) < 2:
        return Interval(estimate=difference, note=ONE_RUN)
    if np.ptp(x) == 0 and np.ptp(y) == 0:
        return Interval(estimate=difference, note=NO_SPREAD)
    var_x = float(np.var(x, ddof=1)) / len(x)
    var_y = float(np.var(y, ddof=1)) / len(y)
    degrees = (var_x + var_y) ** 2 / (var_x**2 / (len(x) - 1) + var_y**2 / (len(y) - 1))
    half = quantile(degrees) * math.sqrt(var_x + var_y)
    return Interval(estimate=difference, low=difference - half, high=difference + half)


def exponential(interval: Interval, *, minus: float = 0.0) -> Interval:
    """Return exp(interval) − minus, part by part; what overflows is no figure."""

    def part(value: float | None) -> float | None:
        if value is None:
            return None
        result = math.exp(value) - minus if value < 700 else math.inf
        return result if math.isfinite(result) else None

    return replace(
        interval, estimate=part(interval.estimate), low=part(interval.low), high=part(interval.high)
    )
