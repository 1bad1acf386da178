"""The interface of a back end: it states its support, quantises an operand by a policy, and multiplies two.

Back ends may differ only in speed, in how they add products, and in the rounding of the output. The
quantised values equal those of ``ablate.numerics.round_operand`` bit for bit. ``ablate.backends.testing``
checks this for every back end. A user registers one by an entry point of the group ``ablate.backends`` that
names a subclass of ``Backend``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ablate.numerics.quantiser import turned
from ablate.numerics.rotate import unrotate

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.numerics.philox import Key
    from ablate.recipes import GemmPolicy, OperandPolicy

Mode = Literal["native", "upcast", "emulated", "reference", "no"]
"""native: the device's own instruction for this format. upcast: the device widens packed codes to bf16 and
multiplies. emulated: dequantised values in a bf16 GEMM. reference: plain and slow. no: unsupported."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """A back end's support for one GEMM on one device, with one line of detail or the reason against it."""

    mode: Mode
    detail: str


class Operand(Protocol):
    """A quantised operand. Only the back end that made it knows more about it."""

    @property
    def values(self) -> Tensor:
        """The stored matrix, dequantised, without ``descale``."""

    @property
    def descale(self) -> float | Tensor:
        """The factor still to apply to the accumulator."""

    @property
    def mask(self) -> Tensor | None:
        """True where a value did not clip, if the policy asks for it."""

    @property
    def axis(self) -> int:
        """The contraction axis of the stored matrix."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The inputs of one quantisation: the policy, the random stream, and the amax of a delayed scale.

    ``amax`` is a number, or fp32 of one element on the matrix's device.
    ``position``: step and call (int64 [2], on the matrix's device), which Triton's kernels read in place of
    the key's, so that a CUDA graph draws anew each time it is replayed. Other quantisers take the key's.
    """

    policy: OperandPolicy
    key: Key | None = None
    amax: float | Tensor | None = None
    position: Tensor | None = None

    @property
    def amax_number(self) -> float | None:
        """``amax`` as a number; this waits for the device on which it lies."""
        if isinstance(self.amax, Tensor):
            return self.amax.item()
        return self.amax


def dequantised(operand: Operand) -> Tensor:
    """Return the stored matrix dequantised, with every factor applied, still rotated.

    It is fp32, or ``values`` itself if the factor is 1.
    """
    descale = operand.descale
    if isinstance(descale, float) and descale == 1.0:
        return operand.values
    if isinstance(descale, Tensor) and descale.numel() != 1:  # one per row of [n, k]
        descale = turned(descale[:, None], operand.axis)
    return operand.values.to(torch.float32, copy=True).mul_(descale)


class Backend(ABC):
    """One way to run quantised GEMMs."""

    name: ClassVar[str]
    one_read: bool = False
    """Whether ``quantize_both`` reads its matrix only once."""

    @abstractmethod
    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Say how this back end supports a GEMM on a device, which may be absent and is not touched."""

    @abstractmethod
    def detail(self) -> str:
        """Return one line for the run's record: the library or kernel, with versions."""

    @abstractmethod
    def quantize(self, x: Tensor, draw: Draw, *, axis: int) -> Operand:
        """Quantise a matrix [rows, columns] along its contraction axis.

        Raises:
            ValueError: a dtype, shape or missing key that the policy cannot take.
        """

    def quantize_again(self, done: Operand, draw: Draw, *, axis: int) -> Operand:
        """Quantise the values of a quantised operand, every factor applied ("double quantisation").

        Source ``forward_bf16`` rounds them to bf16 first.
        """
        values = dequantised(done)
        if draw.policy.source == "forward_bf16":
            values = values.to(torch.bfloat16)
        return self.quantize(values, draw, axis=axis)

    def quantize_both(
        self, x: Tensor, rows: Draw, columns: Draw
    ) -> tuple[Operand, Operand]:
        """Quantise one matrix along axis 1 by ``rows``, and along axis 0 by ``columns``.

        For a matrix that two GEMMs need, such as dy. Some back ends read it only once.
        """
        return self.quantize(x, rows, axis=1), self.quantize(x, columns, axis=0)

    @abstractmethod
    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Return A Bᵀ [m, n] in bf16 for operands A [m, k] and B [n, k], contraction last.

        The device accumulates in fp32, in its own order, rounding and width. ``descale`` multiplies the
        accumulator, and the result is rounded once. Values that are not exact in bf16 are multiplied in fp32:
        fp16, and values with fp32 scales within a tensor. Such scales may instead multiply sums of 128
        products of elements.
        """

    def gradient_through(
        self,
        grad: Tensor,
        policy: OperandPolicy,
        *,
        key: Key | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Take a gradient in bf16 back through a forward operand's mask and its rotation of the last axis.

        Args:
            grad: [rows, K], in the basis that ``policy`` rotates to.
            policy: the operand's; reads hadamard, signs and permute.
            key: the operand's; None if its policy draws nothing.
            mask: bool [rows, K], false where the gradient is zero.
        """
        if mask is not None:
            grad = grad * mask
        if policy.hadamard:
            grad = unrotate(grad.to(torch.float32), policy, key).to(torch.bfloat16)
        return grad
