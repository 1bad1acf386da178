"""The quantiser of every native GEMM: Triton's if it supports the policy, else plain torch.

Libraries only supply the GEMM, so native back ends differ only in how products are added and in the
rounding of the output. Operands that packed codes cannot represent are rejected by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.backends.device import interpreting, triton_fault
from ablate.backends.packed import FP8, Packed, pack_nibbles
from ablate.backends.protocol import Backend, Draw, Operand
from ablate.backends.triton.policies import BLOCK, refusal
from ablate.numerics.quantiser import quantize, round_operand
from ablate.numerics.scales import fp32
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from torch import Tensor

    from ablate.recipes import GemmPolicy, OperandPolicy

_NO_INSTRUCTION = ("two_level_row", "two_level_1x128", "two_level_ue5m3", "ue5m3")
"""NVFP4's scales that are not E4M3 bytes and one factor of the tensor."""


class PackedBackend(Backend):
    """A back end whose GEMM takes packed codes; subclasses define ``multiply`` and ``support``."""

    one_read = True

    def quantize(self, x: Tensor, draw: Draw, *, axis: int) -> Packed:
        """Quantise to codes and scales, contraction last."""
        if _by_triton(x, draw.policy):
            from ablate.backends.triton.launch import quantise_packed

            return quantise_packed(x, {axis % 2: draw})[axis % 2]
        return packed_by_torch(x, draw, axis=axis % 2)

    def quantize_both(self, x: Tensor, rows: Draw, columns: Draw) -> tuple[Operand, Operand]:
        """Quantise along both axes, in one read if Triton supports both policies."""
        if _by_triton(x, rows.policy) and _by_triton(x, columns.policy):
            from ablate.backends.triton.launch import quantise_packed

            done = quantise_packed(x, {1: rows, 0: columns})
            return done[1], done[0]
        return super().quantize_both(x, rows, columns)


def packing_fault(gemm: GemmPolicy) -> str | None:
    """Return why the operands of a GEMM cannot be packed for one instruction, or None if they can."""
    left, right = gemm.left, gemm.right
    for policy in (left, right):
        if policy.undo == "operand":
            return "undo 'operand' leaves values that are no codes"
        if policy.format not in (*BLOCK, *FP8):
            return f"no instruction takes {policy.format}"
        if policy.format in FP8 and policy.scale not in ("tensor", "delayed", "row"):
            return f"no GEMM here takes {policy.format} with scale '{policy.scale}'"
        if policy.format == "nvfp4" and policy.scale in _NO_INSTRUCTION:
            return f"no GEMM here takes nvfp4 with scale '{policy.scale}'"
    same = left.format == right.format or {left.format, right.format} <= set(FP8)
    if not same:
        return f"its operands are {left.format} and {right.format}: an instruction takes both in one format"
    if (left.scale == "row") != (right.scale == "row"):
        return f"scales '{left.scale}' and '{right.scale}' do not go together"
    if left.format == right.format == "fp8_e5m2":
        return "no instruction takes E5M2 on both sides"
    return None


def quantisers_of(gemm: GemmPolicy) -> str:
    """Describe in a few words the quantisers of a GEMM's operands on a GPU."""
    if (fault := triton_fault()) is not None:
        return f"plain torch ({fault})"
    reasons = [refusal(policy) for policy in (gemm.left, gemm.right)]
    return " and ".join(sorted({"Triton" if why is None else f"plain torch ({why})" for why in reasons}))


def _by_triton(x: Tensor, policy: OperandPolicy) -> bool:
    if triton_fault() is not None or not (x.device.type == "cuda" or interpreting()):
        return False
    return refusal(policy) is None


def packed_by_torch(x: Tensor, draw: Draw, *, axis: int) -> Packed:
    """Quantise in plain torch and pack; a tile's scale is repeated for its rows."""
    policy = draw.policy
    codes = quantize(x, policy, axis=axis, key=draw.key, amax=draw.amax)
    mask = None
    if policy.mask:
        mask = round_operand(x, policy, axis=axis, key=draw.key, amax=draw.amax).mask
    scales: Tensor | None = None
    descale: float | Tensor = codes.tensor_scale
    if policy.format not in FP8:
        rows = block_shape(policy)[0]
        scales = (codes.scales.repeat_interleave(rows, dim=0) if rows > 1 else codes.scales).contiguous()
        descale = codes.tensor_scale / policy.prescale
        descale = fp32(descale) if policy.format == "nvfp4" else descale
    elif codes.scales.shape[1]:
        descale = codes.scales[:, 0]
    packed = pack_nibbles(codes.codes) if policy.format in ("mxfp4", "nvfp4") else codes.codes
    return Packed(format=policy.format, codes=packed, scales=scales, descale=descale, axis=axis, mask=mask)
