"""Device functions of the quantiser: random words, rotation, sums and elements, with the reference's bits.

Each repeats a function of ``ablate.numerics`` operation by operation, in fp32 and on its bits. Fused
multiply-add is not allowed (the kernels are compiled with ``enable_fp_fusion=False``), and divisions are
correctly rounded.
"""

import triton
import triton.language as tl

from ablate.backends.triton import policies

NEAREST = tl.constexpr(policies.NEAREST)
STOCHASTIC = tl.constexpr(policies.STOCHASTIC)
AWAY = tl.constexpr(policies.AWAY)
ROCM = tl.constexpr(policies.ROCM)


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
def first_of(words, SIZE: tl.constexpr):
    """Return the first of each SIZE neighbouring words [N, K]: [N, K / SIZE]."""
    groups = tl.reshape(words, [words.shape[0], words.shape[1] // SIZE, SIZE])
    return tl.sum(tl.where(tl.arange(0, SIZE)[None, None, :] == 0, groups, 0), axis=2)


@triton.jit
def shared_by_four(words):
    """Return for all four neighbours the first one's word, shifted right by 16 for the last two."""
    first = first_of(words, 4)[:, :, None]
    fours = tl.where(tl.arange(0, 4)[None, None, :] < 2, first, first >> 16)
    return tl.reshape(fours, [words.shape[0], words.shape[1]])


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


@triton.constexpr_function
def log2(power):
    """Return the exponent of a power of two."""
    return power.bit_length() - 1


@triton.jit
def rotate(v, order, signs, SIDE: tl.constexpr):
    """Rotate the last axis of v [N, K] fp32 by groups: permutation, signs (±1 fp32), butterfly, 1 / √group.

    ``order`` (int32) and ``signs`` are [group], or None.
    """
    ROWS: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    GROUP: tl.constexpr = SIDE.hadamard
    groups = tl.reshape(v, [ROWS * K // GROUP, GROUP])
    if order is not None:
        at = tl.load(order + tl.arange(0, GROUP))[None, :]
        groups = tl.gather(groups, tl.broadcast_to(at, [ROWS * K // GROUP, GROUP]), 1)
    if signs is not None:
        groups = groups * tl.load(signs + tl.arange(0, GROUP))[None, :]
    for i in tl.static_range(log2(GROUP)):
        pairs = tl.reshape(groups, [ROWS * K // (2 << i), 2, 1 << i])
        upper, lower = tl.split(tl.trans(pairs, 0, 2, 1))
        groups = tl.trans(tl.join(upper + lower, upper - lower), 0, 2, 1)
    v = tl.reshape(groups, [ROWS, K]) * SIDE.norm
    if SIDE.rotated_bf16:
        v = round_to_bf16(v)
    return v


@triton.jit
def tiles(v, ROWS: tl.constexpr):
    """Put ROWS neighbouring rows of v [N, K] side by side: [N / ROWS, K, ROWS]."""
    return tl.trans(tl.reshape(v, [v.shape[0] // ROWS, ROWS, v.shape[1]]), 0, 2, 1)


@triton.jit
def of_rows(v, ROWS: tl.constexpr):
    """Repeat each row of v [N, K] ROWS times: [N · ROWS, K]."""
    N: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    return tl.reshape(tl.broadcast_to(v[:, None, :], [N, ROWS, K]), [N * ROWS, K])


@triton.jit
def halves(v):
    """Return both halves of the last axis of v [N, K, n]."""
    pairs = tl.reshape(v, [v.shape[0], v.shape[1], 2, v.shape[2] // 2])
    return tl.split(tl.trans(pairs, 0, 1, 3, 2))


@triton.jit
def tree_sum(v):
    """Sum the last axis of v [N, K, n] by halves: [N, K]."""
    for _ in tl.static_range(log2(v.shape[2])):
        first, second = halves(v)
        v = first + second
    return tl.reshape(v, [v.shape[0], v.shape[1]])


@triton.jit
def add_in_order(total, v):
    """Add the last axis of v [N, K, n] to total [N, K], from its first value on."""
    if v.shape[2] == 1:
        total += tl.reshape(v, [v.shape[0], v.shape[1]])
    else:
        first, second = halves(v)
        total = add_in_order(add_in_order(total, first), second)
    return total


@triton.jit
def nearest(v, ELEMENT: tl.constexpr):
    """Return the magnitude codes (int32) of v: to nearest, ties to even code, saturating."""
    MANTISSA: tl.constexpr = ELEMENT.mantissa_bits
    E_MIN: tl.constexpr = ELEMENT.min_exponent
    magnitude = tl.minimum(tl.abs(v), ELEMENT.max)
    bits = magnitude.to(tl.int32, bitcast=True)
    DROP: tl.constexpr = 23 - MANTISSA
    even = bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)
    normal = (even >> DROP) - ((126 + E_MIN) << MANTISSA)
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (23 + E_MIN - MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    return tl.where(magnitude < 2.0**E_MIN, subnormal, normal)


@triton.jit
def rounded(v, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the magnitude codes (int32) of v, rounded as the policy says."""
    if ROUNDING == NEAREST:
        return nearest(v, ELEMENT)
    else:  # noqa: RET505 - the compiler takes only one of two branches that return
        return neighbour(v, words, ELEMENT, ROUNDING)


@triton.jit
def neighbour(v, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the magnitude codes (int32) of the lower or upper neighbour of v, p steps above the lower.

    Stochastic: up when p > u, u the top 24 bits of ``words`` over 2^24; ROCm's: when p plus the top 22 bits
    over 2^22 reaches 1. Else to the nearer one, and from the middle away from zero or toward it.
    """
    MANTISSA: tl.constexpr = ELEMENT.mantissa_bits
    E_MIN: tl.constexpr = ELEMENT.min_exponent
    magnitude = tl.minimum(tl.abs(v), ELEMENT.max)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127 + E_MIN)
    per_step = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    in_steps = magnitude * per_step
    low = in_steps.to(tl.int32)
    p = in_steps - low.to(tl.float32)
    if ROUNDING == STOCHASTIC:
        up = p > (words >> 8).to(tl.float32) * 5.9604644775390625e-08
    elif ROUNDING == ROCM:
        up = (p * 4194304.0).to(tl.int32) + (words >> 10).to(tl.int32) >= 1 << 22
    elif ROUNDING == AWAY:
        up = p >= 0.5
    else:
        up = p > 0.5
    return ((exponent - (127 + E_MIN)) << MANTISSA) + low + up.to(tl.int32)


@triton.jit
def decode(code, ELEMENT: tl.constexpr):
    """Return the fp32 magnitudes of codes (int32) without sign."""
    MANTISSA: tl.constexpr = ELEMENT.mantissa_bits
    E_MIN: tl.constexpr = ELEMENT.min_exponent
    normal = ((code + ((126 + E_MIN) << MANTISSA)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    return tl.where(code < (1 << MANTISSA), code.to(tl.float32) * 2.0 ** (E_MIN - MANTISSA), normal)


@triton.jit
def with_sign_of(magnitude, v):
    """Return magnitudes with the signs of v, also of its zeros."""
    return tl.where(v.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)
