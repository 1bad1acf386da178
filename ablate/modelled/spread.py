"""How far off the modelled speed may be, from how far off it was on the steps that it is calibrated on.

Each kind of kernel (``speed.Kernel``) is taken to be off by a factor of its own, exp(s ε), with independent
standard normal ε: devices, software and shapes differ. The log of a step's time is then off by
s √(Σ share²), over the shares of the kernels in it, and the log of a speed-up by
s √(Σ (difference of shares)²): what both recipes have in common cancels.

s² = Σ (r² / Σ share²) / (n − 2) over the n steps of ``measured.CALIBRATION``, where r is the log of modelled
over measured time, and 2 are the rates that were chosen by these steps. Ranges are 95 %, by Student's t with
n − 2 degrees of freedom. They hold for well-tuned steps of a few devices that share data alone, not for what
``speed`` leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ablate.base.t_quantile import student
from ablate.modelled.measured import CALIBRATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.modelled.speed import Kernel, TokenTime

_CHOSEN = 2
"""Rates that were chosen by the steps: both of attention."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """An estimate with its 95 % range."""

    estimate: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """Return the range of a multiple."""
        return Range(estimate=self.estimate * factor, low=self.low * factor, high=self.high * factor)


def seconds_range(time: TokenTime) -> Range:
    """Return the seconds of a whole step per token."""
    return _range(time.total, _shares(time.by_kernel()))


def speed_up(slow: Mapping[Kernel, float], fast: Mapping[Kernel, float]) -> Range:
    """Return how much faster ``fast`` is than ``slow``, both in seconds by kind of kernel."""
    one, other = _shares(slow), _shares(fast)
    apart = {kernel: one.get(kernel, 0.0) - other.get(kernel, 0.0) for kernel in {**one, **other}}
    return _range(sum(slow.values()) / sum(fast.values()), apart)


@cache
def kernel_spread() -> float:
    """Return s, the standard deviation of the log of a kernel's speed."""
    squares = (
        math.log1p(step.deviation) ** 2 / _square(_shares(step.time.by_kernel())) for step in CALIBRATION
    )
    return math.sqrt(sum(squares) / (len(CALIBRATION) - _CHOSEN))


def _range(estimate: float, shares: Mapping[Kernel, float]) -> Range:
    reach = student(0.975, len(CALIBRATION) - _CHOSEN) * kernel_spread() * math.sqrt(_square(shares))
    return Range(estimate=estimate, low=estimate * math.exp(-reach), high=estimate * math.exp(reach))


def _shares(seconds: Mapping[Kernel, float]) -> dict[Kernel, float]:
    total = sum(seconds.values())
    return {kernel: part / total for kernel, part in seconds.items()}


def _square(shares: Mapping[Kernel, float]) -> float:
    return sum(share**2 for share in shares.values())
