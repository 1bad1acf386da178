"""Convert an operand's policy to a launch of the quantise kernel: codes and scales, or dequantised values.

Nothing here waits for the device: tensor scales stay on it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton

from ablate.backends.triton import quantise
from ablate.backends.triton.policies import BITS, BLOCK, CODES, OFF, VALUES, side_of, tile
from ablate.numerics.formats import ELEMENTS, FLOAT32_MAX
from ablate.numerics.quantiser import Quantized, check_operand
from ablate.numerics.rotate import permutation_of, signs_of
from ablate.numerics.scales import EDEN_CLIP, EDEN_MAX, divided, fp32, largest_scale
from ablate.recipes.policy import MS_EDEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ablate.backends.protocol import Draw


def quantise_codes(x: Tensor, draws: Mapping[int, Draw]) -> dict[int, dict[str, Any]]:
    """Quantise a matrix along one or both axes in one read.

    Args:
        x: [R, C] in bf16, fp16 or fp32, of any strides.
        draws: by contraction axis: 1 contracts over C, 0 over R and gives the transposed copy.

    Returns:
        For each axis ``codes`` and ``scales``, contraction last, ``descale`` and ``mask``.

    Raises:
        ValueError: a dtype, shape or missing key that a policy cannot take.
    """
    outs: dict[int, dict[str, Any]] = {}
    for axis, draw in draws.items():
        fmt, (n, k) = draw.policy.format, x.shape if axis else x.shape[::-1]
        block = BLOCK.get(fmt, None if draw.policy.has_tensor_scale else 32)
        outs[axis] = {
            "out": x.new_empty(n, k // 2 if BITS.get(fmt) == 4 else k, dtype=torch.uint8),
            "scales": None if block is None else x.new_empty(n, k // block, dtype=torch.uint8),
        }
    done = _launch(x, draws, outs, CODES)
    return {axis: done[axis] | {"codes": out["out"], "scales": out["scales"]} for axis, out in outs.items()}


def quantise_values(x: Tensor, draw: Draw, axis: int) -> Quantized:
    """Quantise and dequantise to bf16 along ``axis``."""
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    found = _launch(x, {axis: draw}, {axis: {"out": out, "scales": None}}, VALUES)[axis]
    return Quantized(values=out, axis=axis, **found)


def _launch(
    x: Tensor, draws: Mapping[int, Draw], outs: Mapping[int, dict[str, Any]], output: int
) -> dict[int, dict[str, Any]]:
    """Run the kernel; return each axis' descale and mask."""
    arguments: dict[str, Any] = {}
    done, step, call = {}, 0, 0
    for axis, name in ((1, "r"), (0, "c")):
        side = dict.fromkeys(("out", "scales", "mask", "tensor", "order", "signs")) | {"key0": 0, "key1": 0}
        if (draw := draws.get(axis)) is not None:
            check_operand(x, draw.policy, axis, draw.key)
            side |= outs[axis] | _rotation(x, draw)
            side["tensor"], descale = _tensor_scale(x, draw, axis)
            side["mask"] = x.new_empty(x.shape, dtype=torch.bool) if draw.policy.mask else None
            done[axis] = {"descale": descale, "mask": side["mask"]}
            if draw.key is not None:
                side["key0"], side["key1"] = map(_signed, draw.key.words())
                step, call = draw.key.step, draw.key.call
        arguments |= {f"{name}_{of}": value for of, value in side.items()}
    if x.numel():
        policies = [draws[axis].policy if axis in draws else None for axis in (1, 0)]
        tile_rows, tile_columns, warps = tile(*policies)
        grid = (triton.cdiv(x.shape[0], tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
        with on_device(x):
            quantise.quantise_kernel[grid](
                x, x.shape[0], x.shape[1], x.stride(0), x.stride(1), _signed(step), _signed(call),
                R=side_of(policies[0], output), C=side_of(policies[1], output), **arguments,
                TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return done


def _rotation(x: Tensor, draw: Draw) -> dict[str, Tensor | None]:
    """Return the permutation (int32) and the signs of a Hadamard group on x's device."""
    order = permutation_of(draw.policy, draw.key)
    found = {"order": None if order is None else order.int(), "signs": signs_of(draw.policy, draw.key)}
    return {name: None if one is None else one.to(x.device, non_blocking=True) for name, one in found.items()}


def _signed(word: int) -> int:
    """Return a 32-bit word as the int32 with the same bits, so that its type never depends on its value."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's GPU the current one for a launch; do nothing on a CPU (the interpreter)."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _tensor_scale(x: Tensor, side: Draw, axis: int) -> tuple[Tensor | None, float | Tensor]:
    """Return the tensor's scale, its reciprocal and its largest magnitude (fp32 [3]), and the descale.

    For MS-EDEN the first two are both the decode scale.
    """
    policy = side.policy
    if not policy.has_tensor_scale:
        return None, 1.0 / policy.prescale
    amax = _amax(x, side, axis) if side.amax is None else x.new_full((1,), side.amax, dtype=torch.float32)
    if policy.scale in MS_EDEN:
        decode = divided(divided(amax, fp32(EDEN_MAX)), EDEN_CLIP)
        encode = decode = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), decode, math.nan))
    else:
        element = ELEMENTS[policy.format]
        largest = largest_scale(policy.scale) * element.max if policy.format == "nvfp4" else element.max
        encode = divided(largest, amax).clamp(max=FLOAT32_MAX)
        encode = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), encode, math.nan))
        decode = divided(1.0, encode)
    descale = decode
    if policy.prescale != 1.0:
        descale = (decode.double() / policy.prescale).to(torch.float32)
    return torch.cat((encode, decode, amax)), descale


def _amax(x: Tensor, side: Draw, axis: int) -> Tensor:
    """Return the largest magnitude after rotation, fp32 [1]."""
    policy = side.policy
    bits = x.new_zeros(1, dtype=torch.int32)
    if not x.numel():
        return bits.view(torch.float32)
    tile_rows, tile_columns, warps = tile(policy if axis else None, None if axis else policy)
    grid = (triton.cdiv(x.shape[0], tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    with on_device(x):
        quantise.amax_kernel[grid](
            x, x.shape[0], x.shape[1], x.stride(0), x.stride(1), bits, **_rotation(x, side),
            ALONG_COLUMNS=axis == 0, SIDE=side_of(policy, OFF),
            TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return bits.view(torch.float32)
