"""Quantise one operand by its policy, in plain torch: the rules of every back end, written once.

``fake_quantize`` returns values that are exact in bf16 and a factor, ``descale``, by which the GEMM's fp32
accumulator has to be multiplied: FP8's tensor scale, or the 4/3 that undoes a 3/4 prescale. An operand
with a NaN or an Inf in a block reads as NaN in that block, so that garbage is seen and not hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics import formats
from ablate.numerics.hadamard import hadamard_last
from ablate.numerics.philox import Key, random_signs, random_words
from ablate.recipes import MX_BLOCK, OperandPolicy, group_size

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An operand after rounding: bf16 ``values`` of the input's shape, and the factor still to apply."""

    values: Tensor
    descale: float = 1.0


def check_operand(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> None:
    """Raise ``ValueError`` if this tensor cannot take this policy along this axis."""
    if x.dtype not in _INPUT_DTYPES:
        raise ValueError(
            f"cannot quantise {x.dtype} to {policy.format}: expected bfloat16, float16 or float32"
        )
    if x.dim() != 2 or axis not in (0, 1, -1, -2):
        raise ValueError(f"expected a matrix and axis 0 or 1, got shape {tuple(x.shape)} and axis {axis}")
    group = group_size(policy)
    if x.shape[axis] % group:
        raise ValueError(f"the group of {group} does not divide {x.shape[axis]}, the contraction dimension")
    if key is None and (policy.rounding == "stochastic" or policy.signs != "none"):
        raise ValueError(f"a key is needed for rounding '{policy.rounding}' and signs '{policy.signs}'")


def signs_of(policy: OperandPolicy, key: Key | None) -> Tensor | None:
    """Return the ±1 vector of a random Hadamard, None for a deterministic one or none."""
    if policy.hadamard == 0 or policy.signs == "none":
        return None
    assert key is not None
    return random_signs(policy.hadamard, key)


def fp8_scale(amax: float, fmt: str) -> float:
    """Return the tensor-wise scale fp8_max / amax in fp32; 1 for an all-zero tensor, NaN for NaN or Inf.

    As TransformerEngine's current scaling: the values are multiplied by it, the accumulator divided.
    """
    if amax == 0.0:
        return 1.0
    if not math.isfinite(amax):
        return float("nan")
    limit = torch.tensor(formats.FP8_MAX[fmt], dtype=torch.float32)
    scale = (limit / torch.tensor(amax, dtype=torch.float32)).item()
    # A tensor of subnormals would overflow the scale; the largest finite one keeps it on the grid.
    return min(scale, torch.finfo(torch.float32).max)


def fp8_descale(scale: float) -> float:
    """Return 1 / scale rounded to fp32, the factor that FP8 hardware is given."""
    return (1.0 / torch.tensor(scale, dtype=torch.float32)).item()


def fake_quantize(x: Tensor, policy: OperandPolicy, *, axis: int = -1, key: Key | None = None) -> Quantized:
    """Quantise and dequantise a matrix by ``policy`` along ``axis``, its contraction axis.

    Args:
        x: [rows, columns] in bf16, fp16 or fp32, of any strides.
        policy: format, scale rule, rounding and rotation.
        axis: the contraction axis: blocks and Hadamard groups lie along it.
        key: names the random stream; needed for stochastic rounding and random signs.

    Returns:
        bf16 values (exact: every format here fits) and the factor for the accumulator.

    Raises:
        ValueError: a dtype, shape or missing key that the policy cannot take.
    """
    check_operand(x, policy, axis, key)
    if policy.format == "bf16":
        return Quantized(values=x.to(torch.bfloat16))
    if policy.format in formats.FP8_MAX:
        v = x.to(torch.float32)
        amax = v.abs().max().item() if v.numel() else 0.0  # max propagates NaN
        tensor_scale = fp8_scale(amax, policy.format)
        values = formats.fp8_nearest(v * tensor_scale, policy.format).to(torch.bfloat16)
        return Quantized(values=values, descale=fp8_descale(tensor_scale))
    values, scale_bytes = _mxfp4(x, policy, axis, key)
    scale = formats.e8m0_decode(scale_bytes).unsqueeze(-1)
    dequantised = (values.view(*scale.shape[:-1], MX_BLOCK) * scale).view(values.shape).to(torch.bfloat16)
    if axis in (0, -2):
        dequantised = dequantised.t()
    return Quantized(values=dequantised, descale=1.0 / policy.prescale)


def quantize(
    x: Tensor, policy: OperandPolicy, *, axis: int = -1, key: Key | None = None
) -> tuple[Tensor, Tensor]:
    """Return the E2M1 codes (uint8, [n, k], contraction last) and E8M0 bytes (uint8, [n, k / 32]) of MXFP4.

    With ``axis=0`` the result is that of the transposed matrix, as a GEMM wants it.

    Raises:
        ValueError: as ``fake_quantize``, or a policy that is not MXFP4.
    """
    check_operand(x, policy, axis, key)
    if policy.format != "mxfp4":
        raise ValueError(f"{policy.format} has no codes with block scales: expected mxfp4")
    values, scale_bytes = _mxfp4(x, policy, axis, key)
    return formats.e2m1_encode(torch.nan_to_num(values)), scale_bytes.to(torch.uint8)


def _mxfp4(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> tuple[Tensor, Tensor]:
    """Return E2M1 values (fp32) and scale bytes (int32), contraction axis last; NaN blocks hold NaN."""
    v = x.to(torch.float32)
    if axis in (0, -2):
        v = v.t()
    v = v.contiguous()
    if policy.hadamard:
        v = hadamard_last(v, policy.hadamard, signs_of(policy, key))
    blocks = v.view(v.shape[0], v.shape[1] // MX_BLOCK, MX_BLOCK)
    # The maximum of the bit patterns, not of the floats: NaN and Inf then win over every number.
    amax = (
        (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32)
        if v.numel()
        else v.new_zeros(blocks.shape[:2])
    )
    scale_bytes = formats.floor_scale_byte(amax)
    scaled = (blocks * formats.e8m0_reciprocal(scale_bytes).unsqueeze(-1)).view(v.shape)
    if policy.prescale != 1.0:
        scaled = scaled * policy.prescale
    if policy.rounding == "nearest":
        return formats.e2m1_nearest(scaled), scale_bytes
    assert key is not None
    words = random_words(x.shape[0], x.shape[1], key, x.device)
    return formats.e2m1_stochastic(scaled, words.t() if axis in (0, -2) else words), scale_bytes
