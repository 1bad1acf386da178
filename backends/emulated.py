"""Exact emulation anywhere: quantise-dequantise to bf16, then an ordinary GEMM with fp32 accumulation.

Quantised values are exact in bf16: E2M1 times a power of two or an E4M3 scale, E4M3 and E5M2 without their
tensor scale. Exceptions are fp16, multiplied in fp32; fp32 scales within a tensor, which multiply sums of 128
products (cpu_kernel.py, on a CPU that multiplies bf16) or else the values; and MXFP8 below 2^-133, which is
rounded. So the only difference from FP4 hardware is how products are added. The remaining scale is applied to
the fp32 accumulator before its only rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends import cpu_build
from ablate.backends.cpu_bf16 import multiplies_bf16
from ablate.backends.cpu_kernel import LARGEST_HADAMARD, BlockScaled, Kernel, supports
from ablate.backends.device import triton_fault
from ablate.backends.packed import quantisers_of
from ablate.backends.protocol import Backend, Draw, Operand, Support
from ablate.backends.triton.policies import refusal
from ablate.numerics.quantiser import Quantized, round_operand, turned

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.numerics.philox import Key
    from ablate.recipes import GemmPolicy, OperandPolicy


class EmulatedBackend(Backend):
    """Quantises with the compiled CPU quantiser or Triton's if available, else plain torch: the same bits."""

    name = "emulated"

    def __init__(self) -> None:
        self.one_read = torch.cuda.is_available() and triton_fault() is None

    @staticmethod
    def _kernel(x: Tensor, *dtypes: torch.dtype) -> Kernel | None:
        """Return the compiled CPU quantiser, or None: it is missing, or does not take this matrix."""
        if x.device.type != "cpu" or x.dtype not in dtypes or not x.numel():
            return None
        return cpu_build.loaded()[0]

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Support every GEMM: emulated, but native on a GPU without quantised operands (its bf16 GEMM)."""
        if device.kind != "cpu" and gemm.is_untouched:
            return Support(mode="native", detail="bf16 GEMM")
        if device.kind == "cpu":
            with_what = "bf16" if multiplies_bf16() else "fp32 (this CPU has no bf16)"
            return Support(
                mode="emulated",
                detail=f"{with_what} GEMM of dequantised values on the CPU",
            )
        detail = f"bf16 GEMM of dequantised values, quantised by {quantisers_of(gemm)}"
        return Support(mode="emulated", detail=detail)

    def detail(self) -> str:
        """Name what quantises for the run's record: Triton, the CPU quantiser, or plain torch and why."""
        if torch.cuda.is_available():
            fault = triton_fault()
            if fault is None:
                return "Triton quantiser"
            return f"plain torch: {fault}"
        kernel, reason = cpu_build.loaded()
        if kernel is None:
            return f"plain torch: {reason}"
        return f"CPU quantiser {reason}"

    def quantize(self, x: Tensor, draw: Draw, *, axis: int) -> Quantized | BlockScaled:
        """Quantise with the bits of ``round_operand``."""
        policy = draw.policy
        if supports(policy) and (
            kernel := self._kernel(x, torch.bfloat16, torch.float32)
        ):
            return kernel.quantize(x, draw, axis=axis)
        if _triton_takes(x, draw):
            from ablate.backends.triton.launch import quantise_values

            return quantise_values(x, {axis % 2: draw})[axis % 2]
        return round_operand(x, policy, axis=axis, key=draw.key, amax=draw.amax_number)

    def quantize_both(
        self, x: Tensor, rows: Draw, columns: Draw
    ) -> tuple[Operand, Operand]:
        """Quantise along both axes, in one launch if Triton supports both policies."""
        if _triton_takes(x, rows) and _triton_takes(x, columns):
            from ablate.backends.triton.launch import quantise_values

            quantized = quantise_values(x, {1: rows, 0: columns})
            return quantized[1], quantized[0]
        return super().quantize_both(x, rows, columns)

    def quantize_again(self, done: Operand, draw: Draw, *, axis: int) -> Operand:
        """Quantise a quantised operand, with the bits of ``round_operand`` of its dequantised values."""
        if (
            isinstance(done, Quantized)
            and isinstance(done.descale, float)
            and supports(draw.policy)
        ):
            kernel = self._kernel(done.values, torch.bfloat16)
            if kernel is not None:
                return kernel.quantize(
                    done.values, draw, axis=axis, factor=done.descale
                )
        return super().quantize_again(done, draw, axis=axis)

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Sum in fp32. Multiply in bf16, but in fp32 what bf16 cannot hold, or on a CPU without bf16."""
        if isinstance(a, BlockScaled) and isinstance(b, BlockScaled):
            kernel = self._kernel(a.elements, torch.bfloat16)
            product = None if kernel is None else kernel.multiply(a, b)
            if product is not None:
                return product
        left = turned(a.values, a.axis)
        right = turned(b.values, b.axis).t()
        alpha = a.descale * b.descale
        is_bf16 = left.dtype == right.dtype == torch.bfloat16
        if not is_bf16 or (left.device.type == "cpu" and not multiplies_bf16()):
            product = left.float() @ right.float()
            if isinstance(alpha, Tensor) or alpha != 1.0:
                product.mul_(alpha)
            return product.to(torch.bfloat16)
        if isinstance(alpha, Tensor):  # on the device: reading its value would wait
            return (torch.mm(left, right, out_dtype=torch.float32) * alpha).to(
                torch.bfloat16
            )
        if alpha == 1.0:
            return left @ right
        # beta = 0: its content is not read
        unused = left.new_empty(left.shape[0], right.shape[1])
        return torch.addmm(unused, left, right, beta=0, alpha=alpha)

    def gradient_through(
        self,
        grad: Tensor,
        policy: OperandPolicy,
        *,
        key: Key | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Use the compiled CPU kernel if available, else plain torch: the same bits."""
        if policy.hadamard <= LARGEST_HADAMARD and (
            kernel := self._kernel(grad, torch.bfloat16)
        ):
            return kernel.gradient_through(grad, policy, key=key, mask=mask)
        return super().gradient_through(grad, policy, key=key, mask=mask)


def _triton_takes(x: Tensor, draw: Draw) -> bool:
    """Whether Triton's kernel quantises this matrix by this policy."""
    return (
        x.device.type == "cuda"
        and triton_fault() is None
        and refusal(draw.policy) is None
    )
