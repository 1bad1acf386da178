"""Operand policies: how each of the six operands of a linear layer's three GEMMs is rounded.

Plain frozen data without torch, so that planning stays fast. Words and shapes (M = tokens):

=====  ==================  ======================  =======================  ============
GEMM   result              left operand            right operand            contracts over
=====  ==================  ======================  =======================  ============
Fprop  y[M,N]  = x wᵀ      x[M,K], blocks along K  w[N,K], blocks along K   in-features K
Dgrad  dx[M,K] = dy w      dy[M,N], along N        w[N,K], along N          out-features N
Wgrad  dw[N,K] = dyᵀ x     dy[M,N], along M        x[M,K], along M          tokens M
=====  ==================  ======================  =======================  ============

Block axis = Hadamard axis = contraction axis, so each tensor is quantised twice, from high precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
Format = Literal["bf16", "fp8_e4m3", "fp8_e5m2", "mxfp4"]

MX_BLOCK = 32
"""Elements that share one E8M0 scale (OCP MX v1.0)."""

_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class OperandPolicy:
    """One operand of one GEMM.

    ``rounding``: ``nearest`` is nearest, ties to even code; ``stochastic`` rounds up with the probability
    that makes it unbiased. ``prescale`` multiplies the values after the block's exponent was taken, so that
    nothing clips (3/4: Tseng et al. 2502.20586, algorithm 2); the GEMM divides it out once, in fp32.
    ``hadamard`` is the group size of the Walsh–Hadamard rotation along the contraction axis, 0 for none;
    ``signs`` are the random ±1 applied *before* it: ``none`` (deterministic) or ``step`` (new every step).
    """

    format: Format = "bf16"
    scale: Literal["none", "tensor", "floor"] = "none"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    prescale: float = 1.0
    hadamard: Literal[0, 16, 32] = 0
    signs: Literal["none", "step"] = "none"


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GemmPolicy:
    """The two operands of one GEMM, in the order of the table above."""

    left: OperandPolicy = OperandPolicy()
    right: OperandPolicy = OperandPolicy()


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class Recipe:
    """The policies of all six operands of every linear layer inside the blocks."""

    fprop: GemmPolicy = GemmPolicy()
    dgrad: GemmPolicy = GemmPolicy()
    wgrad: GemmPolicy = GemmPolicy()

    def gemm(self, name: Gemm) -> GemmPolicy:
        """Return the policy of one GEMM."""
        policy: GemmPolicy = getattr(self, name)
        return policy

    def operands(self) -> Iterator[tuple[Gemm, str, OperandPolicy]]:
        """Yield (GEMM, operand's name, policy) for all six operands."""
        names = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
        for gemm in GEMMS:
            policy = self.gemm(gemm)
            yield gemm, names[gemm][0], policy.left
            yield gemm, names[gemm][1], policy.right


def group_size(policy: OperandPolicy) -> int:
    """Return the number that must divide the contraction dimension under this policy."""
    block = MX_BLOCK if policy.format == "mxfp4" else 1
    return max(block, policy.hadamard)  # both are powers of two
