"""The bit reference: plain torch and fp32 GEMMs. Slow, short, and easy to verify by reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.protocol import Backend, Draw, Operand, Support
from ablate.numerics.quantiser import Quantized, round_operand, turned

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy


class ReferenceBackend(Backend):
    """Every rule exactly as in ``ablate.numerics``."""

    name = "reference"

    def support(self, gemm: GemmPolicy, device: Device) -> Support:  # noqa: ARG002  it does everything anywhere
        """Support every GEMM, slowly."""
        return Support(mode="reference", detail=self.detail())

    def detail(self) -> str:
        """Say for the run's record that this is plain torch."""
        return "plain torch, fp32 GEMMs"

    def quantize(self, x: Tensor, draw: Draw, *, axis: int) -> Quantized:
        """Quantise by the rules of ``ablate.numerics``."""
        return round_operand(
            x, draw.policy, axis=axis, key=draw.key, amax=draw.amax_number
        )

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply in fp32, where every product of two operands is exact."""
        product = (
            turned(a.values, a.axis).float() @ turned(b.values, b.axis).float().t()
        )
        return (product * (a.descale * b.descale)).to(torch.bfloat16)
