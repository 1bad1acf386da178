"""The quantise kernel: one read of a tile, rotated, scaled, rounded and packed along rows, columns or both.

A *side* is one contraction axis of the stored matrix [R, C]: ``rows`` blocks along a row (contracts over C),
``columns`` blocks down a column (contracts over R) and writes the transposed copy [C, R], because FP4 units
take both operands of a GEMM packed along K. Each side has its own policy and its own random stream.
"""

import triton
import triton.language as tl

from ablate.backends.triton import policies
from ablate.backends.triton.rounding import (
    FLOAT32_MAX,
    ONE_SIXTH,
    decode,
    e8m0_byte,
    exact_bf16,
    nearest,
    power_of_two,
    random_words,
    reciprocal_power_of_two,
    rotate,
    stochastic,
    to_fp32,
)

OFF = tl.constexpr(policies.OFF)
VALUES = tl.constexpr(policies.VALUES)
E8M0 = tl.constexpr(policies.E8M0)
TENSOR = tl.constexpr(policies.TENSOR)


@triton.jit
def _tile(x, rows, columns, stride_row, stride_column, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Load this program's tile as fp32, with zeros outside, and return its first row and column."""
    tiles_across = tl.cdiv(columns, TILE_COLUMNS)
    first_row = (tl.program_id(0) // tiles_across) * TILE_ROWS
    first_column = (tl.program_id(0) % tiles_across) * TILE_COLUMNS
    r = first_row + tl.arange(0, TILE_ROWS)[:, None]
    c = first_column + tl.arange(0, TILE_COLUMNS)[None, :]
    at = x + r.to(tl.int64) * stride_row + c.to(tl.int64) * stride_column
    v = to_fp32(tl.load(at, mask=(r < rows) & (c < columns), other=0.0))
    return v, first_row, first_column


@triton.jit
def _side(
    v, words, first_n, first_k, n_total, k_total, values_n, values_k, out, scales, tensor, signs,
    OUTPUT: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ADD: tl.constexpr,
    MANTISSA: tl.constexpr, E_MIN: tl.constexpr, E_MAX: tl.constexpr, MAX: tl.constexpr,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, PRESCALE: tl.constexpr, HADAMARD: tl.constexpr,
    NORM: tl.constexpr, ROTATED_BF16: tl.constexpr,
):  # fmt: skip
    """Quantise v [N, K] fp32, contraction last, and store it."""
    N: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    if HADAMARD:
        v = rotate(v, signs, HADAMARD, NORM, ROTATED_BF16)
    blocks = tl.reshape(v, [N, K // BLOCK, BLOCK])
    if RULE == TENSOR:
        scale = tl.load(tensor)
        scaled = blocks * scale
        up = tl.full([N, K // BLOCK, 1], 1.0, dtype=tl.float32)
        bad = scaled != scaled
        byte = tl.zeros([N, K // BLOCK], dtype=tl.int32)
    else:
        amax_bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
        if RULE == E8M0:
            byte = e8m0_byte(amax_bits, SCALE_ADD, E_MAX)
            down = reciprocal_power_of_two(byte)
            up = power_of_two(byte)
            bad = byte == 255
        else:
            encode = tl.load(tensor)
            decode_scale = tl.load(tensor + 1)
            base = amax_bits.to(tl.float32, bitcast=True) * (encode * ONE_SIXTH)
            bad = tl.zeros([N, K // BLOCK], dtype=tl.int32) + (encode != encode).to(tl.int32) > 0
            byte = nearest(tl.minimum(base, FLOAT32_MAX), 3, -6, 448.0)
            up = decode(byte, 3, -6)
            byte = tl.where(bad, 0x7F, byte)
            up = tl.where(bad, float("nan"), up)
            down = tl.minimum(tl.div_rn(1.0 + tl.zeros_like(up), up * decode_scale), FLOAT32_MAX)
        scaled = blocks * down[:, :, None]
        up = up[:, :, None]
        bad = tl.broadcast_to(bad[:, :, None], [N, K // BLOCK, BLOCK])
    if PRESCALE != 1.0:
        scaled = scaled * PRESCALE
    if STOCHASTIC:
        in_blocks = tl.reshape(words, [N, K // BLOCK, BLOCK])
        code = stochastic(scaled, in_blocks, MANTISSA, E_MIN, MAX)
    else:
        code = nearest(scaled, MANTISSA, E_MIN, MAX)
    negative = scaled.to(tl.int32, bitcast=True) < 0
    n = first_n + tl.arange(0, N)[:, None].to(tl.int64)
    if OUTPUT == VALUES:
        magnitude = decode(code, MANTISSA, E_MIN)
        value = tl.where(bad, float("nan"), tl.where(negative, -magnitude, magnitude) * up)
        value = exact_bf16(tl.reshape(value, [N, K]))
        k = first_k + tl.arange(0, K)[None, :]
        tl.store(out + n * values_n + k * values_k, value, mask=(n < n_total) & (k < k_total))
    else:
        code = tl.where(negative, code | (1 << (BITS - 1)), code)
        if RULE == TENSOR:
            code = tl.where(bad, 0x7F, code)
        else:
            code = tl.where(bad, 0, code)
        if BITS == 4:
            low, high = tl.split(tl.reshape(code, [N, K // 2, 2]))
            packed = (low | (high << 4)).to(tl.uint8)
            k = first_k // 2 + tl.arange(0, K // 2)[None, :]
            tl.store(out + n * (k_total // 2) + k, packed, mask=(n < n_total) & (k < k_total // 2))
        else:
            packed = tl.reshape(code, [N, K]).to(tl.uint8)
            k = first_k + tl.arange(0, K)[None, :]
            tl.store(out + n * k_total + k, packed, mask=(n < n_total) & (k < k_total))
        if RULE != TENSOR:
            b = first_k // BLOCK + tl.arange(0, K // BLOCK)[None, :]
            per_row = k_total // BLOCK
            tl.store(scales + n * per_row + b, byte.to(tl.uint8), mask=(n < n_total) & (b < per_row))


@triton.jit(do_not_specialize=["r_key0", "r_key1", "c_key0", "c_key1", "step", "call"])
def quantise_kernel(
    x, rows, columns, stride_row, stride_column, step, call,
    r_out, r_scales, r_tensor, r_signs, r_key0, r_key1,
    c_out, c_scales, c_tensor, c_signs, c_key0, c_key1,
    R_OUTPUT: tl.constexpr, R_RULE: tl.constexpr, R_BLOCK: tl.constexpr, R_SCALE_ADD: tl.constexpr,
    R_MANTISSA: tl.constexpr, R_E_MIN: tl.constexpr, R_E_MAX: tl.constexpr, R_MAX: tl.constexpr,
    R_BITS: tl.constexpr, R_STOCHASTIC: tl.constexpr, R_PRESCALE: tl.constexpr,
    R_HADAMARD: tl.constexpr, R_NORM: tl.constexpr, R_ROTATED_BF16: tl.constexpr,
    C_OUTPUT: tl.constexpr, C_RULE: tl.constexpr, C_BLOCK: tl.constexpr, C_SCALE_ADD: tl.constexpr,
    C_MANTISSA: tl.constexpr, C_E_MIN: tl.constexpr, C_E_MAX: tl.constexpr, C_MAX: tl.constexpr,
    C_BITS: tl.constexpr, C_STOCHASTIC: tl.constexpr, C_PRESCALE: tl.constexpr,
    C_HADAMARD: tl.constexpr, C_NORM: tl.constexpr, C_ROTATED_BF16: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantise x [rows, columns] along its rows, its columns or both. One program does one tile."""
    v, first_row, first_column = _tile(x, rows, columns, stride_row, stride_column, TILE_ROWS, TILE_COLUMNS)
    if R_OUTPUT != OFF:
        words = 0
        if R_STOCHASTIC:
            words = random_words(first_row, first_column, r_key0, r_key1, step, call, TILE_ROWS, TILE_COLUMNS)
        _side(
            v, words, first_row, first_column, rows, columns, columns, 1, r_out, r_scales, r_tensor, r_signs,
            R_OUTPUT, R_RULE, R_BLOCK, R_SCALE_ADD, R_MANTISSA, R_E_MIN, R_E_MAX, R_MAX, R_BITS,
            R_STOCHASTIC, R_PRESCALE, R_HADAMARD, R_NORM, R_ROTATED_BF16,
        )  # fmt: skip
    if C_OUTPUT != OFF:
        words = 0
        if C_STOCHASTIC:
            words = tl.trans(
                random_words(first_row, first_column, c_key0, c_key1, step, call, TILE_ROWS, TILE_COLUMNS)
            )
        _side(
            tl.trans(v), words, first_column, first_row, columns, rows, 1, columns, c_out, c_scales,
            c_tensor, c_signs, C_OUTPUT, C_RULE, C_BLOCK, C_SCALE_ADD, C_MANTISSA, C_E_MIN, C_E_MAX, C_MAX,
            C_BITS, C_STOCHASTIC, C_PRESCALE, C_HADAMARD, C_NORM, C_ROTATED_BF16,
        )  # fmt: skip


@triton.jit
def amax_kernel(
    x, rows, columns, stride_row, stride_column, out, signs,
    ALONG_COLUMNS: tl.constexpr, HADAMARD: tl.constexpr, NORM: tl.constexpr, ROTATED_BF16: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise out (int32) to the bits of x's largest magnitude after its rotation; NaN and Inf are largest."""
    v, _, _ = _tile(x, rows, columns, stride_row, stride_column, TILE_ROWS, TILE_COLUMNS)
    if HADAMARD:
        if ALONG_COLUMNS:
            v = tl.trans(v)
        v = rotate(v, signs, HADAMARD, NORM, ROTATED_BF16)
    tl.atomic_max(out, tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0))
