"""Figures of a quantiser on average, with standard errors: gain, error, bias, independence of its noise.

Each tensor X is quantised twice, under one rotation; E₁ and E₂ are the errors against the exact rotated X.
⟨E₁, E₂⟩ is an unbiased estimate of the energy of the error's expectation: what rounding adds at random has
expectation zero in it. A quantiser without randomness has only bias.

*Noise alike*: the largest correlation, over a few neighbours, of the noise (E₁ − E₂) · sign X at two
elements. The sign is needed: two elements that share a random word are rounded up or down in magnitude
together, and with signs of their own such a correlation would average out.

Elements of a block share its scale and those of a tensor its outer scale, so that elements are no independent
draws. Tensors are: for the sums a_i and b_i of n tensors the ratio is Σa / Σb, and its standard error
√(n / (n − 1) · Σ (a_i − ratio · b_i)²) / Σb (the usual one of a ratio estimator, Cochran 1977, §2.11).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.diagnose.measure import ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUND = 5.0
"""A figure within so many standard errors counts as the expected one; fixed before anything is drawn."""
_NEIGHBOURS = (1, 2, 3)
_LARGEST_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class RatioEstimate:
    """A figure and its standard error; None where it is not defined."""

    value: float | None
    error: float | None

    def off(self, expected: float, other_error: float = 0.0) -> float | None:
        """Return the distance from an expected value in standard errors; None without a value or an error.

        A distance of less than a millionth is due to the arithmetic and counts as 0.
        """
        if self.value is None or self.error is None:
            return None
        distance = self.value - expected
        if abs(distance) < 1e-6:
            return 0.0
        error = math.hypot(self.error, other_error)
        if error:
            return distance / error
        return math.copysign(math.inf, distance)

    def is_at(self, expected: float | None, other_error: float | None = 0.0) -> bool:
        """Whether the figure is the expected one, or another estimate, within ``BOUND`` standard errors."""
        if expected is None:
            return self.value is None
        off = self.off(expected, other_error or 0.0)
        return off is not None and abs(off) <= BOUND


def ratios(
    pairs: Sequence[tuple[Tensor, Tensor]], start: float = 0.0
) -> tuple[RatioEstimate, ...]:
    """Estimate ``start`` + Σa / Σb from a pair (a_i, b_i) per tensor; for vectors, one estimate per place."""
    if not pairs:
        return ()
    a = torch.stack([part.double().reshape(-1) for part, _ in pairs])
    b = torch.stack([whole.double().reshape(-1) for _, whole in pairs])
    count = len(pairs)
    quotients = a.sum(0) / b.sum(0)
    spread = (a - quotients * b).square().sum(0) * (count / max(count - 1, 1))
    errors = spread.sqrt() / b.sum(0).abs()
    estimates = []
    for quotient, error in zip(quotients.tolist(), errors.tolist(), strict=True):
        known_error = ratio(error, 1.0) if count > 1 else None
        value = ratio(start + quotient, 1.0)
        estimates.append(RatioEstimate(value=value, error=known_error))
    return tuple(estimates)


@dataclass(frozen=True, kw_only=True)
class RoundingFigures:
    """A quantiser on one kind of data.

    ``gain``: the slope of quantised on exact; ``by_position``: the same at each place in the block, empty
    where blocks are larger than 128. ``relative_error``: ‖E‖ / ‖X‖, the root of the ratio of energies.
    ``bias_share``: the share of the error's energy that all draws have in common. ``noise_alike``: the
    correlation of neighbours' noise, by their distance along the block, and of the next row; empty with one
    draw per tensor. ``scale_bias``, ``dead_zone``, ``grid_noise``: shares of the first draw's error
    (``error_parts``). ``unbiased``: the gain is 1 and no error is common to all draws, within the bound.
    """

    gain: RatioEstimate
    by_position: tuple[RatioEstimate, ...]
    relative_error: RatioEstimate
    bias_share: RatioEstimate
    noise_alike: dict[str, RatioEstimate]
    scale_bias: RatioEstimate
    dead_zone: RatioEstimate
    grid_noise: RatioEstimate
    unbiased: bool

    @property
    def pattern(self) -> tuple[float, ...]:
        """The gains by position, folded to the shortest pattern that repeats within the bound."""
        gains = [gain.value for gain in self.by_position if gain.value is not None]
        for period in range(1, len(gains) + 1):
            starts = range(period)
            means = [statistics.fmean(gains[start::period]) for start in starts]
            if len(gains) % period == 0 and all(
                map(RatioEstimate.is_at, self.by_position, itertools.cycle(means))
            ):
                return tuple(means)
        return tuple(gains)

    @property
    def largest_alike(self) -> tuple[str, RatioEstimate] | None:
        """The neighbours whose noise is most alike; None if none is so beyond the bound."""
        beyond = []
        for neighbours, correlation in self.noise_alike.items():
            if abs(correlation.off(0.0) or 0.0) > BOUND:
                beyond.append((neighbours, correlation))
        return max(beyond, key=lambda item: abs(item[1].value or 0.0), default=None)

    def unlike(self, other: RoundingFigures) -> list[str]:
        """Name the figures that are not the other's, within the bound."""
        pairs = [
            ("gain", self.gain, other.gain),
            ("relative error", self.relative_error, other.relative_error),
            ("bias share", self.bias_share, other.bias_share),
        ]
        for gain, other_gain in zip(self.by_position, other.by_position, strict=True):
            pairs.append(("gain by position", gain, other_gain))
        names = []
        for name, figure, expected in pairs:
            if name not in names and not figure.is_at(expected.value, expected.error):
                names.append(name)
        if self.largest_alike is not None and other.largest_alike is None:
            names.append("independence of the noise")
        return names


class Sums:
    """Sums over tensors, from which the figures are made. ``columns``: elements along a block."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, exact: Tensor, outputs: list[Tensor], ideal: Tensor) -> None:
        """Add one tensor: exact, one or two outputs, and ``OnGrid.ideal``, fp32 [n, k], contraction last."""
        first = outputs[0] - exact
        last = outputs[-1] - exact
        mean = (first + last) / 2
        energy = _dot(exact, exact)
        error_energy = (_dot(first, first) + _dot(last, last)) / 2
        self.pairs["gain"].append((_dot(mean, exact), energy))
        self.pairs["error"].append((error_energy, energy))
        self.pairs["bias"].append((_dot(first, last), error_energy))
        parts = error_parts(exact, outputs[0], ideal)
        self.pairs["parts"].append((parts, parts.sum().expand(3)))
        if 1 < self.columns <= _LARGEST_BLOCK:
            along = (mean * exact).view(-1, self.columns).sum(0)
            whole = (exact * exact).view(-1, self.columns).sum(0)
            self.pairs["position"].append((along, whole))
        if len(outputs) == 2:
            # pairs across the ends of rows hardly count
            noise = ((first - last) * exact.sign()).view(-1)
            distances = (*_NEIGHBOURS, exact.shape[1])
            products = [_dot(noise[:-far], noise[far:]) for far in distances]
            whole = _dot(noise, noise).expand(len(products))
            self.pairs["noise"].append((torch.stack(products), whole))

    def figures(self) -> RoundingFigures:
        """Compute the figures of all tensors so far: one at least."""
        names = [*(f"{far} apart" for far in _NEIGHBOURS), "next row"]
        (gain,) = ratios(self.pairs["gain"], 1.0)
        (bias,) = ratios(self.pairs["bias"])
        (energy,) = ratios(self.pairs["error"])
        scale_bias, dead_zone, grid_noise = ratios(self.pairs["parts"])
        root = None if energy.value is None else math.sqrt(max(energy.value, 0.0))
        spread = energy.error
        if spread is not None and root:
            spread /= 2 * root
        return RoundingFigures(
            gain=gain,
            by_position=ratios(self.pairs["position"], 1.0),
            relative_error=RatioEstimate(value=root, error=spread),
            bias_share=bias,
            noise_alike=dict(zip(names, ratios(self.pairs["noise"]), strict=False)),
            scale_bias=scale_bias,
            dead_zone=dead_zone,
            grid_noise=grid_noise,
            unbiased=gain.is_at(1.0) and (bias.value is None or bias.is_at(0.0)),
        )


def error_parts(exact: Tensor, quantised: Tensor, ideal: Tensor) -> Tensor:
    """Split ‖quantised − exact‖² into scale bias, dead zone and grid noise (fp64 [3]), which add up to it.

    The parts are those of Li, Wu, Shen (arXiv 2605.20402), who split MXFP4's error; here of any format with
    blocks. ``ideal`` is rounded on the same grid, under each block's exact scale (``OnGrid``). Of its error
    the elements that become zero make the *dead zone*, all others the *grid noise*. What the quantised
    operand errs beyond that is the *scale bias*: it is due to the scale in use, such as a power of two, with
    what clips under it, and is below 0 where that scale errs less than the exact one.
    """
    energies = (ideal - exact).double().square()
    dead = energies[ideal == 0].sum()
    noise = energies[ideal != 0].sum()
    whole = (quantised - exact).double().square().sum()
    return torch.stack((whole - dead - noise, dead, noise))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1)).double()
