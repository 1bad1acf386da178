"""The quantise kernel: one read of a tile, rotated, scaled, rounded and packed along rows, columns or both.

A *side* is one contraction axis of the stored matrix [R, C]: ``rows`` blocks along a row (contracts over C),
``columns`` blocks down a column (contracts over R) and writes the transposed copy [C, R], because FP4 units
take both operands of a GEMM packed along K. Each side has its own policy and its own random stream.
"""

import triton
import triton.language as tl

from ablate.backends.triton.functions import (
    CLIP_OF_EDEN,
    LARGEST_FP32,
    MAX_OF_EDEN,
    code_of,
    e8m0_byte,
    eden_corrected,
    eden_scale,
    exact_bf16,
    largest,
    power_of_two,
    quest_byte,
    random_words,
    rotate,
    round_to_bf16,
    rounded,
    shared_by_four,
    to_fp32,
    two_level,
)


@triton.jit
def offsets(first_n, first_k, n, k, stride_n, stride_k, WIDE: tl.constexpr):
    """Return where the elements n, k of a tile lie. WIDE: 31 bits do not hold a place within the tile."""
    if WIDE:
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    return (
        first_n.to(tl.int64) * stride_n
        + first_k.to(tl.int64) * stride_k
        + (n * stride_n + k * stride_k)
    )


@triton.jit
def _store_amax(v, out):
    """Store the largest magnitude of v [N, K] at this program's place."""
    bits = tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    program = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    tl.store(
        out + program * tl.num_programs(0) + tl.program_id(0),
        bits.to(tl.float32, bitcast=True),
    )


@triton.jit
def _scale(blocks, words, tensor, SIDE: tl.constexpr):
    """Divide blocks by their scales; return them, the scales' bytes and values, and where they are NaN."""
    amax_bits = largest(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, SIDE.rows)
    amax = amax_bits.to(tl.float32, bitcast=True)
    if SIDE.family == "tensor":
        scaled = blocks * tl.load(tensor)
        byte = tl.zeros_like(amax_bits)
        up = tl.full([blocks.shape[0], blocks.shape[1]], 1.0, tl.float32)
        is_bad = amax != amax
    elif SIDE.family == "ms_eden":  # bytes follow when its scales are corrected
        byte = tl.zeros_like(amax_bits)
        up = eden_scale(amax, tensor, SIDE)
        scaled = tl.div_rn(blocks, (up * tl.load(tensor + 1))[:, :, None])
        is_bad = up != up
    elif SIDE.family == "two_level" or SIDE.family == "four_six":  # noqa: PLR1714  Triton takes no set
        byte, down, up = two_level(blocks, amax, words, tensor, SIDE)
        scale = tl.load(tensor)  # NaN where the tensor has a NaN or an Inf
        is_bad = tl.broadcast_to(scale != scale, [blocks.shape[0], blocks.shape[1]])
        byte = tl.where(is_bad, 0x7F, byte)
        up = tl.where(is_bad, float("nan"), up)
        scaled = blocks * down[:, :, None]
    else:
        byte = (
            quest_byte(blocks, amax_bits)
            if SIDE.family == "quest"
            else e8m0_byte(amax_bits, SIDE)
        )
        up = power_of_two(byte)
        is_bad = byte == 255
        down = power_of_two(tl.where(is_bad, byte, 254 - byte))  # its reciprocal
        scaled = blocks * down[:, :, None]
    return scaled, byte, up, is_bad


@triton.jit
def _store_values(value, up, is_bad, place, inside, SIDE: tl.constexpr):
    """Multiply elements [N, blocks, block] by their scales and store them as bf16."""
    if SIDE.family == "tensor":
        value = tl.where(is_bad, float("nan"), value)
    value = value * up[:, :, None]  # a bad block's scale is NaN
    # MXFP8 reaches below bf16's smallest
    if SIDE.family == "e8m0" and SIDE.element.mantissa_bits == 3:
        value = round_to_bf16(value)
    N: tl.constexpr = value.shape[0]
    K: tl.constexpr = value.shape[1] * value.shape[2]
    tl.store(place, exact_bf16(tl.reshape(value, [N, K])), mask=inside)


@triton.jit
def _store_codes(
    value,
    byte,
    is_bad,
    first_n,
    first_k,
    n_left,
    k_left,
    k_total,
    out,
    scales,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store the codes of elements [N, blocks, block], packed, and the bytes [N, blocks] of their scales."""
    ELEMENT: tl.constexpr = SIDE.element
    N: tl.constexpr = value.shape[0]
    K: tl.constexpr = value.shape[1] * value.shape[2]
    BLOCK: tl.constexpr = SIDE.block
    n = tl.arange(0, N)[:, None]
    sign = (value.to(tl.int32, bitcast=True) >> (32 - SIDE.bits)) & (
        1 << (SIDE.bits - 1)
    )
    code = code_of(value, ELEMENT) | sign
    code = tl.where(is_bad, 0x7F if SIDE.family == "tensor" else 0, code)
    if SIDE.bits == 4:
        low, high = tl.split(tl.reshape(code, [N, K // 2, 2]))
        packed = (low | (high << 4)).to(tl.uint8)
        k = tl.arange(0, K // 2)[None, :]
        place = offsets(first_n, first_k // 2, n, k, k_total // 2, 1, WIDE)
        tl.store(out + place, packed, mask=(n < n_left) & (k < k_left // 2))
    else:
        k = tl.arange(0, K)[None, :]
        place = offsets(first_n, first_k, n, k, k_total, 1, WIDE)
        tl.store(
            out + place,
            tl.reshape(code, [N, K]).to(tl.uint8),
            mask=(n < n_left) & (k < k_left),
        )
    if SIDE.family != "tensor":
        b = tl.arange(0, K // BLOCK)[None, :]
        place = offsets(first_n, first_k // BLOCK, n, b, k_total // BLOCK, 1, WIDE)
        tl.store(
            scales + place, byte.to(tl.uint8), mask=(n < n_left) & (b < k_left // BLOCK)
        )


@triton.jit
def _side(
    v,
    words,
    first_n,
    first_k,
    n_total,
    k_total,
    values_n,
    values_k,
    out,
    scales,
    mask,
    tensor,
    sign0,
    sign1,
    order0,
    order1,
    step,
    call,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Quantise v [N, K] fp32, contraction last, and store it."""
    N: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    BLOCK: tl.constexpr = SIDE.block
    # Triton 3.6 takes a field of a constant as a constant of a function only by a name of its own.
    ELEMENT: tl.constexpr = SIDE.element
    ROUNDING: tl.constexpr = SIDE.rounding
    if SIDE.hadamard:
        v = rotate(v, sign0, sign1, order0, order1, step, call, SIDE)
    if SIDE.output == "amax":
        _store_amax(v, out)
    else:
        of_elements = words
        if SIDE.rounding == "stochastic_rocm":
            of_elements = shared_by_four(words)
        if SIDE.draws:
            of_elements = tl.reshape(of_elements, [N, K // BLOCK, BLOCK])
        blocks = tl.reshape(v, [N, K // BLOCK, BLOCK])
        scaled, byte, up, is_bad = _scale(blocks, of_elements, tensor, SIDE)
        if SIDE.prescale != 1.0:
            scaled = scaled * SIDE.prescale
        value = rounded(scaled, of_elements, ELEMENT, ROUNDING)
        if SIDE.family == "ms_eden":
            byte, up, is_bad = eden_corrected(scaled, value, up, words, SIDE)
        if SIDE.family == "tensor":
            is_bad = scaled != scaled
        else:
            is_bad = tl.broadcast_to(is_bad[:, :, None], [N, K // BLOCK, BLOCK])
        n = tl.arange(0, N)[:, None]
        k = tl.arange(0, K)[None, :]
        n_left = n_total - first_n
        k_left = k_total - first_k
        place = offsets(first_n, first_k, n, k, values_n, values_k, WIDE)
        inside = (n < n_left) & (k < k_left)
        if SIDE.mask:
            tl.store(
                mask + place,
                tl.reshape(tl.abs(scaled) < 6.0, [N, K]).to(tl.uint8),
                mask=inside,
            )
        if SIDE.output == "values":
            _store_values(value, up, is_bad, out + place, inside, SIDE)
        else:
            _store_codes(
                value,
                byte,
                is_bad,
                first_n,
                first_k,
                n_left,
                k_left,
                k_total,
                out,
                scales,
                SIDE,
                WIDE,
            )


PARTS = tl.constexpr(4096)
"""Parts of a tensor's largest magnitude that are compared at a time."""
WORDS = ("key0", "key1", "sign0", "sign1", "order0", "order1")
"""The words of a side's three keys: of its elements, of its signs and of its permutation."""


@triton.jit(
    do_not_specialize=[
        "step",
        "call",
        *(f"{side}_{word}" for side in "rc" for word in WORDS),
    ]
)
def quantise_kernel(
    x,
    rows,
    columns,
    stride_row,
    stride_column,
    step,
    call,
    position,
    r_out,
    r_scales,
    r_mask,
    r_tensor,
    r_key0,
    r_key1,
    r_sign0,
    r_sign1,
    r_order0,
    r_order1,
    c_out,
    c_scales,
    c_mask,
    c_tensor,
    c_key0,
    c_key1,
    c_sign0,
    c_sign1,
    c_order0,
    c_order1,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Quantise x [rows, columns] along its rows, its columns or both. One program does one tile.

    ``position`` (int64 [2]) holds step and call in place of the two numbers, or is None.

    With output ``amax`` write the tile's largest magnitude after the rotation to out (fp32 [programs])
    instead; NaN and Inf are largest.
    """
    if position is not None:
        step = tl.load(position).to(tl.int32)
        call = tl.load(position + 1).to(tl.int32)
    first_row = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * TILE_ROWS
    first_column = tl.program_id(0) * TILE_COLUMNS
    r = tl.arange(0, TILE_ROWS)[:, None]
    c = tl.arange(0, TILE_COLUMNS)[None, :]
    place = x + offsets(first_row, first_column, r, c, stride_row, stride_column, WIDE)
    inside = (r < rows - first_row) & (c < columns - first_column)
    v = to_fp32(tl.load(place, mask=inside, other=0.0))  # zeros outside
    if R.output != "off":
        words = 0
        if R.draws:
            words = random_words(
                first_row,
                first_column,
                r_key0,
                r_key1,
                step,
                call,
                TILE_ROWS,
                TILE_COLUMNS,
            )
        _side(
            v,
            words,
            first_row,
            first_column,
            rows,
            columns,
            columns,
            1,
            r_out,
            r_scales,
            r_mask,
            r_tensor,
            r_sign0,
            r_sign1,
            r_order0,
            r_order1,
            step,
            call,
            R,
            WIDE,
        )
    if C.output != "off":
        words = 0
        if C.draws:
            words = tl.trans(
                random_words(
                    first_row,
                    first_column,
                    c_key0,
                    c_key1,
                    step,
                    call,
                    TILE_ROWS,
                    TILE_COLUMNS,
                )
            )
        _side(
            tl.trans(v),
            words,
            first_column,
            first_row,
            columns,
            rows,
            1,
            columns,
            c_out,
            c_scales,
            c_mask,
            c_tensor,
            c_sign0,
            c_sign1,
            c_order0,
            c_order1,
            step,
            call,
            C,
            WIDE,
        )


@triton.jit
def scale_kernel(
    parts,
    number,
    amax,
    tensor,
    LARGEST: tl.constexpr,
    PRESCALE: tl.constexpr,
    EDEN: tl.constexpr,
):
    """Write a tensor's scale, its reciprocal, its largest magnitude and its descale to ``tensor`` (fp32 [4]).

    As ``fp32_scale`` of ``ablate.numerics.scales``, from the largest of ``parts`` [number]: bf16, fp16 or
    fp32, with NaN and Inf largest; from ``amax`` (fp32) where there are none. Descale is the reciprocal over
    the prescale. One program.
    """
    bits = tl.full([], amax, tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if parts is not None:
        most = tl.zeros([PARTS], tl.int32)
        start = number * 0
        # Triton 3.6's interpreter has no range of a number that it is given
        while start < number:
            place = start + tl.arange(0, PARTS)
            part = to_fp32(tl.load(parts + place, mask=place < number, other=0.0))
            most = tl.maximum(most, part.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            start += PARTS
        bits = tl.max(most, axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    if EDEN:
        encode = tl.div_rn(tl.div_rn(amax, MAX_OF_EDEN), CLIP_OF_EDEN)
    else:
        encode = tl.minimum(tl.div_rn(LARGEST, amax), LARGEST_FP32)
    encode = tl.where(bits == 0, 1.0, tl.where(bits < 0x7F800000, encode, float("nan")))
    decode = encode
    if not EDEN:
        decode = tl.div_rn(1.0, encode)
    descale = decode
    if PRESCALE != 1.0:
        descale = (decode.to(tl.float64) / tl.full([], PRESCALE, tl.float64)).to(
            tl.float32
        )
    tl.store(tensor, encode)
    tl.store(tensor + 1, decode)
    tl.store(tensor + 2, amax)
    tl.store(tensor + 3, descale)
