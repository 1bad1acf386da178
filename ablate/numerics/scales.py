"""Scale rules: compute from blocks of values the factors that divide them and multiply them back.

``blocks`` is [n, rows, columns] in fp32: each of the n blocks has one scale, and its columns lie along the
contraction axis; rows is 1 except for square tiles. Rules add in a pairwise tree in fp32 (halves, quarters,
…), so that any back end can reproduce their bits. ``ablate.recipes.scale_rules`` has the table of the rules.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ablate.numerics import formats
from ablate.numerics.formats import (
    E2M1,
    E4M3,
    ELEMENTS,
    FLOAT32_MAX,
    INT4,
    UE5M3,
    rounded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.numerics.formats import Element
    from ablate.recipes import OperandPolicy

QUEST_CLIP = 2.92247856 / 6.0
"""Step of the E2M1 grid over the standard deviation of a Gaussian block (Quartet 2505.14669)."""
TWO_LEVEL = ("nvfp4", "nvint4", "if4")
"""Formats in which 16 elements share a scale."""
UE5M3_STEP = 2.0**-17
"""Smallest UE5M3 scale."""
OUTER_FLOOR = 1e-30
"""Smallest fp32 scale over UE5M3 (ALTO's code)."""
IF4_RATIO = 6 / 7
"""IF4's whole numbers up to 7 reach as far as E2M1's 6."""
EDEN_SHRINK = (17 / 16) * 0.93
"""Share of their range at which MS-EDEN's elements may clip (code of 2601.22813, backward)."""


def fp32(value: float) -> float:
    """Round to fp32."""
    return torch.tensor(value, dtype=torch.float32).item()


EDEN_CLIP = fp32(6 / fp32(EDEN_SHRINK))
SEARCH_STEPS = 100
SEARCH_LARGEST = 1.2
"""LLM-FP4 tries SEARCH_STEPS clipping values, up to this share of the largest magnitude (2310.16836)."""


class Scale(NamedTuple):
    """``down`` multiplies the values before rounding, ``up`` after it; fp32, broadcastable to the blocks."""

    down: Tensor
    up: Tensor


def tree_sum(values: Tensor) -> Tensor:
    """Sum the last axis (a power of two) by halves: v[:n/2] + v[n/2:], and so on."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def ordered_sum(values: Tensor) -> Tensor:
    """Sum the last axis in order, first value first."""
    total = values[..., 0]
    for column in range(1, values.shape[-1]):
        total = total + values[..., column]
    return total


def divided(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """Divide in fp32 with one rounding; one side may be a number.

    torch computes number / tensor, and on a GPU tensor / number, as a product with a rounded reciprocal.
    """
    if not isinstance(numerator, Tensor):
        assert isinstance(denominator, Tensor)
        numerator = denominator.new_full((1,), numerator)
    if not isinstance(denominator, Tensor):
        denominator = numerator.new_full((1,), denominator)
    return torch.div(numerator, denominator)


def amax_of(blocks: Tensor) -> Tensor:
    """Return each block's largest magnitude, fp32 [n, 1, 1]: NaN or Inf if it has one, 0 if it is empty."""
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[0], 1, 1)
    bits = blocks.view(torch.int32) & 0x7FFFFFFF
    return bits.amax((1, 2), keepdim=True).view(torch.float32)


def e8m0_scale(blocks: Tensor, policy: OperandPolicy) -> Scale:
    """Return the E8M0 scale of each block, from its largest magnitude (``formats.SCALE_ADD``)."""
    element = ELEMENTS[policy.format]
    add = formats.SCALE_ADD[policy.scale](element)
    return _power_of_two(
        formats.e8m0_byte(amax_of(blocks).view(torch.int32), add, element.max_exponent)
    )


def quest_scale(blocks: Tensor) -> Scale:
    """Return QuEST's E8M0 scale of each block: 2^floor(log2(clip × std + 1e-8)).

    1e-8 and the variance follow Quartet's code. The byte is 255 (NaN) where the squares leave fp32 (values
    beyond about 1e19).
    """
    mean = tree_sum(blocks) * (1 / 32)
    variance = tree_sum(blocks * blocks) * (1 / 32) - mean * mean
    scale = variance.clamp(min=0).sqrt() * fp32(QUEST_CLIP) + 1e-8
    exponent = scale.view(torch.int32) >> 23
    byte = torch.where(variance.isfinite(), exponent, 255).unsqueeze(-1)
    return _power_of_two(torch.where(amax_of(blocks).isfinite(), byte, 255))


def _power_of_two(byte: Tensor) -> Scale:
    reciprocal = torch.where(byte == 255, byte, 254 - byte)
    return Scale(down=formats.e8m0_decode(reciprocal), up=formats.e8m0_decode(byte))


def largest_of(policy: OperandPolicy) -> float:
    """Return what an fp32 scale maps its tensor's or group's largest magnitude to."""
    return ELEMENTS[policy.format].max * policy.scale_rule.largest_scale


def fp32_scale(amax: Tensor, policy: OperandPolicy) -> Scale:
    """Return the fp32 scales of a tensor, rows, 1×128 blocks or 128×128 tiles, in the shape of ``amax``.

    The order of operations is TransformerEngine's. For MS-EDEN both factors are the one that multiplies the
    values after rounding.
    """
    rule = policy.scale_rule
    is_eden = rule.family == "ms_eden"
    if is_eden:
        down = divided(divided(amax, fp32(rule.largest_scale)), EDEN_CLIP)
    else:  # a group of subnormals would overflow the scale; the largest finite scale keeps it on the grid
        down = divided(largest_of(policy), amax).clamp(max=FLOAT32_MAX)
    down = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), down, math.nan))
    if rule.is_power_of_two:  # the power of two below; NaN stays NaN
        powers = (down.view(torch.int32) & 0x7F800000).view(torch.float32)
        down = torch.where(down.isnan(), down, powers)
    return Scale(down=down, up=down if is_eden else divided(1.0, down))


def tensor_scale(amax: float, policy: OperandPolicy) -> tuple[float, float]:
    """Return the factors of a tensor's values before rounding and after it, as ``fp32_scale`` but as numbers.

    UE5M3 uses only the second, which is 1e-30 or more.
    """
    if policy.scale_rule.family == "ue5m3":
        if not math.isfinite(amax):
            return 1.0, math.nan
        return 1.0, max(fp32(amax / (UE5M3.max * 6)), fp32(OUTER_FLOOR))
    scale = fp32_scale(torch.tensor(amax, dtype=torch.float32), policy)
    return scale.down.item(), scale.up.item()


def nvfp4_scale(base: Tensor, decode: float | Tensor) -> Scale:
    """Return the E4M3 block scale nearest to ``base``, and the factor that maps values to the E2M1 grid."""
    up = rounded(base.clamp(max=FLOAT32_MAX), E4M3)
    down = (1 / (up * decode)).clamp(max=FLOAT32_MAX)
    return Scale(down=down, up=up)


def two_level_base(
    blocks: Tensor, policy: OperandPolicy, encode: float | Tensor
) -> Tensor:
    """Return block scales before rounding to E4M3; ``encode``: the fp32 scale of the tensor or of each block.

    TransformerEngine folds 1/6 into NVFP4's fp32 scale, but divides under four-or-six. NVINT4 and IF4 divide
    too.
    """
    amax = amax_of(blocks)
    if policy.format == "nvfp4" and policy.scale_rule.family == "two_level":
        return amax * (encode * fp32(1 / 6))
    return divided(amax, ELEMENTS[policy.format].max) * encode


def tetrajet_scale(blocks: Tensor) -> tuple[Scale, Tensor]:
    """Return the E4M3 scale of each block, and the fp32 scale [n, 1, 1] that 8 neighbouring blocks share.

    As TetraJet-v2's kernel (2510.27527, kernels/csrc/quant_fp4.cu): amax / 448 / 6, and a block scale of zero
    becomes 2^-9, E4M3's smallest. The kernel's own factor is infinite where the product of both scales is 0,
    and turns zeros into NaN; ours is 0.
    """
    spans = amax_of(blocks.view(-1, 8, 16))
    outer = divided(divided(spans, E4M3.max), 6.0)
    outer = torch.where(spans.isfinite(), torch.where(outer == 0, 1.0, outer), math.nan)
    outer = outer.expand(-1, 8, 1).reshape(-1, 1, 1)
    base = divided(divided(amax_of(blocks), outer), 6.0)
    scale = nvfp4_scale(torch.where(base == 0, 2.0**-9, base), outer)
    return scale._replace(
        down=torch.where(scale.up * outer == 0, 0.0, scale.down)
    ), outer


def four_six(
    blocks: Tensor,
    base: Tensor,
    decode: float | Tensor,
    amax: float | Tensor,
    policy: OperandPolicy,
    elements: Callable[[Tensor], Tensor],
) -> Scale:
    """Choose the scale that maps each block's largest value to 6, or to 4 if that errs less (2512.02010).

    The bits are TransformerEngine's: it adds the errors in order, and of each element it takes element ×
    block scale × amax / (6 · bound) less the original, with the amax of the tensor or row as it was, not by
    the scale that multiplies the values afterwards (FlashInfer until its #3448; near ties differ).

    Args:
        blocks: [n, rows, 16].
        base: the scale before rounding that maps to 6.
        decode: the tensor's scale, or [n, 1, 1] that of each block's row.
        amax: largest magnitude of the whole tensor, or of the row.
        policy: its scale rule says which error counts: squares or magnitudes. Its prescale is divided out
            before candidates are compared.
        elements: rounds scaled values to E2M1.
    """
    divisor = four_six_divisor(policy)

    def error_of(scale: Scale) -> Tensor:
        values = elements(blocks * scale.down * policy.prescale)
        difference = divided(values * scale.up * amax, divisor) - blocks
        if policy.scale_rule.measure == "mae":
            errors = difference.abs()
        else:
            errors = difference * difference
        return tree_sum(ordered_sum(errors))

    six = nvfp4_scale(base, decode)
    four = nvfp4_scale(base * 1.5, decode)
    is_four = (error_of(four) < error_of(six))[:, None, None]
    return Scale(
        down=torch.where(is_four, four.down, six.down),
        up=torch.where(is_four, four.up, six.up),
    )


def four_six_divisor(policy: OperandPolicy) -> float:
    """Return the divisor that turns element × block scale × tensor's amax into the dequantised value."""
    return fp32(largest_of(policy) * policy.prescale)


def ue5m3_scale(blocks: Tensor, outer: float) -> Tensor:
    """Return the UE5M3 scale of each block, [n, 1, 1]: amax / outer / 6, at least 2^-17 (ALTO's AMD-FP4)."""
    base = divided(divided(amax_of(blocks), outer), 6.0)
    in_range = base.clamp(min=UE5M3_STEP, max=UE5M3.max)
    return rounded(torch.where(base.isfinite(), in_range, math.nan), UE5M3)


def if4(
    blocks: Tensor,
    scaled: Tensor,
    up: Tensor,
    elements: Callable[[Tensor, Element], Tensor],
) -> tuple[Tensor, Tensor]:
    """Choose for each block E2M1 or whole numbers up to 7: the smaller squared error, E2M1 in a tie.

    Args:
        blocks: [n, rows, columns].
        scaled: the blocks in units of E2M1.
        up: what multiplies E2M1 values back, every scale included.
        elements: rounds scaled values to an element's grid.

    Returns:
        The values on the chosen grid, and what multiplies them beside ``up``: 1, or 6/7 for whole numbers.
    """
    ratio = fp32(IF4_RATIO)
    floats = elements(scaled, E2M1)
    integers = elements(scaled * fp32(1 / IF4_RATIO), INT4)
    error_of_floats = tree_sum(tree_sum((floats * up - blocks) ** 2))
    error_of_integers = tree_sum(tree_sum((integers * up * ratio - blocks) ** 2))
    is_integer = (error_of_integers < error_of_floats)[:, None, None]
    return torch.where(is_integer, integers, floats), torch.where(
        is_integer, ratio, 1.0
    )


def eden(
    blocks: Tensor, decode: float, policy: OperandPolicy, words: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantise by MS-EDEN (Quartet II 2601.22813): nearest elements, stochastic scales.

    Elements are rounded to nearest, and some clip. Each Hadamard group therefore needs a stretch: the values'
    energy over their product with the rounded values. The block scales are multiplied by it and rounded
    stochastically to E4M3. ``ms_eden`` takes energy and product of the scaled values, as the public code
    does, so that a group's blocks weigh alike whatever their scale: the gain is a little under 1
    (docs/numerics.md). ``ms_eden_unscaled`` takes them in the tensor's units: the gain is 1.

    Args:
        blocks: [n, 1, 16] rotated values, neighbours in order.
        decode: the tensor's decode scale.
        policy: reads scale, rounding and hadamard.
        words: int64 [n], one random word for each block.

    Returns:
        E2M1 values and their block scales [n, 1, 1].
    """
    scale = rounded(divided(divided(amax_of(blocks), EDEN_CLIP), decode), E4M3)
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = blocks / (scale * decode)
    values = rounded(scaled, E2M1, policy.rounding)
    x = scaled
    y = values
    if policy.scale_rule.measure == "unscaled":
        x = scaled * scale
        y = values * scale
    energy = tree_sum((x * x).view(-1, policy.hadamard))
    product = tree_sum((x * y).view(-1, policy.hadamard))
    stretch = torch.where(product == 0, 1.0, energy / product)
    stretch = stretch.repeat_interleave(policy.hadamard // 16)[:, None, None]
    return values, rounded(scale * stretch, E4M3, "stochastic", words[:, None, None])


def searched_scale(rows: Tensor, policy: OperandPolicy) -> Tensor:
    """Search for each row [n, k] the scale [n, 1] of smallest squared error (LLM-FP4, §3).

    It divides the row before rounding and multiplies it after it. Searching the largest value equals
    searching a real-valued exponent bias. Squared errors are added in fp64 in a pairwise tree, as of a row
    padded with zeros to a power of two. Ties go to the first candidate; a row with a NaN or an Inf gets NaN,
    a row of zeros 1. An empty matrix has no scales.
    """
    if not rows.numel():
        return rows.new_ones(0, 1)
    element = ELEMENTS[policy.format]
    amax = rows.abs().amax(-1, keepdim=True)
    least_error = torch.full_like(amax, math.inf, dtype=torch.float64)
    best = torch.where(amax.isfinite(), 1.0, math.nan)
    zeros = (1 << (rows.shape[1] - 1).bit_length()) - rows.shape[1]
    for step in range(1, SEARCH_STEPS + 1):
        scale = divided(amax * fp32(SEARCH_LARGEST * step / SEARCH_STEPS), element.max)
        scale = torch.where(scale == 0, 1.0, scale)
        values = rounded(rows / scale, element) * scale
        squares = (values.double() - rows.double()).square()
        error = tree_sum(torch.nn.functional.pad(squares, (0, zeros)))[:, None]
        is_better = error < least_error
        least_error = torch.where(is_better, error, least_error)
        best = torch.where(is_better, scale, best)
    return best
