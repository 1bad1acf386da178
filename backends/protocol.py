"""What a back end is: it quantises an operand by a policy and multiplies two quantised operands.

Back ends may differ in speed, accumulation order and the rounding of the output, in nothing else: the
quantised values are those of ``ablate.numerics.round_operand``, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from ablate.numerics import Key, OperandPolicy, Quantized

Mode = Literal["native", "upcast", "emulated", "reference"]


class Backend(ABC):
    """One way to run quantised GEMMs."""

    name: str
    mode: Mode

    @abstractmethod
    def detail(self) -> str:
        """Return one line for the run's record: what does the work on this machine."""

    @abstractmethod
    def quantize(
        self, x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None, amax: float | None = None
    ) -> Quantized:
        """Quantise a matrix [rows, columns] along its contraction axis; ``amax`` is for delayed scales.

        Raises:
            ValueError: a dtype, shape or missing key that the policy cannot take.
        """

    @abstractmethod
    def multiply(self, a: Quantized, b: Quantized, *, a_t: bool = False, b_t: bool = False) -> Tensor:
        """Return (aᵀ or a) @ (bᵀ or b) in bf16: accumulated in fp32, descaled there, rounded once.

        Values that bf16 could not hold (fp16; fp32 scales within a tensor) are multiplied in fp32.
        """
