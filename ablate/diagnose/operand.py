"""The effect of quantising one operand, and the properties of the operand that make it hard.

Everything is measured in the basis of the rounding, that is after any rotation. Shares are of the non-zero
elements. *Clipped*: above the grid's largest value. *Underflowed*: below its smallest positive value.
*Zeroed*: rounded to zero. A channel is a feature: a column of x [tokens, in-features], dy [tokens,
out-features] or w [out-features, in-features] as stored.

How it fails: an undefined figure (only zeros, an Inf, a NaN) is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.numerics.quantiser import to_blocks

if TYPE_CHECKING:
    from ablate.numerics.formats import Element
    from ablate.numerics.quantiser import OnGrid

OUTLIER = 5.0
"""A channel is an outlier if its root mean square is at least this multiple of the median channel's."""
_LARGEST_BLOCK = 128
_LARGEST_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Properties that make a tensor hard to quantise, before or after its rotation.

    ``crest_median`` and ``crest_p99``: largest magnitude over root mean square, of the blocks that share a
    scale. ``mean_share``: share of the tensor's energy in its channels' means. ``outlier_share``: share of
    outlier channels. ``outlier_max``: the largest channel over the median one, by root mean square.
    """

    crest_median: float | None
    crest_p99: float | None
    mean_share: float | None
    outlier_share: float | None
    outlier_max: float | None


@dataclass(frozen=True, kw_only=True)
class OperandFigures:
    """One operand of one GEMM, quantised once.

    ``gain_by_position``: the slope of quantised on exact values at each place in the block; empty unless
    blocks are rows of at most 128. ``log2_scale``: minimum, 10 %, median, 90 %, maximum of the block scales.
    """

    relative_error: float | None
    gain: float | None
    gain_by_position: tuple[float | None, ...]
    clipped: float | None
    underflowed: float | None
    zeroed: float | None
    log2_scale: tuple[float, ...]
    before: Shape
    after: Shape


def operand_figures(grid: OnGrid, quantised: Tensor, unrotated: Tensor, *, channels: int) -> OperandFigures:
    """Measure an operand.

    Args:
        grid: the operand before rounding to its grid, [n, k] with the contraction last.
        quantised: dequantised, with every factor applied, fp32 [n, k] in the same basis.
        unrotated: before the rotation, fp32 [n, k].
        channels: the dimension of [n, k] along which channels lie, 0 or 1.
    """
    exact = grid.rotated
    error = quantised - exact
    energy, product = float(exact.square().sum().item()), float((quantised * exact).sum().item())
    magnitude = grid.scaled.abs()
    there = exact != 0
    count = float(there.sum().item())

    def share(which: Tensor) -> float | None:
        return _ratio(float(which.logical_and_(there).sum().item()), count)

    after = shape_of(exact, grid.block, channels)
    same = unrotated.data_ptr() == exact.data_ptr() or torch.equal(unrotated, exact)
    return OperandFigures(
        relative_error=_root(_ratio(float(error.square().sum().item()), energy)),
        gain=_ratio(product, energy),
        gain_by_position=_by_position(quantised, exact, grid.block),
        clipped=share(magnitude > grid.element.max),
        underflowed=share(magnitude < smallest(grid.element)),
        zeroed=share(quantised == 0),
        log2_scale=_log2_quantiles(grid.scales),
        before=after if same else shape_of(unrotated, grid.block, channels),
        after=after,
    )


def smallest(element: Element) -> float:
    """Return the smallest positive value on an element's grid."""
    return 2.0 ** (element.min_exponent - element.mantissa_bits)


def shape_of(v: Tensor, block: tuple[int, int], channels: int) -> Shape:
    """Measure the shape of fp32 v [n, k]: blocks lie along k, channels along ``channels``."""
    if not v.numel() or not bool(torch.isfinite(v).all()):
        return Shape(crest_median=None, crest_p99=None, mean_share=None, outlier_share=None, outlier_max=None)
    blocks = to_blocks(v, block).flatten(1)
    rms = blocks.square().mean(1).sqrt()
    crest = blocks.abs().amax(1)[rms > 0] / rms[rms > 0]
    tokens = 1 - channels
    energy = v.square().sum(tokens)
    mean_energy = v.mean(tokens).square().sum() * v.shape[tokens]
    each = energy.sqrt()
    median = float(each.median().item())
    return Shape(
        crest_median=_quantile(crest, 0.5),
        crest_p99=_quantile(crest, 0.99),
        mean_share=_ratio(float(mean_energy.item()), float(energy.sum().item())),
        outlier_share=float((each > OUTLIER * median).float().mean().item()) if median else None,
        outlier_max=_ratio(float(each.max().item()), median),
    )


def _by_position(quantised: Tensor, exact: Tensor, block: tuple[int, int]) -> tuple[float | None, ...]:
    rows, columns = block
    if rows != 1 or not 1 < columns <= _LARGEST_BLOCK or not exact.numel():
        return ()
    product = (quantised * exact).reshape(-1, columns).sum(0).tolist()
    energy = exact.square().reshape(-1, columns).sum(0).tolist()
    return tuple(_ratio(p, e) for p, e in zip(product, energy, strict=True))


def _log2_quantiles(scales: Tensor) -> tuple[float, ...]:
    known = scales[(scales > 0) & torch.isfinite(scales)].log2()
    found = [_quantile(known, q) for q in (0.0, 0.1, 0.5, 0.9, 1.0)]
    return tuple(value for value in found if value is not None)


def _quantile(values: Tensor, q: float) -> float | None:
    if not values.numel():
        return None
    step = -(-values.numel() // _LARGEST_SAMPLE)
    return float(torch.quantile(values.flatten()[::step], q, interpolation="nearest").item())


def _ratio(part: float, whole: float) -> float | None:
    ratio = part / whole if whole else math.nan
    return ratio if math.isfinite(ratio) else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)
