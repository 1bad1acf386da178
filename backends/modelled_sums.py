"""GEMMs whose sums are those of named hardware, by published models: ``accumulate`` of a GEMM's policy.

``blackwell``: NVFP4, by the model of Graphcore's report (MrHuff/ue5m3-fp4, docs/technical_report, the section
on native NVFP4 products), which reproduced a device's logits, losses and gradients bit for bit: K is cut into
groups of 64 products; the sum of a group is rounded once to fp32, to nearest even; groups are added in order,
rounding toward zero; the tensors' factor comes last.

``hopper``: FP8, by MMA-Sim's model of ``wgmma`` (2511.10909; microsoft/MMA-Sim 7969d391,
arithmetic/fdpa.py), which its authors found equal to an H100 bit for bit. An instruction adds 32 products to
its accumulator: all 33 terms are cut toward zero to multiples of 2^(e − 13), e the largest exponent among
them, and summed exactly; the sum is cut toward zero to 14 bits. The exponent of a product is the sum of its
factors' exponents, that of a subnormal factor its format's smallest. What four instructions give is added in
fp32 to nearest, as cuBLAS and DeepSeek-V3 (2412.19437, section 3.3.2) do each 128 products.

We have no such devices to check it on: the device test tells the width of a device's sums, and which way
they are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.emulated import EmulatedBackend
from ablate.numerics.formats import ELEMENTS, e8m0_decode
from ablate.numerics.quantiser import turned

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.protocol import Operand
    from ablate.recipes import GemmPolicy

GROUP = 64
"""Products that Blackwell sums before the first rounding."""
STEP = 32
"""Products that an instruction of Hopper adds."""
PROMOTED = 128
"""Products after which Hopper's sum is added in fp32."""
_ROWS = 64
"""Rows of the result at a time on a CPU, so that their sums stay in the cache."""
_PLACE = 1 << 29
"""The last place of fp32, in the bits of fp64."""
_EXACT = 2.0**33
"""Products of NVFP4 values are multiples of 2^-20, so fp64 holds their sums exactly below this."""


class ModelledBackend(EmulatedBackend):
    """Emulation that adds products by the model that a GEMM's policy names."""

    def __init__(self, gemm: GemmPolicy) -> None:
        super().__init__()
        self.gemm = gemm

    def detail(self) -> str:
        """Name the quantiser and the model for the run's record."""
        return (
            f"{super().detail()}; sums as {self.gemm.accumulate.capitalize()}'s model"
        )

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Sum as the model does."""
        add = SUMS[self.gemm.accumulate]
        product = add(turned(a.values, a.axis), turned(b.values, b.axis), self.gemm)
        return (product * (a.descale * b.descale)).to(torch.bfloat16)


def _split(a: Tensor) -> tuple[Tensor, ...]:
    """Cut the left operand into rows whose sums stay in a CPU's cache."""
    return torch.split(a, _ROWS if a.device.type == "cpu" else max(len(a), 1))


def summed_by_hopper(a: Tensor, b: Tensor, gemm: GemmPolicy) -> Tensor:
    """Multiply FP8 values; return A Bᵀ [m, n], fp32, as in the accumulator before the tensors' factor.

    Args:
        a: [m, k] bf16, elements of the left operand's format.
        b: [n, k], of the right operand's.
        gemm: the formats.
    """
    parts = []
    for rows in _split(a.float()):
        total = rows.new_zeros(len(rows), len(b))
        columns = torch.split(b.float(), PROMOTED, 1)
        for left, right in zip(torch.split(rows, PROMOTED, 1), columns, strict=True):
            total += _in_14_bits(left, right, gemm)
        parts.append(total)
    return torch.cat(parts)


def _in_14_bits(left: Tensor, right: Tensor, gemm: GemmPolicy) -> Tensor:
    """Sum the products of one accumulator, fp32 [m, n], 32 at a time."""
    total = left.new_zeros(len(left), len(right), 1)
    pairs = zip(torch.split(left, STEP, 1), torch.split(right, STEP, 1), strict=True)
    for a, b in pairs:
        of_a = _exponent(a, ELEMENTS[gemm.left.format].min_exponent)
        of_b = _exponent(b, ELEMENTS[gemm.right.format].min_exponent)
        exponents = torch.cat((of_a[:, None] + of_b, _exponent(total, -126)), dim=2)
        terms = torch.cat((a[:, None] * b, total), dim=2)
        largest = torch.where(terms == 0, -99, exponents).amax(2, keepdim=True)
        place = e8m0_decode(largest - 13 + 127)
        total = (terms / place).trunc().sum(2, keepdim=True) * place
        total = (total.view(torch.int32) & -(1 << 10)).view(torch.float32)
    return total[..., 0]


def _exponent(values: Tensor, smallest: int) -> Tensor:
    return (torch.frexp(values).exponent - 1).clamp(min=smallest)


def summed_by_blackwell(a: Tensor, b: Tensor, _gemm: GemmPolicy) -> Tensor:
    """Multiply NVFP4 values; return A Bᵀ [m, n], fp32, as in the accumulator before the tensors' factor.

    Args:
        a: [m, k] bf16, E2M1 elements times E4M3 scales.
        b: [n, k], the same.
    """
    groups = [group.t().contiguous() for group in torch.split(b.double(), GROUP, 1)]
    parts = []
    for rows in _split(a.double()):
        total = rows.new_zeros(len(rows), len(b))
        for left, right in zip(torch.split(rows, GROUP, 1), groups, strict=True):
            total = add_toward_zero(total, (left @ right).float().double())
        parts.append(total.float())
    return torch.cat(parts)


def add_toward_zero(a: Tensor, b: Tensor) -> Tensor:
    """Add fp32 numbers held in fp64, and round the exact sum toward zero to fp32.

    Both are multiples of 2^-20, or zero, Inf or NaN, so that no sum is subnormal.
    """
    total = a + b
    bits = total.view(torch.int64) & -_PLACE
    if not bool((total.abs() < _EXACT).all()):
        # The exact sum may be on the other side of an fp32 number than fp64's sum (TwoSum, Knuth).
        more = total - a
        lost = (a - (total - more)) + (b - more)
        is_over = (bits.view(torch.float64) == total) & (lost * total < 0)
        bits -= is_over.long() * _PLACE
    return bits.view(torch.float64)


SUMS: dict[str, Callable[[Tensor, Tensor, GemmPolicy], Tensor]] = {
    "blackwell": summed_by_blackwell,
    "hopper": summed_by_hopper,
}
"""The models by the name that a GEMM's policy gives them; nothing else reaches them."""
