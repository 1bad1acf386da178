"""The bit oracle: plain torch and fp32 GEMMs. Slow, short, and right by inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from ablate.backends.protocol import Backend, Mode
from ablate.numerics import Key, OperandPolicy, Quantized, round_operand


class ReferenceBackend(Backend):
    """Every rule as it is written in ``ablate.numerics``."""

    name = "reference"
    mode: Mode = "reference"

    def detail(self) -> str:
        """Return one line for the run's record."""
        return "plain torch, fp32 GEMMs"

    def quantize(
        self, x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None, amax: float | None = None
    ) -> Quantized:
        """Quantise by the written rules."""
        return round_operand(x, policy, axis=axis, key=key, amax=amax)

    def multiply(self, a: Quantized, b: Quantized, *, a_t: bool = False, b_t: bool = False) -> Tensor:
        """Multiply in fp32, where every product of two operands is exact."""
        left = a.values.t() if a_t else a.values
        right = b.values.t() if b_t else b.values
        product = left.float() @ right.float()
        return (product * (a.descale * b.descale)).to(torch.bfloat16)
