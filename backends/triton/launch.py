"""Convert an operand's policy to a launch of the quantise kernel: packed operands, or dequantised values.

Nothing here waits for the device: tensor scales stay on it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton

from ablate.backends.quantisers.packed import BLOCK, Packed
from ablate.backends.triton import quantise
from ablate.backends.triton.policies import BITS, CODES, VALUES, constants, tile
from ablate.numerics.formats import ELEMENTS, FLOAT32_MAX, SCALE_ADD
from ablate.numerics.quantiser import check_operand, signs_of
from ablate.numerics.scales import fp32

if TYPE_CHECKING:
    from torch import Tensor

    from ablate.backends.protocol import Draw


def quantise_packed(
    x: Tensor, rows: Draw | None, columns: Draw | None
) -> tuple[Packed | None, Packed | None]:
    """Quantise a matrix along its rows, its columns or both in one read; codes and scales, contraction last.

    Args:
        x: [R, C] in bf16, fp16 or fp32, of any strides.
        rows: contract over C (axis 1), or None.
        columns: contract over R (axis 0): the transposed copy, or None.

    Raises:
        ValueError: a dtype, shape or missing key that a policy cannot take.
    """
    done: list[Packed | None] = [None, None]
    sides: list[dict[str, Any]] = []
    for index, side in enumerate((rows, columns)):
        if side is None:
            sides.append(_left_out())
            continue
        policy, axis = side.policy, 1 - index
        check_operand(x, policy, axis, side.key)
        n, k = (x.shape[0], x.shape[1]) if axis else (x.shape[1], x.shape[0])
        four_bits = BITS.get(policy.format, 8) == 4
        tensor, descale = _tensor_scale(x, side, axis)
        block = BLOCK.get(policy.format)
        if policy.scale in SCALE_ADD and block is None:
            block = 32
        codes = x.new_empty(n, k // 2 if four_bits else k, dtype=torch.uint8)
        scales = None if block is None else x.new_empty(n, k // block, dtype=torch.uint8)
        sides.append(_arguments(x, side, codes, scales, tensor))
        done[index] = Packed(format=policy.format, codes=codes, scales=scales, descale=descale, axis=axis)
    _launch(x, [rows, columns], sides, CODES)
    return done[0], done[1]


def quantise_values(x: Tensor, draw: Draw, axis: int) -> tuple[Tensor, float | Tensor]:
    """Quantise and dequantise to bf16 along ``axis``; returns the stored matrix and its descale."""
    check_operand(x, draw.policy, axis, draw.key)
    tensor, descale = _tensor_scale(x, draw, axis)
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    ours = _arguments(x, draw, out, None, tensor)
    pair: list[Draw | None] = [draw, None] if axis else [None, draw]
    _launch(x, pair, [ours, _left_out()] if axis else [_left_out(), ours], VALUES)
    return out, descale


def _left_out() -> dict[str, Any]:
    return {"out": None, "scales": None, "tensor": None, "signs": None, "key0": 0, "key1": 0}


def _arguments(
    x: Tensor, side: Draw, out: Tensor, scales: Tensor | None, tensor: Tensor | None
) -> dict[str, Any]:
    signs = signs_of(side.policy, side.key)
    key0, key1 = side.key.words() if side.key else (0, 0)
    return {
        "out": out,
        "scales": scales,
        "tensor": tensor,
        "signs": None if signs is None else signs.to(x.device, non_blocking=True),
        "key0": _signed(key0),
        "key1": _signed(key1),
    }


def _signed(word: int) -> int:
    """Return a 32-bit word as the int32 with the same bits, so that its type never depends on its value."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _launch(x: Tensor, pair: list[Draw | None], sides: list[dict[str, Any]], output: int) -> None:
    if not x.numel():
        return
    keys = [side.key for side in pair if side is not None and side.key is not None]
    step, call = (keys[0].step, keys[0].call) if keys else (0, 0)
    assert all((key.step, key.call) == (step, call) for key in keys)
    tile_rows, tile_columns = tile([side.policy if side else None for side in pair])
    grid = (triton.cdiv(x.shape[0], tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    with on_device(x):
        quantise.quantise_kernel[grid](
            x, x.shape[0], x.shape[1], x.stride(0), x.stride(1), _signed(step), _signed(call),
            **{f"r_{name}": value for name, value in sides[0].items()},
            **{f"c_{name}": value for name, value in sides[1].items()},
            **{
                f"{prefix}_{name}": value
                for prefix, side in zip("RC", pair, strict=True)
                for name, value in constants(side.policy if side else None, output).items()
            },
            TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's GPU the current one for a launch; do nothing on a CPU (the interpreter)."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _tensor_scale(x: Tensor, side: Draw, axis: int) -> tuple[Tensor | None, float | Tensor]:
    """Return the tensor scale for the kernel, and the descale, both without waiting."""
    policy = side.policy
    if policy.scale in SCALE_ADD:
        return None, 1.0 / policy.prescale
    known = None if side.amax is None else x.new_full((1,), side.amax, dtype=torch.float32)
    amax = _amax(x, side, axis) if known is None else known
    element = ELEMENTS[policy.format]
    largest = 448.0 * 6 if policy.scale == "two_level" else element.max
    # Tensor by tensor: torch computes number / tensor as reciprocal and product, rounded twice.
    encode = (torch.full_like(amax, largest) / amax).clamp(max=FLOAT32_MAX)
    encode = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), encode, math.nan))
    decode = torch.ones_like(encode) / encode
    descale = decode if policy.prescale == 1.0 else _divided(decode, policy.prescale)
    return torch.cat((encode, decode)), descale


def _divided(decode: Tensor, prescale: float) -> Tensor:
    return (decode.double() / fp32(prescale)).to(torch.float32)


def _amax(x: Tensor, side: Draw, axis: int) -> Tensor:
    """Return the largest magnitude after rotation, fp32 [1]."""
    policy = side.policy
    bits = x.new_zeros(1, dtype=torch.int32)
    if not x.numel():
        return bits.view(torch.float32)
    tile_rows, tile_columns = tile([policy if axis else None, None if axis else policy])
    signs = signs_of(policy, side.key)
    grid = (triton.cdiv(x.shape[0], tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    with on_device(x):
        quantise.amax_kernel[grid](
            x, x.shape[0], x.shape[1], x.stride(0), x.stride(1), bits,
            None if signs is None else signs.to(x.device, non_blocking=True),
            ALONG_COLUMNS=axis == 0, HADAMARD=policy.hadamard,
            NORM=1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0,
            ROTATED_BF16=policy.rotated_bf16, TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return bits.view(torch.float32)
