"""The quantised linear layer: three GEMMs, each with its two operands rounded along its own contraction.

Fprop y = x wᵀ, Dgrad dx = dy w, Wgrad dw = dyᵀ x. Each of x, w and dy is needed along two axes and is
quantised twice, from high precision (bf16), never once and transposed. The gradient goes straight through
the quantisers, without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ablate.numerics.philox import Key

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend
    from ablate.recipes import Gemm, OperandPolicy, Recipe


@dataclass(kw_only=True)
class RecipeState:
    """What the layers of one model share and the trainer moves on: where the random streams stand.

    ``step`` counts optimizer steps, ``call`` the forward passes within one (gradient accumulation).
    """

    recipe: Recipe
    backend: Backend
    seed: int
    step: int = 0
    call: int = 0

    def key(self, layer: str, gemm: Gemm, operand: str, policy: OperandPolicy) -> Key | None:
        """Return the key of one operand's random draw, or None where the policy draws nothing."""
        if policy.rounding == "nearest" and policy.signs == "none":
            return None
        return Key(seed=self.seed, layer=layer, gemm=gemm, operand=operand, step=self.step, call=self.call)


class _QuantizedGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: str, state: RecipeState) -> Tensor:
        """X [M, K] bf16, weight [N, K] fp32 or bf16 → y [M, N] bf16."""
        w = weight.to(torch.bfloat16)
        ctx.save_for_backward(x, w)
        # The position of the streams now: by the time of backward the trainer may have moved on.
        ctx.keys = {
            (gemm, name): state.key(layer, gemm, name, policy)
            for gemm, name, policy in state.recipe.operands()
        }
        ctx.state, ctx.weight_dtype = state, weight.dtype
        policy, backend = state.recipe.fprop, state.backend
        return backend.multiply(
            backend.quantize(x, policy.left, axis=1, key=ctx.keys["fprop", "x"]),
            backend.quantize(w, policy.right, axis=1, key=ctx.keys["fprop", "w"]),
            b_t=True,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Dy [M, N] → dx [M, K] bf16, dw [N, K] in the weight's dtype."""
        (dy,) = grads
        x, w = ctx.saved_tensors
        recipe, backend = ctx.state.recipe, ctx.state.backend
        dy = dy.to(torch.bfloat16)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = backend.multiply(
                backend.quantize(dy, recipe.dgrad.left, axis=1, key=ctx.keys["dgrad", "dy"]),
                backend.quantize(w, recipe.dgrad.right, axis=0, key=ctx.keys["dgrad", "w"]),
            )
        if ctx.needs_input_grad[1]:
            dw = backend.multiply(
                backend.quantize(dy, recipe.wgrad.left, axis=0, key=ctx.keys["wgrad", "dy"]),
                backend.quantize(x, recipe.wgrad.right, axis=0, key=ctx.keys["wgrad", "x"]),
                a_t=True,
            ).to(ctx.weight_dtype)
        return dx, dw, None, None


class QuantLinear(nn.Module):
    """A linear layer without bias whose three GEMMs follow a recipe.

    ``name`` keys its random streams: two layers of one model must not share it.
    """

    def __init__(self, in_features: int, out_features: int, *, name: str, state: RecipeState) -> None:
        super().__init__()
        self.name = name
        self.state = state
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return x wᵀ for x [..., in_features], in bf16."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        y: Tensor = _QuantizedGemms.apply(rows, self.weight, self.name, self.state)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)
