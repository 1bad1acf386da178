"""Scale rules: compute from blocks of values the factors that divide them and multiply them back.

``blocks`` is [n, rows, columns] in fp32: each of the n blocks has one scale, and its columns lie along the
contraction axis; rows is 1 except for square tiles. Rules add in a pairwise tree in fp32 (halves, quarters,
…), so that any back end can reproduce their bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ablate.numerics import formats
from ablate.numerics.formats import E2M1, E4M3, FLOAT32_MAX, INT4, UE5M3, rounded
from ablate.recipes.policy import MS_EDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes import OperandPolicy

QUEST_CLIP = 2.92247856 / 6.0
"""Step of the E2M1 grid over the standard deviation of a Gaussian block (Quartet 2505.14669)."""
FOUR_SIX_MAX = 256.0
"""Largest block scale of four-or-six: 1.5 × 256 fits E4M3 (2512.02010)."""
TWO_LEVEL = ("nvfp4", "nvint4", "if4")
"""Formats in which 16 elements share a scale."""
FOUR_SIX_ERRORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda difference: tree_sum(ordered_sum(difference * difference)),
    "mae": lambda difference: tree_sum(ordered_sum(difference.abs())),
    "max": lambda difference: difference.abs().amax((1, 2)),
}
"""By what four-or-six compares the errors of a block: sum of squares, of magnitudes, largest magnitude."""
UE5M3_STEP = 2.0**-17
"""Smallest UE5M3 scale."""
OUTER_FLOOR = 1e-30
"""Smallest fp32 scale over UE5M3 (ALTO's code)."""
IF4_RATIO = 6 / 7
"""IF4's whole numbers up to 7 reach as far as E2M1's 6."""
EDEN_MAX = 255.99
"""Largest block scale before MS-EDEN's correction, which may raise it (2601.22813)."""
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
    like = numerator if isinstance(numerator, Tensor) else denominator
    assert isinstance(like, Tensor)
    sides = (one if isinstance(one, Tensor) else like.new_full((1,), one) for one in (numerator, denominator))
    return torch.div(*sides)


def amax_of(blocks: Tensor) -> Tensor:
    """Return each block's largest magnitude, fp32 [n, 1, 1]: NaN or Inf if it has one, 0 if it is empty."""
    bits = blocks.view(torch.int32) & 0x7FFFFFFF
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[0], 1, 1)
    return bits.amax((1, 2), keepdim=True).view(torch.float32)


def e8m0_scale(blocks: Tensor, policy: OperandPolicy) -> Scale:
    """Return the E8M0 scale of each block under an MX scale rule.

    QuEST's is 2^floor(log2(clip × std + 1e-8)); 1e-8 and the variance follow Quartet's code. Its byte is 255
    (NaN) where the squares leave fp32 (values beyond about 1e19).
    """
    bits, element = amax_of(blocks).view(torch.int32), formats.ELEMENTS[policy.format]
    if policy.scale == "quest":
        mean = tree_sum(blocks) * (1 / 32)
        variance = tree_sum(blocks * blocks) * (1 / 32) - mean * mean
        scale = variance.clamp(min=0).sqrt() * fp32(QUEST_CLIP) + 1e-8
        byte = torch.where(variance.isfinite(), scale.view(torch.int32) >> 23, 255).unsqueeze(-1)
        byte = torch.where(bits >= 0x7F800000, 255, byte)
    else:
        byte = formats.e8m0_byte(bits, formats.SCALE_ADD[policy.scale](element), element.max_exponent)
    down = formats.e8m0_decode(torch.where(byte == 255, byte, 254 - byte))  # its reciprocal
    return Scale(down=down, up=formats.e8m0_decode(byte))


def largest_of(policy: OperandPolicy) -> float:
    """Return what an fp32 scale maps its tensor's or group's largest magnitude to.

    It is the largest element, times the largest block scale: 448, or 256 for four-or-six unless the rule's
    name ends with 448.
    """
    largest = formats.ELEMENTS[policy.format].max
    if policy.format not in TWO_LEVEL:
        return largest
    halved = policy.scale.startswith("four_six") and not policy.scale.endswith("448")
    return largest * (FOUR_SIX_MAX if halved else E4M3.max)


def fp32_scale(amax: Tensor, policy: OperandPolicy) -> Scale:
    """Return the fp32 scales of a tensor, rows, 1×128 blocks or 128×128 tiles, in the shape of ``amax``.

    The order of operations is TransformerEngine's. For MS-EDEN both factors are the one that multiplies the
    values after rounding.
    """
    if policy.scale in MS_EDEN:
        down = divided(divided(amax, fp32(EDEN_MAX)), EDEN_CLIP)
    else:  # a group of subnormals would overflow the scale; the largest finite scale keeps it on the grid
        down = divided(largest_of(policy), amax).clamp(max=FLOAT32_MAX)
    down = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), down, math.nan))
    if policy.scale.endswith("_pow2"):  # the power of two below; NaN stays NaN
        powers = (down.view(torch.int32) & 0x7F800000).view(torch.float32)
        down = torch.where(down.isnan(), down, powers)
    return Scale(down=down, up=down if policy.scale in MS_EDEN else divided(1.0, down))


def tensor_scale(amax: float, policy: OperandPolicy) -> tuple[float, float]:
    """Return the factors of a tensor's values before rounding and after it, as ``fp32_scale`` but as numbers.

    MS-EDEN and UE5M3 use only the second; the first of MS-EDEN is its clipping value. UE5M3's is 1e-30
    or more.
    """
    if policy.scale == "two_level_ue5m3":
        return 1.0, max(fp32(amax / (UE5M3.max * 6)), fp32(OUTER_FLOOR)) if math.isfinite(amax) else math.nan
    encode, decode = (side.item() for side in fp32_scale(torch.tensor(amax, dtype=torch.float32), policy))
    return EDEN_CLIP if policy.scale in MS_EDEN else encode, decode


def nvfp4_scale(base: Tensor, decode: float | Tensor) -> Scale:
    """Return the E4M3 block scale nearest to ``base``, and the factor that maps values to the E2M1 grid."""
    up = rounded(base.clamp(max=FLOAT32_MAX), E4M3)
    down = (1 / (up * decode)).clamp(max=FLOAT32_MAX)
    return Scale(down=down, up=up)


def two_level_base(
    blocks: Tensor, policy: OperandPolicy, encode: float | Tensor, decode: float | Tensor
) -> tuple[Tensor, float | Tensor]:
    """Return block scales before rounding to E4M3, and the fp32 scale over them: ``decode`` or of each block.

    Args:
        blocks: [n, rows, 16].
        policy: its scale rule says the order of operations. NVFP4's are TransformerEngine's, which folds 1/6
            into the fp32 scale, but not under four-or-six; NVINT4 and IF4 divide too. ``two_level_1x128`` is
            TetraJet-v2's (2510.27527, kernels/csrc/quant_fp4.cu): amax / 448 / 6, and a block scale of zero
            becomes 2^-9, E4M3's smallest.
        encode, decode: the scales of the tensor, or [n, 1, 1] those of each block's row.
    """
    amax, rule = amax_of(blocks), policy.scale
    if rule == "two_level_1x128":
        spans = amax_of(blocks.view(-1, 8, 16))
        outer = divided(divided(spans, E4M3.max), 6.0)
        outer = torch.where(spans.isfinite(), torch.where(outer == 0, 1.0, outer), math.nan)
        outer = outer.expand(-1, 8, 1).reshape(-1, 1, 1)
        base = divided(divided(amax, outer), 6.0)
        return torch.where(base == 0, 2.0**-9, base), outer
    if policy.format == "nvfp4" and rule.startswith("two_level"):
        return amax * (encode * fp32(1 / 6)), decode
    return divided(amax, formats.ELEMENTS[policy.format].max) * encode, decode


def four_six(
    blocks: Tensor,
    base: Tensor,
    six: Scale,
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
        six: that scale.
        decode: the tensor's scale, or [n, 1, 1] that of each block's row.
        amax: largest magnitude of the whole tensor, or of the row.
        policy: its scale rule says which error counts. Its prescale is divided out before candidates are
            compared.
        elements: rounds scaled values to E2M1.
    """
    four, errors = nvfp4_scale(base * 1.5, decode), []
    for scale in (six, four):
        values = elements(blocks * scale.down * policy.prescale)
        difference = divided(values * scale.up * amax, four_six_divisor(policy)) - blocks
        errors.append(FOUR_SIX_ERRORS[four_six_measure(policy)](difference))
    is_four = (errors[1] < errors[0])[:, None, None]
    return Scale(*(torch.where(is_four, of_4, of_6) for of_6, of_4 in zip(six, four, strict=True)))


def four_six_divisor(policy: OperandPolicy) -> float:
    """Return the divisor that turns element × block scale × tensor's amax into the dequantised value."""
    return fp32(largest_of(policy) * policy.prescale)


def four_six_measure(policy: OperandPolicy) -> str:
    """Return by what a rule of four-or-six compares errors: mse, mae or max."""
    return next((one for one in FOUR_SIX_ERRORS if one in policy.scale), "mse")


def ue5m3_scale(blocks: Tensor, outer: float) -> Tensor:
    """Return the UE5M3 scale of each block, [n, 1, 1]: amax / outer / 6, at least 2^-17 (ALTO's AMD-FP4)."""
    base = divided(divided(amax_of(blocks), outer), 6.0)
    held = base.clamp(min=UE5M3_STEP, max=UE5M3.max)
    return rounded(torch.where(base.isfinite(), held, math.nan), UE5M3)


def if4(
    blocks: Tensor, scaled: Tensor, up: Tensor, elements: Callable[[Tensor, formats.Element], Tensor]
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
    candidates = (elements(scaled, E2M1), elements(scaled * fp32(1 / IF4_RATIO), INT4))
    six, seven = (
        tree_sum(tree_sum((values * up * ratio - blocks) ** 2))
        for values, ratio in zip(candidates, (1.0, fp32(IF4_RATIO)), strict=True)
    )
    whole = (seven < six)[:, None, None]
    return torch.where(whole, candidates[1], candidates[0]), torch.where(whole, fp32(IF4_RATIO), 1.0)


def eden(blocks: Tensor, decode: float, policy: OperandPolicy, words: Tensor) -> tuple[Tensor, Tensor]:
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
    block_amax = amax_of(blocks)
    scale = rounded(divided(divided(block_amax, EDEN_CLIP), decode), E4M3)
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = blocks / (scale * decode)
    values = rounded(scaled, E2M1, policy.rounding)
    x, y = (scaled * scale, values * scale) if policy.scale == "ms_eden_unscaled" else (scaled, values)
    energy = tree_sum((x * x).view(-1, policy.hadamard))
    product = tree_sum((x * y).view(-1, policy.hadamard))
    stretch = torch.where(product == 0, 1.0, energy / product)
    stretch = stretch.repeat_interleave(policy.hadamard // 16)[:, None, None]
    chosen = rounded(scale * stretch, E4M3, "stochastic", words[:, None, None])
    return values, chosen


def searched_scale(rows: Tensor, policy: OperandPolicy) -> Tensor:
    """Search for each row [n, k] the scale [n, 1] of smallest squared error (LLM-FP4, §3).

    It divides the row before rounding and multiplies it after it. Searching the largest value equals
    searching a real-valued exponent bias. Squared errors are added in fp64 in a pairwise tree, as of a row
    padded with zeros to a power of two. Ties go to the first candidate; a row with a NaN or an Inf gets NaN,
    a row of zeros 1. An empty matrix has no scales.
    """
    if not rows.numel():
        return rows.new_ones(0, 1)
    element, amax = formats.ELEMENTS[policy.format], rows.abs().amax(-1, keepdim=True)
    best = torch.full_like(amax, math.inf, dtype=torch.float64)
    found = torch.where(amax.isfinite(), 1.0, math.nan)
    zeros = (1 << (rows.shape[1] - 1).bit_length()) - rows.shape[1]
    for step in range(1, SEARCH_STEPS + 1):
        scale = divided(amax * fp32(SEARCH_LARGEST * step / SEARCH_STEPS), element.max)
        scale = torch.where(scale == 0, 1.0, scale)
        values = rounded(rows / scale, element) * scale
        squares = (values.double() - rows.double()).square()
        error = tree_sum(torch.nn.functional.pad(squares, (0, zeros)))[:, None]
        better = error < best
        best, found = torch.where(better, error, best), torch.where(better, scale, found)
    return found
