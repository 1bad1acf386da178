"""Ratios of sums with their standard errors, where the unit of chance is a whole tensor.

Elements of a block share its scale and those of a tensor its outer scale, so that elements are no independent
draws. Tensors are: for the sums a_i and b_i of n tensors the ratio is Σa / Σb, and its standard error
√(n / (n − 1) · Σ (a_i − ratio · b_i)²) / Σb (the usual one of a ratio estimator, Cochran 1977, §2.11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ablate.diagnose.measure import ratio

BOUND = 5.0
"""Standard errors up to which a figure counts as what is expected; stated before anything is drawn."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its standard error; None where it is not defined."""

    value: float | None
    error: float | None

    def off(self, expected: float, *, other_error: float | None = None) -> float | None:
        """Return the distance from an expected value in standard errors; None where there is none.

        A distance of less than a millionth is the arithmetic's and counts as 0.
        """
        if self.value is None or self.error is None:
            return None
        distance = self.value - expected
        if abs(distance) < 1e-6:
            return 0.0
        error = math.hypot(self.error, other_error or 0.0)
        return distance / error if error else math.copysign(math.inf, distance)

    def is_at(self, expected: float) -> bool:
        """Whether the figure is the expected one within ``BOUND`` standard errors."""
        off = self.off(expected)
        return off is not None and abs(off) <= BOUND

    def agrees_with(self, other: Estimate) -> bool:
        """Whether two independent or paired figures are equal within ``BOUND`` standard errors."""
        if self.value is None or other.value is None:
            return self.value is other.value
        off = self.off(other.value, other_error=other.error)
        return off is not None and abs(off) <= BOUND


@dataclass(kw_only=True)
class Ratios:
    """Sums a_i and b_i of each tensor: one pair, or as many as a vector has."""

    parts: list[Tensor] = field(default_factory=list)
    wholes: list[Tensor] = field(default_factory=list)

    def add(self, part: Tensor, whole: Tensor) -> None:
        """Add the sums of one tensor."""
        self.parts.append(part.to(torch.float64).reshape(-1))
        self.wholes.append(whole.to(torch.float64).reshape(-1))

    def estimates(self, start: float = 0.0) -> tuple[Estimate, ...]:
        """Return ``start`` plus each ratio."""
        if not self.parts:
            return ()
        a, b = torch.stack(self.parts), torch.stack(self.wholes)
        count, whole = len(a), b.sum(0)
        ratios = a.sum(0) / whole
        spread = (a - ratios * b).square().sum(0) * (count / max(count - 1, 1))
        errors = (spread.sqrt() / whole.abs()).tolist()
        return tuple(
            Estimate(value=ratio(start + one, 1.0), error=ratio(error, 1.0) if count > 1 else None)
            for one, error in zip(ratios.tolist(), errors, strict=True)
        )

    def estimate(self, start: float = 0.0) -> Estimate:
        """Return ``start`` plus the single ratio."""
        (found,) = self.estimates(start)
        return found
