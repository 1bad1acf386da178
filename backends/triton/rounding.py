"""Device functions of the quantiser: random words, rotation, scales and elements, with the reference's bits.

Each repeats a function of ``ablate.numerics`` operation by operation, in fp32 and on its bits. Fused
multiply-add is not allowed (the kernels are compiled with ``enable_fp_fusion=False``), and divisions are
correctly rounded.
"""

import triton
import triton.language as tl

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(0.1666666716337204)  # 1 / 6 in fp32


@triton.jit
def random_words(row, column, key0, key1, step, call, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the uint32 words [ROWS, COLUMNS] of a tile that starts at a multiple of 64 columns.

    The layout is that of ``ablate.numerics.philox``: 64 columns take 16 calls.
    """
    zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
    c0 = (column // 4 + tl.arange(0, COLUMNS // 4)[None, :]).to(tl.uint32) + zero
    c1 = (row + tl.arange(0, ROWS)[:, None]).to(tl.uint32) + zero
    c2 = step.to(tl.uint32, bitcast=True) + zero
    c3 = call.to(tl.uint32, bitcast=True) + zero
    k0 = key0.to(tl.uint32, bitcast=True) + zero
    k1 = key1.to(tl.uint32, bitcast=True) + zero
    for _ in tl.static_range(7):
        high0, low0 = tl.umulhi(c0, 0xD2511F53 + zero), c0 * (0xD2511F53 + zero)
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57 + zero), c2 * (0xCD9E8D57 + zero)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9 + zero
        k1 += 0xBB67AE85 + zero
    first = tl.reshape(tl.join(c0, c1), [ROWS, COLUMNS // 64, 32])
    second = tl.reshape(tl.join(c2, c3), [ROWS, COLUMNS // 64, 32])
    return tl.reshape(tl.trans(tl.join(first, second), 0, 1, 3, 2), [ROWS, COLUMNS])


@triton.jit
def to_fp32(v):
    """Widen a loaded tile; bf16 by its bits, since Triton's interpreter flushes bf16 subnormals to zero."""
    if v.dtype == tl.bfloat16:
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def exact_bf16(v):
    """Convert fp32 values that are exact in bf16 to bf16 by their bits."""
    return (v.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_bf16(v):
    """Round fp32 to the nearest bf16, ties to even, and keep it as fp32; NaN and Inf stay.

    By its bits, because Triton's interpreter truncates where the hardware rounds.
    """
    bits = v.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    finite = (bits & 0x7F800000) != 0x7F800000
    kept = tl.where((bits & 0x007FFFFF) != 0, 0x7FC00000, bits)
    return tl.where(finite, rounded, kept).to(tl.float32, bitcast=True)


@triton.jit
def rotate(v, signs, GROUP: tl.constexpr, NORM: tl.constexpr, ROTATED_BF16: tl.constexpr):
    """Rotate the last axis of v [N, K] fp32 by groups: signs [GROUP] (±1 fp32), butterfly, 1 / √group."""
    ROWS: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    LOG: tl.constexpr = (
        (GROUP >= 2)
        + (GROUP >= 4)
        + (GROUP >= 8)
        + (GROUP >= 16)
        + (GROUP >= 32)
        + ((GROUP >= 64) + (GROUP >= 128))
    )
    groups = tl.reshape(v, [ROWS * K // GROUP, GROUP])
    if signs is not None:
        groups = groups * tl.load(signs + tl.arange(0, GROUP))[None, :]
    for i in tl.static_range(LOG):
        pairs = tl.reshape(groups, [ROWS * K // (2 << i), 2, 1 << i])
        upper, lower = tl.split(tl.trans(pairs, 0, 2, 1))
        groups = tl.trans(tl.join(upper + lower, upper - lower), 0, 2, 1)
    v = tl.reshape(groups, [ROWS, K]) * NORM
    if ROTATED_BF16:
        v = round_to_bf16(v)
    return v


@triton.jit
def nearest(v, MANTISSA: tl.constexpr, E_MIN: tl.constexpr, MAX: tl.constexpr):
    """Return the magnitude codes (int32) of v: to nearest, ties to even code, saturating."""
    magnitude = tl.minimum(tl.abs(v), MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    DROP: tl.constexpr = 23 - MANTISSA
    even = bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)
    normal = (even >> DROP) - ((126 + E_MIN) << MANTISSA)
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (23 + E_MIN - MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    return tl.where(magnitude < 2.0**E_MIN, subnormal, normal)


@triton.jit
def stochastic(v, words, MANTISSA: tl.constexpr, E_MIN: tl.constexpr, MAX: tl.constexpr):
    """Return the magnitude codes (int32) of v: up when p > u, u the top 24 bits of ``words`` over 2^24."""
    magnitude = tl.minimum(tl.abs(v), MAX)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127 + E_MIN)
    per_step = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    in_steps = magnitude * per_step
    low = tl.floor(in_steps)
    u = (words >> 8).to(tl.float32) * 5.9604644775390625e-08
    up = tl.where(in_steps - low > u, 1, 0)
    return ((exponent - (127 + E_MIN)) << MANTISSA) + low.to(tl.int32) + up


@triton.jit
def decode(code, MANTISSA: tl.constexpr, E_MIN: tl.constexpr):
    """Return the fp32 magnitudes of codes (int32) without sign."""
    normal = ((code + ((126 + E_MIN) << MANTISSA)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    return tl.where(code < (1 << MANTISSA), code.to(tl.float32) * 2.0 ** (E_MIN - MANTISSA), normal)


@triton.jit
def e8m0_byte(amax_bits, SCALE_ADD: tl.constexpr, E_MAX: tl.constexpr):
    """Return the E8M0 byte (int32) for the bits of a block's largest magnitude; 255 for NaN and Inf."""
    byte = tl.maximum(((amax_bits + SCALE_ADD) >> 23) - E_MAX, 0)
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
