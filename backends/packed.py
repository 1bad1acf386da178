"""Packed operands: codes and scale bytes in the layout of FP4 and FP8 units, contraction last.

Every native GEMM takes them from our own quantiser: Triton's where it supports the policy, else plain torch.
So native back ends differ only in how products are added and in the rounding of the output. ``values``
returns the operand that emulation would multiply, bit for bit, so that the two can be compared anywhere.
Operands that packed codes cannot represent are rejected by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.device import interpreting, triton_fault
from ablate.backends.protocol import Backend, Draw, Operand
from ablate.backends.triton.policies import BITS, BLOCK, FP8, refusal
from ablate.numerics.formats import E4M3, ELEMENTS, decode, e8m0_decode
from ablate.numerics.quantiser import quantize, turned
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from ablate.recipes import GemmPolicy
    from ablate.recipes.scale_rules import ScaleRule

NAN_CODE = 0x7F
"""NaN of E4M3 and of E5M2 (any mantissa but zero)."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One operand of a GEMM, [n, k] with the contraction dimension last.

    ``codes`` are uint8: [n, k / 2] for 4-bit elements, the first of two in the low nibble, else [n, k].
    ``scales`` are uint8 [n, k / block]: E8M0, or E4M3 for NVFP4; None for FP8. ``descale`` must still be
    applied to the accumulator: a number, fp32 of one element, or fp32 [n] for one scale per row.
    ``axis`` is the contraction axis of the stored matrix.
    """

    format: str
    codes: Tensor
    scales: Tensor | None
    descale: float | Tensor
    axis: int
    mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k] in elements."""
        n, k = self.codes.shape
        return n, k * 2 if self.format in BITS else k

    @property
    def descale_on_device(self) -> Tensor:
        """``descale`` as an fp32 tensor, of one element if it is a number."""
        if isinstance(self.descale, Tensor):
            return self.descale
        return torch.full(
            (1,), self.descale, dtype=torch.float32, device=self.codes.device
        )

    @property
    def values(self) -> Tensor:
        """The stored matrix dequantised to bf16, without ``descale``."""
        codes = self.codes
        if self.format in BITS:
            codes = torch.stack((codes & 0xF, codes >> 4), dim=2).flatten(1)
        values = decode(codes, ELEMENTS[self.format])
        if self.scales is None:
            values = torch.where((codes & NAN_CODE) == NAN_CODE, torch.nan, values)
        else:
            up = e8m0_decode(self.scales.to(torch.int32))
            if self.format == "nvfp4":
                up = torch.where(
                    self.scales == NAN_CODE, torch.nan, decode(self.scales, E4M3)
                )
            values = values * up.repeat_interleave(BLOCK[self.format], dim=1)
        values = values.to(torch.bfloat16)
        return turned(values, self.axis)


class PackedBackend(Backend):
    """A back end whose GEMM takes packed codes; subclasses define ``multiply`` and ``support``."""

    one_read = True

    def quantize(self, x: Tensor, draw: Draw, *, axis: int) -> Packed:
        """Quantise to codes and scales, contraction last."""
        return _packed(x, {axis % 2: draw})[axis % 2]

    def quantize_both(
        self, x: Tensor, rows: Draw, columns: Draw
    ) -> tuple[Operand, Operand]:
        """Quantise along both axes, in one read if Triton supports both policies."""
        packed = _packed(x, {1: rows, 0: columns})
        return packed[1], packed[0]


def _packed(x: Tensor, draws: dict[int, Draw]) -> dict[int, Packed]:
    """Quantise along each axis of ``draws``: by Triton's kernel where it can, else in plain torch."""
    packed: dict[int, Packed] = {}
    if triton_fault() is None and (x.device.type == "cuda" or interpreting()):
        supported = {
            axis: draw for axis, draw in draws.items() if refusal(draw.policy) is None
        }
        if supported:
            from ablate.backends.triton.launch import quantise

            for axis, memory in quantise(x, supported, "codes").items():
                policy = draws[axis].policy
                packed[axis] = Packed(
                    format=policy.format,
                    codes=memory.out,
                    scales=memory.scales,
                    descale=memory.descale(policy),
                    axis=axis,
                    mask=memory.mask,
                )
    for axis, draw in draws.items():
        if axis not in packed:
            packed[axis] = packed_by_torch(x, draw, axis)
    return packed


def packed_by_torch(x: Tensor, draw: Draw, axis: int) -> Packed:
    """Quantise in plain torch and pack; a tile's scale is repeated for its rows."""
    policy = draw.policy
    quantized = quantize(x, policy, axis=axis, key=draw.key, amax=draw.amax_number)
    scales: Tensor | None = None
    descale: float | Tensor = quantized.descale
    if policy.format not in FP8:
        scales = quantized.scales.repeat_interleave(
            block_shape(policy)[0], dim=0
        ).contiguous()
    elif quantized.scales.shape[1]:
        descale = quantized.scales[:, 0]
    codes = quantized.codes
    if policy.format in BITS:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return Packed(
        format=policy.format,
        codes=codes,
        scales=scales,
        descale=descale,
        axis=axis,
        mask=quantized.mask,
    )


def packing_fault(gemm: GemmPolicy) -> str | None:
    """Say why the operands of a GEMM cannot be packed for one instruction; None if they can."""
    left = gemm.left
    right = gemm.right
    for policy in gemm.sides:
        if policy.undo == "operand":
            return "undo 'operand' leaves values that are no codes"
        if policy.format not in (*BLOCK, *FP8) or not _has_instruction(
            policy.scale_rule
        ):
            return f"no instruction takes {policy.format} with scale '{policy.scale}'"
    if not (left.format == right.format or {left.format, right.format} <= set(FP8)):
        return f"its operands are {left.format} and {right.format}: an instruction takes both in one format"
    if (left.scale == "row") != (right.scale == "row"):
        return f"scales '{left.scale}' and '{right.scale}' do not go together"
    if left.format == right.format == "fp8_e5m2":
        return "no instruction takes E5M2 on both sides"
    return None


def _has_instruction(rule: ScaleRule) -> bool:
    """Whether an instruction takes such scales: a byte per block and a factor per tensor, or fp32 per row."""
    if rule.element == "none":
        return rule.outer in ("tensor", "row")
    return rule.element != "ue5m3" and rule.outer in ("none", "tensor")


def quantisers_of(gemm: GemmPolicy) -> str:
    """Name what quantises a GEMM's operands on a GPU: Triton, or plain torch and why."""
    quantisers = set()
    for policy in gemm.sides:
        if not policy.is_untouched:
            reason = triton_fault() or refusal(policy)
            quantisers.add("Triton" if reason is None else f"plain torch ({reason})")
    return " and ".join(sorted(quantisers))
