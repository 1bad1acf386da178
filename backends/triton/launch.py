"""Convert an operand's policy to a launch of the quantise kernel: codes and scales, or dequantised values.

Nothing here waits for the device: tensor scales stay on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton

from ablate.backends.triton.policies import BITS, BLOCK, side_of, tile
from ablate.backends.triton.quantise import quantise_kernel
from ablate.numerics.quantiser import Quantized, check_operand
from ablate.numerics.rotate import permutation_of, signs_of
from ablate.numerics.scales import fp32_scale

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
    done = _quantise(x, draws, outs, "codes")
    return {axis: done[axis] | {"codes": out["out"], "scales": out["scales"]} for axis, out in outs.items()}


def quantise_values(x: Tensor, draw: Draw, axis: int) -> Quantized:
    """Quantise and dequantise to bf16 along ``axis``."""
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    return Quantized(
        values=out, axis=axis, **_quantise(x, {axis: draw}, {axis: {"out": out}}, "values")[axis]
    )


def _quantise(
    x: Tensor, draws: Mapping[int, Draw], outs: Mapping[int, dict[str, Any]], output: str
) -> dict[int, dict[str, Any]]:
    """Run the kernel, first for the tensor's largest magnitude if need be; return descales and masks."""
    given, done = {}, {}
    for axis, draw in draws.items():
        policy = draw.policy
        check_operand(x, policy, axis, draw.key)
        tensor: Tensor | None = None
        descale: float | Tensor = 1.0 / policy.prescale
        if policy.has_tensor_scale:
            amax = x.new_full((1,), draw.amax or 0.0, dtype=torch.float32)
            if draw.amax is None:  # raised by the bits of magnitudes
                _launch(x, {axis: draw}, {axis: {"out": amax.view(torch.int32)}}, "amax")
            encode, decode = fp32_scale(amax, policy)
            tensor = torch.cat((encode, decode, amax))
            descale = decode
            if policy.prescale != 1.0:
                descale = (decode.double() / policy.prescale).to(torch.float32)
        done[axis] = {
            "descale": descale,
            "mask": x.new_empty(x.shape, dtype=torch.bool) if policy.mask else None,
        }
        given[axis] = outs[axis] | {"tensor": tensor, "mask": done[axis]["mask"]}
    _launch(x, draws, given, output)
    return done


def _launch(x: Tensor, draws: Mapping[int, Draw], given: Mapping[int, dict[str, Any]], output: str) -> None:
    """Launch the kernel with what is given for each axis, rotations and keys."""
    if not x.numel():
        return
    arguments: dict[str, Any] = {}
    step, call = 0, 0
    for axis, name in ((1, "r"), (0, "c")):
        side = dict.fromkeys(("out", "scales", "mask", "tensor", "order", "signs")) | {"key0": 0, "key1": 0}
        if (draw := draws.get(axis)) is not None:
            order = permutation_of(draw.policy, draw.key)
            groups = {
                "order": None if order is None else order.int(),
                "signs": signs_of(draw.policy, draw.key),
            }
            side |= given[axis]
            side |= {
                of: None if one is None else one.to(x.device, non_blocking=True) for of, one in groups.items()
            }
            if draw.key is not None:
                side["key0"], side["key1"] = map(_signed, draw.key.words())
                step, call = draw.key.step, draw.key.call
        arguments |= {f"{name}_{of}": value for of, value in side.items()}
    policies = [draws[axis].policy if axis in draws else None for axis in (1, 0)]
    tile_rows, tile_columns, warps = tile(*policies)
    grid = (triton.cdiv(x.shape[0], tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    with on_device(x):
        quantise_kernel[grid](
            x, x.shape[0], x.shape[1], x.stride(0), x.stride(1), _signed(step), _signed(call),
            R=side_of(policies[0], output), C=side_of(policies[1], output), **arguments,
            TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def _signed(word: int) -> int:
    """Return a 32-bit word as the int32 with the same bits, so that its type never depends on its value."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's GPU the current one for a launch; do nothing on a CPU (the interpreter)."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
