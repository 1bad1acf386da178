"""Exact emulation anywhere: quantise-dequantise to bf16, then an ordinary bf16 GEMM with fp32 accumulation.

Quantised values are exact in bf16: E2M1 times a power of two or an E4M3 scale, E4M3 and E5M2 without their
tensor scale. Only fp16 and fp32 scales within a tensor are not, and are multiplied in fp32. So the one
difference from FP4 hardware is the order of accumulation. The scale that is left is applied to the fp32
accumulator through the GEMM's alpha, before its one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ablate.backends import cpu_kernel
from ablate.backends.protocol import Backend, Mode
from ablate.numerics import Key, OperandPolicy, Quantized, round_operand


class EmulatedBackend(Backend):
    """The compiled CPU quantiser where it can be used, plain torch elsewhere, with the same bits."""

    name = "emulated"
    mode: Mode = "emulated"

    def detail(self) -> str:
        """Return one line for the run's record."""
        kernel = cpu_kernel.availability()
        return f"CPU quantiser {kernel.reason}" if kernel.usable else f"plain torch: {kernel.reason}"

    def quantize(
        self, x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None, amax: float | None = None
    ) -> Quantized:
        """Quantise with the bits of ``round_operand``."""
        if cpu_kernel.takes(x, policy):
            return cpu_kernel.compiled_round_operand(x, policy, axis=axis, key=key, amax=amax)
        return round_operand(x, policy, axis=axis, key=key, amax=amax)

    def multiply(self, a: Quantized, b: Quantized, *, a_t: bool = False, b_t: bool = False) -> Tensor:
        """Multiply in bf16 with fp32 accumulation; in fp32 what bf16 could not hold."""
        left = a.values.t() if a_t else a.values
        right = b.values.t() if b_t else b.values
        alpha = a.descale * b.descale
        if left.dtype != torch.bfloat16 or right.dtype != torch.bfloat16:
            return ((left.float() @ right.float()) * alpha).to(torch.bfloat16)
        if alpha == 1.0:
            return left @ right
        unused = left.new_empty(left.shape[0], right.shape[1])  # beta = 0: its content is not read
        return torch.addmm(unused, left, right, beta=0, alpha=alpha)
