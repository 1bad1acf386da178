"""Device functions of the quantiser: random words, rotation, sums, elements and scales, bit for bit.

Each repeats a function of ``ablate.numerics`` operation by operation, in fp32 and on its bits. Fused
multiply-add is not allowed (the kernels are compiled with ``enable_fp_fusion=False``), and divisions are
correctly rounded. Blocks are fp32 [N, K, block]; a value per block is [N, K], the same in all rows of
a square tile.
"""

import triton
import triton.language as tl

from ablate.numerics.formats import FLOAT32_MAX
from ablate.numerics.scales import EDEN_CLIP, QUEST_CLIP, fp32
from ablate.recipes.scale_rules import SCALE_RULES

LARGEST_FP32 = tl.constexpr(FLOAT32_MAX)
ONE_SIXTH = tl.constexpr(fp32(1 / 6))
SIGN = tl.constexpr(-(1 << 31))
CLIP_OF_QUEST = tl.constexpr(fp32(QUEST_CLIP))
CLIP_OF_EDEN = tl.constexpr(EDEN_CLIP)
MAX_OF_EDEN = tl.constexpr(fp32(SCALE_RULES["ms_eden"].largest_scale))


@triton.jit
def philox(c0, c1, key0, key1, step, call):
    """Return the four words of each counter (c0, c1, step, call); c0 and c1 are uint32 of one shape."""
    c2 = step.to(tl.uint32, bitcast=True) + tl.zeros_like(c0)
    c3 = call.to(tl.uint32, bitcast=True) + tl.zeros_like(c0)
    k0 = key0.to(tl.uint32, bitcast=True)
    k1 = key1.to(tl.uint32, bitcast=True)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1, 7)


@triton.jit
def random_words(
    row, column, key0, key1, step, call, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the uint32 words [ROWS, COLUMNS] of a tile that starts at a multiple of 64 columns.

    The layout is that of ``ablate.numerics.philox``: 64 columns take 16 calls.
    """
    zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
    c0 = (column // 4 + tl.arange(0, COLUMNS // 4)[None, :]).to(tl.uint32) + zero
    c1 = (row + tl.arange(0, ROWS)[:, None]).to(tl.uint32) + zero
    c0, c1, c2, c3 = philox(c0, c1, key0, key1, step, call)
    # 32 columns apart, and neighbours
    pairs = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    strips = tl.reshape(pairs, [ROWS, COLUMNS // 64, 16, 2, 2])
    return tl.reshape(tl.trans(strips, 0, 1, 3, 2, 4), [ROWS, COLUMNS])


@triton.jit
def row_of_words(key0, key1, step, call, SIZE: tl.constexpr):
    """Return the uint32 words [SIZE] of a row by itself, up to 128 of them, in the same layout."""
    column = tl.arange(0, SIZE)
    call_of = (column // 64 * 16 + column % 32 // 2).to(tl.uint32)
    c0, c1, c2, c3 = philox(call_of, tl.zeros_like(call_of), key0, key1, step, call)
    is_odd = column % 2 == 1
    return tl.where(
        column // 32 % 2 == 1, tl.where(is_odd, c3, c2), tl.where(is_odd, c1, c0)
    )


@triton.jit
def argsort(words, SIZE: tl.constexpr):
    """Return the places (int32 [SIZE]) of words [SIZE] in rising order; equal ones keep theirs."""
    place = tl.arange(0, SIZE)
    is_equal = words[None, :] == words[:, None]
    is_before = (words[None, :] < words[:, None]) | (
        is_equal & (place[None, :] < place[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    return tl.sum(tl.where(rank[:, None] == place[None, :], place[:, None], 0), axis=0)


@triton.jit
def first_of(words, SIZE: tl.constexpr):
    """Return the first of each SIZE neighbouring words [N, K]: [N, K / SIZE]."""
    groups = tl.reshape(words, [words.shape[0], words.shape[1] // SIZE, SIZE])
    return tl.sum(tl.where(tl.arange(0, SIZE)[None, None, :] == 0, groups, 0), axis=2)


@triton.jit
def shared_by_four(words):
    """Give four neighbours the first one's word, shifted right by 16 for the last two."""
    first = first_of(words, 4)[:, :, None]
    fours = tl.where(tl.arange(0, 4)[None, None, :] < 2, first, first >> 16)
    return tl.reshape(fours, [words.shape[0], words.shape[1]])


@triton.jit
def to_fp32(v):
    """Widen a loaded tile; bf16 by its bits, since Triton's interpreter flushes bf16 subnormals to zero."""
    if v.dtype == tl.bfloat16:
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(
            tl.float32, bitcast=True
        )
    return v.to(tl.float32)


@triton.jit
def exact_bf16(v):
    """Convert fp32 values that are exact in bf16 to bf16 by their bits."""
    return (
        (v.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    )


@triton.jit
def round_to_bf16(v):
    """Round fp32 to the nearest bf16, ties to even, and keep it as fp32; NaN and Inf stay.

    By its bits, because Triton's interpreter truncates where the hardware rounds.
    """
    bits = v.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    finite = (bits & 0x7F800000) != 0x7F800000
    special = tl.where((bits & 0x007FFFFF) != 0, 0x7FC00000, bits)
    return tl.where(finite, rounded, special).to(tl.float32, bitcast=True)


@triton.constexpr_function
def log2(power):
    """Return the exponent of a power of two."""
    return power.bit_length() - 1


@triton.jit
def butterfly(pairs):
    """Turn pairs [N, 2, n] fp32 to their sums and differences.

    The other of two is the sum of their bits less the one's: that moves nothing between warps.
    """
    bits = pairs.to(tl.int32, bitcast=True)
    other = (tl.sum(bits, axis=1)[:, None, :] - bits).to(tl.float32, bitcast=True)
    return other + signed(pairs, tl.arange(0, 2)[None, :, None] << 31)


@triton.jit
def rotate(v, sign0, sign1, order0, order1, step, call, SIDE: tl.constexpr):
    """Rotate the last axis of v [N, K] fp32 by groups: permutation, signs, butterfly, 1 / √group.

    Permutation and signs are drawn by their keys as ``ablate.numerics.rotate`` draws them.
    """
    ROWS: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    GROUP: tl.constexpr = SIDE.hadamard
    groups = tl.reshape(v, [ROWS * K // GROUP, GROUP])
    if not SIDE.each_step:
        step = step & 0
    if not SIDE.each_call:
        call = call & 0
    if SIDE.permute:
        order = argsort(row_of_words(order0, order1, step, call, GROUP), GROUP)[None, :]
        groups = tl.gather(
            groups, tl.broadcast_to(order, [ROWS * K // GROUP, GROUP]), 1
        )
    if SIDE.signs == "drawn":
        groups = signed(groups, row_of_words(sign0, sign1, step, call, GROUP)[None, :])
    elif SIDE.signs == "fixed":
        groups = signed(groups, (SIDE.sign_bits >> tl.arange(0, GROUP) << 31)[None, :])
    for i in tl.static_range(log2(GROUP)):
        groups = butterfly(tl.reshape(groups, [ROWS * K // (2 << i), 2, 1 << i]))
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
        v = tl.sum(tl.reshape(v, [v.shape[0], v.shape[1], 2, v.shape[2] // 2]), axis=2)
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
def rounded(v, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """Round v to a neighbour on an element's grid, saturating; return fp32 with the signs of v.

    v lies p steps above its lower neighbour. Stochastic: up when p > u, u the top 24 bits of ``words`` over
    2^24; with 8 bits, and ROCm's: when p plus the top 8 bits over 2^8, or 22 over 2^22, reaches 1. Other
    roundings go to the nearer neighbour, and ties to the even code, away from zero or toward it.
    A NaN gives a number.
    """
    MANTISSA: tl.constexpr = ELEMENT.mantissa_bits
    LEAST: tl.constexpr = (127 + ELEMENT.min_exponent) << 23
    magnitude = tl.minimum(tl.abs(v), ELEMENT.max)
    # 2^exponent, as bits
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    if ROUNDING == "nearest":
        # fp32 beside 1.5 × 2^23 steps has no bits for parts of a step: the sum is rounded, ties to even.
        large = (power + (((23 - MANTISSA) << 23) + 0x400000)).to(
            tl.float32, bitcast=True
        )
        value = (magnitude + large) - large
    else:
        # A ceiling may flush subnormal parts to zero: 24 bits leave none, of half a step they add nothing.
        BITS: tl.constexpr = bits_of(ROUNDING)
        per_step = (127 << 23) - power + ((127 + MANTISSA + BITS) << 23)
        parts = magnitude * per_step.to(tl.float32, bitcast=True)
        if ROUNDING == "stochastic":
            steps = (
                tl.ceil(parts).to(tl.int32) + (0xFFFFFF - (words >> 8).to(tl.int32))
            ) >> BITS
        elif ROUNDING == "stochastic_8bit" or ROUNDING == "stochastic_rocm":  # noqa: PLR1714  Triton takes no set
            steps = (parts.to(tl.int32) + (words >> (32 - BITS)).to(tl.int32)) >> BITS
        elif ROUNDING == "nearest_away":
            steps = (parts.to(tl.int32) + 1) >> BITS
        else:
            steps = tl.ceil(parts).to(tl.int32) >> BITS
        value = steps.to(tl.float32) * (power - (MANTISSA << 23)).to(
            tl.float32, bitcast=True
        )
    return signed(value, v.to(tl.int32, bitcast=True))


@triton.constexpr_function
def bits_of(rounding):
    """Return the number of bits of p that a rounding other than nearest even looks at."""
    return {"stochastic": 24, "stochastic_8bit": 8, "stochastic_rocm": 22}.get(
        rounding, 1
    )


@triton.jit
def code_of(value, ELEMENT: tl.constexpr):
    """Return the magnitude codes (int32) of fp32 values on an element's grid, whatever their signs.

    A power of two makes the element's subnormals those of fp32; then the codes are the bits of the values.
    """
    MANTISSA: tl.constexpr = ELEMENT.mantissa_bits
    scaled = tl.abs(value) * 2.0 ** (-126 - ELEMENT.min_exponent)
    return scaled.to(tl.int32, bitcast=True) >> (23 - MANTISSA)


@triton.jit
def signed(v, bits):
    """Flip the sign of v (fp32) where bit 31 of ``bits`` (32-bit integers) is set.

    By its bit: Triton 3.6's unary minus is 0 − x, which makes +0 of +0.
    """
    return (v.to(tl.int32, bitcast=True) ^ (bits.to(tl.int32, bitcast=True) & SIGN)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def largest(v, ROWS: tl.constexpr):
    """Return the largest of each block's magnitudes v (integers or fp32)."""
    most = tl.max(v, axis=2)
    if ROWS > 1:
        most = of_rows(tl.max(tiles(most, ROWS), axis=2), ROWS)
    return most


@triton.jit
def e8m0_byte(amax_bits, SIDE: tl.constexpr):
    """Return the E8M0 byte (int32) for the bits of a block's largest magnitude; 255 for NaN and Inf."""
    byte = tl.maximum(
        ((amax_bits + SIDE.scale_add) >> 23) - SIDE.element.max_exponent, 0
    )
    return tl.where(amax_bits >= 0x7F800000, 255, byte)


@triton.jit
def power_of_two(byte):
    """Return 2^(byte − 127) in fp32, NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quest_byte(blocks, amax_bits):
    """Return the E8M0 byte of 2^floor(log2(clip × std + 1e-8)); 255 where a square or a value leaves fp32."""
    mean = tree_sum(blocks) * 0.03125
    variance = tree_sum(blocks * blocks) * 0.03125 - mean * mean
    scale = tl.sqrt_rn(tl.maximum(variance, 0.0)) * CLIP_OF_QUEST + 1e-8
    finite = (variance.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(
        finite & (amax_bits < 0x7F800000), scale.to(tl.int32, bitcast=True) >> 23, 255
    )


@triton.jit
def nvfp4_scale(base, decode_scale, SIDE: tl.constexpr):
    """Return the E4M3 byte nearest to ``base``, what divides by it and the tensor's scale, and its value."""
    OF_SCALES: tl.constexpr = SIDE.of_scales
    base = tl.minimum(base, LARGEST_FP32)
    up = rounded(base, 0, OF_SCALES, "nearest")
    return (
        code_of(up, OF_SCALES),
        tl.minimum(tl.div_rn(1.0, up * decode_scale), LARGEST_FP32),
        up,
    )


@triton.jit
def two_level(blocks, amax, words, tensor, SIDE: tl.constexpr):
    """Return NVFP4's block scales as ``nvfp4_scale`` does: from amax / 6, or amax / 4 if that errs less.

    ``tensor`` holds the tensor's scale, its reciprocal and its largest magnitude.
    """
    encode = tl.load(tensor)
    decode_scale = tl.load(tensor + 1)
    if SIDE.family == "two_level":
        byte, down, up = nvfp4_scale(amax * (encode * ONE_SIXTH), decode_scale, SIDE)
    else:
        base = tl.div_rn(amax, 6.0) * encode
        byte, down, up = nvfp4_scale(base, decode_scale, SIDE)
        byte4, down4, up4 = nvfp4_scale(base * 1.5, decode_scale, SIDE)
        error = _error(blocks, words, down, up, tl.load(tensor + 2), SIDE)
        four = _error(blocks, words, down4, up4, tl.load(tensor + 2), SIDE) < error
        byte = tl.where(four, byte4, byte)
        down = tl.where(four, down4, down)
        up = tl.where(four, up4, up)
    return byte, down, up


@triton.jit
def _error(blocks, words, down, up, amax, SIDE: tl.constexpr):
    """Return each block's error under a scale, in the reference's order of operations."""
    ELEMENT: tl.constexpr = SIDE.element
    ROUNDING: tl.constexpr = SIDE.rounding
    scaled = blocks * down[:, :, None]
    if SIDE.prescale != 1.0:
        scaled = scaled * SIDE.prescale
    value = rounded(scaled, words, ELEMENT, ROUNDING)
    if (amax > 2.0**-100) & (amax < 2.0**112):
        # All is normal, so powers of two change no rounding: 1 and 1.5 stand for all of E2M1's values.
        of_1 = tl.div_rn(up * amax, SIDE.error_divisor)[:, :, None]
        of_1_5 = tl.div_rn(1.5 * up * amax, SIDE.error_divisor)[:, :, None]
        bits = value.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        off = tl.abs(
            power * tl.where((bits & 0x400000) != 0, of_1_5, of_1) - tl.abs(blocks)
        )
    else:
        off = tl.abs(
            tl.div_rn(value * up[:, :, None] * amax, SIDE.error_divisor) - blocks
        )
    if SIDE.measure == "mse":
        off = off * off
    error = add_in_order(tl.zeros_like(up), off)
    if SIDE.rows > 1:
        error = of_rows(tree_sum(tiles(error, SIDE.rows)), SIDE.rows)
    return error


@triton.jit
def eden_scale(amax, tensor, SIDE: tl.constexpr):
    """Return MS-EDEN's block scales before their correction; NaN where the tensor's scale is NaN or zero."""
    OF_SCALES: tl.constexpr = SIDE.of_scales
    base = tl.div_rn(tl.div_rn(amax, CLIP_OF_EDEN), tl.load(tensor + 1))
    up = rounded(base, 0, OF_SCALES, "nearest")
    return tl.where(base != base, float("nan"), tl.where(up == 0.0, 1.0, up))


@triton.jit
def eden_corrected(scaled, value, up, words, SIDE: tl.constexpr):
    """Return byte and value of MS-EDEN's block scales, stretched group by group, and where they are NaN."""
    OF_SCALES: tl.constexpr = SIDE.of_scales
    N: tl.constexpr = scaled.shape[0]
    GROUPS: tl.constexpr = scaled.shape[1] * scaled.shape[2] // SIDE.hadamard
    if SIDE.measure == "unscaled":
        scaled = scaled * up[:, :, None]
        value = value * up[:, :, None]
    energy = tree_sum(tl.reshape(scaled * scaled, [N, GROUPS, SIDE.hadamard]))
    product = tree_sum(tl.reshape(scaled * value, [N, GROUPS, SIDE.hadamard]))
    stretch = tl.where(product == 0.0, 1.0, tl.div_rn(energy, product))
    of_blocks = tl.broadcast_to(
        stretch[:, :, None], [N, GROUPS, SIDE.hadamard // SIDE.block]
    )
    stretched = up * tl.reshape(of_blocks, [N, scaled.shape[1]])
    corrected = rounded(stretched, first_of(words, SIDE.block), OF_SCALES, "stochastic")
    bad = stretched != stretched
    byte = tl.where(bad, 0x7F, code_of(corrected, OF_SCALES))
    return byte, tl.where(bad, float("nan"), corrected), bad
