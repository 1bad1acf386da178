"""Scale rules: compute from blocks of values the factors that divide them and multiply them back.

``blocks`` is [n, rows, columns] in fp32: each of the n blocks has one scale, and its columns lie along the
contraction axis; rows is 1 except for square tiles. Rules add in a pairwise tree in fp32 (halves, quarters,
…), so that any back end can reproduce their bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.numerics import formats
from ablate.numerics.formats import E4M3, FLOAT32_MAX, round_nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes import OperandPolicy

QUEST_CLIP = 2.92247856 / 6.0
"""Step of the E2M1 grid over the standard deviation of a Gaussian block (Quartet 2505.14669)."""
FOUR_SIX_MAX = 256.0
"""Largest block scale of four-or-six: 1.5 × 256 fits E4M3 (2512.02010)."""
EDEN_MAX = 255.99
"""Largest block scale before MS-EDEN's correction, which may raise it (2601.22813)."""
EDEN_SHRINK = (17 / 16) * 0.93
"""Share of their range at which MS-EDEN's elements may clip (code of 2601.22813, backward)."""
SEARCH_STEPS = 100
SEARCH_LARGEST = 1.2
"""LLM-FP4 searches for the clipping value among these shares of the largest magnitude (2310.16836)."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """``down`` multiplies the values before rounding, ``up`` after it; fp32, broadcastable to the blocks."""

    down: Tensor
    up: Tensor


def tree_sum(values: Tensor) -> Tensor:
    """Sum the last axis (a power of two) by halves: v[:n/2] + v[n/2:], and so on."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def amax_bits(blocks: Tensor) -> Tensor:
    """Return each block's largest bit pattern without sign, [n, 1, 1]: NaN and Inf are above all numbers."""
    bits = blocks.view(torch.int32) & 0x7FFFFFFF
    if not blocks.numel():
        return bits.new_zeros(blocks.shape[0], 1, 1)
    return bits.amax((1, 2), keepdim=True)


def tensor_amax(v: Tensor) -> float:
    """Return the largest magnitude of a tensor: NaN or Inf if the tensor has one, 0 if it is empty."""
    if not v.numel():
        return 0.0
    bits = (v.contiguous().view(torch.int32) & 0x7FFFFFFF).max()
    return float(bits.view(torch.float32).item())


def e8m0_scale(blocks: Tensor, policy: OperandPolicy) -> Scale:
    """Return the E8M0 scale of each block under an MX scale rule."""
    bits = amax_bits(blocks)
    element = formats.ELEMENTS[policy.format]
    if policy.scale == "quest":
        byte = torch.where(bits >= 0x7F800000, 255, _quest_bytes(blocks))
    else:
        byte = formats.e8m0_byte(bits, formats.SCALE_ADD[policy.scale](element), element.max_exponent)
    return Scale(down=formats.e8m0_reciprocal(byte), up=formats.e8m0_decode(byte))


def _quest_bytes(blocks: Tensor) -> Tensor:
    """Return the byte of 2^floor(log2(clip × std + 1e-8)); 1e-8 and the variance follow Quartet's code."""
    mean = tree_sum(blocks) * (1 / 32)
    variance = tree_sum(blocks * blocks) * (1 / 32) - mean * mean
    std = variance.clamp(min=0).sqrt()
    scale = std * torch.tensor(QUEST_CLIP, dtype=torch.float32).item() + 1e-8
    return (scale.view(torch.int32) >> 23).unsqueeze(-1)


def fp32(value: float) -> float:
    """Round to fp32."""
    return torch.tensor(value, dtype=torch.float32).item()


def nvfp4_tensor_scale(amax: float, rule: str) -> tuple[float, float]:
    """Return the encode and decode scale of a tensor (fp32 values as floats), NaN for an amax of NaN or Inf.

    Encode: (largest block scale × 6) / amax, 1 for an all-zero tensor; decode: its reciprocal. The order of
    operations is TransformerEngine's; four-or-six uses its own largest block scale.
    """
    if not math.isfinite(amax):
        return math.nan, math.nan
    largest = FOUR_SIX_MAX if rule == "four_six" else E4M3.max
    encode = 1.0 if amax == 0 else min(fp32(largest * 6 / amax), FLOAT32_MAX)
    return encode, fp32(1 / encode)


def nvfp4_scale(base: Tensor, decode: float) -> Scale:
    """Return the E4M3 block scale nearest to ``base``, and the factor that maps values to the E2M1 grid."""
    up = round_nearest(base.clamp(max=FLOAT32_MAX), E4M3)
    down = (1 / (up * decode)).clamp(max=FLOAT32_MAX)
    return Scale(down=down, up=up)


def nvfp4_base(blocks: Tensor, encode: float) -> Tensor:
    """Return each block's amax / 6 in units of the tensor scale, before rounding to E4M3."""
    amax = amax_bits(blocks).view(torch.float32)
    return amax * fp32(encode * fp32(1 / 6))


def four_six(blocks: Tensor, encode: float, decode: float, quantise: Callable[[Scale], Tensor]) -> Scale:
    """Return the scale that maps each block's largest value to 6, or to 4 if that errs less (2512.02010).

    ``quantise`` returns the E2M1 values of the blocks under a scale.
    """
    base = nvfp4_base(blocks, encode)
    candidates = [nvfp4_scale(base, decode), nvfp4_scale(base * 1.5, decode)]
    errors = []
    for scale in candidates:
        difference = quantise(scale) * scale.up * decode - blocks
        errors.append(tree_sum(tree_sum(difference * difference)))
    four = (errors[1] < errors[0])[:, None, None]
    six_scale, four_scale = candidates
    return Scale(
        down=torch.where(four, four_scale.down, six_scale.down),
        up=torch.where(four, four_scale.up, six_scale.up),
    )


def eden_tensor_scale(amax: float) -> tuple[float, float]:
    """Return MS-EDEN's clipping value and the tensor's decode scale; NaN for an amax of NaN or Inf."""
    clip = fp32(6 / fp32(EDEN_SHRINK))
    if not math.isfinite(amax):
        return clip, math.nan
    return clip, fp32(fp32(amax / fp32(EDEN_MAX)) / clip) if amax else 1.0


def eden(blocks: Tensor, amax: float, group: int, words: Tensor) -> tuple[Tensor, Tensor, float]:
    """Quantise by MS-EDEN (Quartet II 2601.22813): nearest elements, stochastic scales.

    Elements are rounded to nearest, and some clip. Over each Hadamard group, the ratio of the values' energy
    to their product with the rounded values is the stretch that these need. The block scales are stretched by
    it and rounded stochastically to E4M3, so that the estimate is unbiased over rotations.

    Args:
        blocks: [n, 1, 16] rotated values, neighbours in order.
        amax: largest magnitude of the whole tensor.
        group: elements of a Hadamard group.
        words: int64 [n], one random word for each block.

    Returns:
        E2M1 values, their block scales [n, 1, 1], and the tensor's decode scale.
    """
    clip, decode = eden_tensor_scale(amax)
    block_amax = amax_bits(blocks).view(torch.float32)
    scale = round_nearest(block_amax / clip / decode, E4M3)
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = blocks / (scale * decode)
    values = round_nearest(scaled, formats.E2M1)
    energy = tree_sum((scaled * scaled).view(-1, group))
    product = tree_sum((scaled * values).view(-1, group))
    stretch = torch.where(product == 0, 1.0, energy / product)
    stretch = stretch.repeat_interleave(group // 16)[:, None, None]
    chosen = formats.round_stochastic(scale * stretch, E4M3, words[:, None, None])
    return values, chosen, decode


def searched_clip(rows: Tensor, element: formats.Element) -> Tensor:
    """Return the clipping value [n, 1] with the smallest squared error for each row [n, k] (LLM-FP4, §3).

    Searching the largest value equals searching a real-valued exponent bias. Ties go to the first candidate.
    """
    amax = rows.abs().amax(-1, keepdim=True) if rows.numel() else rows.new_zeros(rows.shape[0], 1)
    best = torch.full_like(amax, math.inf, dtype=torch.float64)
    clip = amax.clone()
    for step in range(1, SEARCH_STEPS + 1):
        candidate = amax * (SEARCH_LARGEST * step / SEARCH_STEPS)
        scale = candidate / element.max
        values = round_nearest(rows / torch.where(scale == 0, 1.0, scale), element) * scale
        error = (values.double() - rows.double()).square().sum(-1, keepdim=True)
        better = error < best
        best, clip = torch.where(better, error, best), torch.where(better, candidate, clip)
    return clip
