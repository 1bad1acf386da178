"""Device functions of the quantiser: the scale rules, with the bits of ``ablate.numerics.scales``.

Blocks are fp32 [N, K, block]; what is of a block is [N, K], and in a square tile the same in all its rows.
"""

import triton
import triton.language as tl

from ablate.backends.triton import policies
from ablate.backends.triton.rounding import (
    add_in_order,
    decode,
    first_of,
    nearest,
    neighbour,
    of_rows,
    rounded,
    tiles,
    tree_sum,
    with_sign_of,
)
from ablate.numerics.scales import EDEN_CLIP, QUEST_CLIP, fp32

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(0.1666666716337204)  # 1 / 6 in fp32
CLIP = tl.constexpr(fp32(QUEST_CLIP))
EDEN_SCALE = tl.constexpr(EDEN_CLIP)
STOCHASTIC = tl.constexpr(policies.STOCHASTIC)
EDEN_UNSCALED = tl.constexpr(policies.EDEN_UNSCALED)
SQUARES = tl.constexpr(policies.SQUARES)
LARGEST = tl.constexpr(policies.LARGEST)


@triton.jit
def largest(v, ROWS: tl.constexpr):
    """Return the largest of each block's magnitudes v, of integers or numbers."""
    found = tl.max(v, axis=2)
    if ROWS > 1:
        found = of_rows(tl.max(tiles(found, ROWS), axis=2), ROWS)
    return found


@triton.jit
def e8m0_byte(amax_bits, SIDE: tl.constexpr):
    """Return the E8M0 byte (int32) for the bits of a block's largest magnitude; 255 for NaN and Inf."""
    byte = tl.maximum(((amax_bits + SIDE.scale_add) >> 23) - SIDE.element.max_exponent, 0)
    return tl.where(amax_bits >= 0x7F800000, 255, byte)


@triton.jit
def power_of_two(byte):
    """Return 2^(byte − 127) in fp32, NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_power_of_two(byte):
    """Return 2^(127 − byte) in fp32, NaN for 255."""
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quest_byte(blocks, amax_bits):
    """Return the E8M0 byte of 2^floor(log2(clip × std + 1e-8)); 255 where a square or a value leaves fp32."""
    mean = tree_sum(blocks) * 0.03125
    variance = tree_sum(blocks * blocks) * 0.03125 - mean * mean
    scale = tl.sqrt_rn(tl.maximum(variance, 0.0)) * CLIP + 1e-8
    finite = (variance.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite & (amax_bits < 0x7F800000), scale.to(tl.int32, bitcast=True) >> 23, 255)


@triton.jit
def nvfp4_scale(base, decode_scale, SIDE: tl.constexpr):
    """Return the E4M3 byte nearest to ``base``, what divides by it and the tensor's scale, and its value."""
    SCALE: tl.constexpr = SIDE.of_scales
    byte = nearest(tl.minimum(base, FLOAT32_MAX), SCALE)
    up = decode(byte, SCALE)
    return byte, tl.minimum(tl.div_rn(1.0, up * decode_scale), FLOAT32_MAX), up


@triton.jit
def two_level(blocks, amax, words, tensor, SIDE: tl.constexpr):
    """Return NVFP4's block scales as ``nvfp4_scale``: of amax / 6, or the better of that and of amax / 4.

    ``tensor`` holds the tensor's scale, its reciprocal and its largest magnitude.
    """
    encode = tl.load(tensor)
    decode_scale = tl.load(tensor + 1)
    if SIDE.four_six is None:
        return nvfp4_scale(amax * (encode * ONE_SIXTH), decode_scale, SIDE)
    else:  # noqa: RET505 - the compiler takes only one of two branches that return
        base = tl.div_rn(amax, 6.0) * encode
        byte6, down6, up6 = nvfp4_scale(base, decode_scale, SIDE)
        byte4, down4, up4 = nvfp4_scale(base * 1.5, decode_scale, SIDE)
        error6 = _error(blocks, words, down6, up6, tl.load(tensor + 2), SIDE)
        four = _error(blocks, words, down4, up4, tl.load(tensor + 2), SIDE) < error6
        return tl.where(four, byte4, byte6), tl.where(four, down4, down6), tl.where(four, up4, up6)


@triton.jit
def _error(blocks, words, down, up, amax, SIDE: tl.constexpr):
    """Return what each block errs by under a scale, in the reference's order of operations."""
    ELEMENT: tl.constexpr = SIDE.element
    scaled = blocks * down[:, :, None]
    if SIDE.prescale != 1.0:
        scaled = scaled * SIDE.prescale
    value = decode(rounded(scaled, words, ELEMENT, SIDE.rounding), ELEMENT)
    off = tl.div_rn(with_sign_of(value, scaled) * up[:, :, None] * amax, SIDE.error_divisor) - blocks
    if SIDE.four_six == LARGEST:
        return largest(tl.abs(off), SIDE.rows)
    else:  # noqa: RET505 - as above
        off = off * off if SIDE.four_six == SQUARES else tl.abs(off)
        error = add_in_order(tl.zeros_like(up), off)
        if SIDE.rows > 1:
            error = of_rows(tree_sum(tiles(error, SIDE.rows)), SIDE.rows)
        return error


@triton.jit
def eden_scale(amax, tensor, SIDE: tl.constexpr):
    """Return MS-EDEN's block scales before their correction; NaN where the tensor's scale is NaN or zero."""
    SCALE: tl.constexpr = SIDE.of_scales
    base = tl.div_rn(tl.div_rn(amax, EDEN_SCALE), tl.load(tensor + 1))
    up = decode(nearest(base, SCALE), SCALE)
    return tl.where(base != base, float("nan"), tl.where(up == 0.0, 1.0, up))


@triton.jit
def eden_corrected(scaled, code, up, words, SIDE: tl.constexpr):
    """Return byte and value of MS-EDEN's block scales, stretched group by group, and where they are NaN."""
    SCALE: tl.constexpr = SIDE.of_scales
    ELEMENT: tl.constexpr = SIDE.element
    N: tl.constexpr = scaled.shape[0]
    GROUPS: tl.constexpr = scaled.shape[1] * scaled.shape[2] // SIDE.hadamard
    value = with_sign_of(decode(code, ELEMENT), scaled)
    if SIDE.rule == EDEN_UNSCALED:
        scaled = scaled * up[:, :, None]
        value = value * up[:, :, None]
    energy = tree_sum(tl.reshape(scaled * scaled, [N, GROUPS, SIDE.hadamard]))
    product = tree_sum(tl.reshape(scaled * value, [N, GROUPS, SIDE.hadamard]))
    stretch = tl.where(product == 0.0, 1.0, tl.div_rn(energy, product))
    of_blocks = tl.broadcast_to(stretch[:, :, None], [N, GROUPS, SIDE.hadamard // SIDE.block])
    stretched = up * tl.reshape(of_blocks, [N, scaled.shape[1]])
    byte = neighbour(stretched, first_of(words, SIDE.block), SCALE, STOCHASTIC)
    bad = stretched != stretched
    return tl.where(bad, 0x7F, byte), tl.where(bad, float("nan"), decode(byte, SCALE)), bad
