"""Blackwell's NVFP4 product in emulation: ``accumulate: blackwell`` of a GEMM's policy.

The model is that of Graphcore's report (MrHuff/ue5m3-fp4, docs/technical_report, the section on native NVFP4
products), which reproduced a device's logits, losses and gradients bit for bit: K is cut into groups of 64
products; the sum of a group is rounded once to fp32, to nearest even; groups are added in order, rounding
toward zero; the tensors' factor comes last. We have no Blackwell to check it on: the device test tells which
way a device rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.emulated import EmulatedBackend
from ablate.backends.protocol import Backend
from ablate.backends.reference import ReferenceBackend
from ablate.numerics.quantiser import Quantized

if TYPE_CHECKING:
    from ablate.backends.protocol import Operand

GROUP = 64
"""Products that are summed before the first rounding."""
_ROWS = 64
"""Rows of the result at a time on a CPU, so that their sums stay in the cache."""
_PLACE = 1 << 29
"""One place of fp32 in the bits of fp64."""
_EXACT = 2.0**33
"""Products of NVFP4 values are multiples of 2^-20, so fp64 holds their sums exactly below this."""


class _Blackwell(Backend):
    """A back end with these sums."""

    def detail(self) -> str:
        """Return one line for the run's record."""
        return f"{super().detail()}; NVFP4 sums as Blackwell's model"  # type: ignore[safe-super]

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply NVFP4 operands by the model."""
        assert isinstance(a, Quantized)
        assert isinstance(b, Quantized)
        product = summed(a.contraction_last, b.contraction_last)
        return (product * (a.descale * b.descale)).to(torch.bfloat16)


class BlackwellEmulated(_Blackwell, EmulatedBackend):
    """The emulated back end with these sums."""


class BlackwellReference(_Blackwell, ReferenceBackend):
    """The reference back end with these sums."""


def summed(a: Tensor, b: Tensor) -> Tensor:
    """Return A Bᵀ [m, n] in fp32, as the device's accumulator has it, for NVFP4 values without their factor.

    Args:
        a: [m, k] bf16, E2M1 elements times E4M3 scales.
        b: [n, k], the same.
    """
    if not a.shape[0] * b.shape[0]:
        return a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    right = b.double().t().contiguous()
    parts = []
    for left in torch.split(a.double(), _ROWS if a.device.type == "cpu" else a.shape[0]):
        total = left.new_zeros(left.shape[0], right.shape[1])
        for start in range(0, a.shape[1], GROUP):
            exact = left[:, start : start + GROUP] @ right[start : start + GROUP]
            total = add_toward_zero(total, exact.float().double())
        parts.append(total.float())
    return torch.cat(parts)


def add_toward_zero(a: Tensor, b: Tensor) -> Tensor:
    """Add fp32 numbers held in fp64, and round the exact sum toward zero to fp32.

    Both are multiples of 2^-20, or zero, Inf or NaN, so that no sum is subnormal.
    """
    total = a + b
    bits = total.view(torch.int64) & -_PLACE
    if not bool(total.abs().amax() < _EXACT):
        # What fp64 lost may lie on the other side of an fp32 number (TwoSum, Knuth).
        more = total - a
        lost = (a - (total - more)) + (b - more)
        bits -= ((bits.view(torch.float64) == total) & (lost * total < 0)).long() * _PLACE
    return bits.view(torch.float64)
