"""One linear layer on one step: the operands of its three GEMMs, and each GEMM's distance from exact.

The exact product is that of the same bf16 tensors in fp32: the layer's bf16 product without the rounding of
its output. A GEMM's own output is rounded to bf16 once, as in training, which alone is a relative error of
about 0.2 %. GEMMs with both operands in high precision are left out, because nothing in them is quantised.

Draws of the recipe's randomness come from streams that training never reads (``Position.redrawn``).
Values that the recipe draws once for the whole run (signs per layer, or one fixed vector) stay the same as
in training, and their effect counts as bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.diagnose.noise import data_noise
from ablate.diagnose.operand import OperandFigures, operand_figures
from ablate.diagnose.product import ProductFigures, product_figures
from ablate.layers.linear import dequantised, product
from ablate.numerics.quantiser import on_grid
from ablate.recipes import GEMMS, OPERANDS
from ablate.recipes.policy import contracted_axis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.diagnose.noise import DataNoise
    from ablate.layers.linear import QuantLinear
    from ablate.layers.state import Position
    from ablate.recipes import Gemm, OperandPolicy

_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Tapped:
    """The tensors that a layer multiplied: dy [M, N], x [M, K] and the weight [N, K] in bf16.

    ``sequences``: the number of consecutive sequences in the M rows; None if rows are no whole sequences.
    """

    layer: QuantLinear
    at: Position
    dy: Tensor
    x: Tensor
    weight: Tensor
    sequences: int | None = None


@dataclass(frozen=True, kw_only=True)
class GemmDiagnosis:
    """One GEMM of one layer. Only Wgrad has ``data_noise``."""

    layer: str
    gemm: Gemm
    product: ProductFigures
    operands: dict[str, OperandFigures]
    data_noise: DataNoise | None = None


@torch.no_grad()
def diagnose_layer(tapped: Tapped, *, draws: int) -> Iterator[GemmDiagnosis]:
    """Yield the diagnosis of each quantised GEMM of a layer.

    Args:
        tapped: the tensors that the layer multiplied.
        draws: number of draws of the recipe's randomness, at least 2; a deterministic GEMM uses one.
    """
    layer, at = tapped.layer, tapped.at
    recipe = layer.recipe_at(at.tokens)
    for gemm in GEMMS:
        policy = recipe.gemm(gemm)
        if policy.is_untouched:
            continue
        noise = None
        if gemm == "wgrad":
            exact, noise = _exact_weight_gradient(tapped)
        else:
            exact = _exact(tapped, gemm)
        count = draws if is_random(layer, gemm, at) else 1
        outputs = (
            product(layer, gemm, at.redrawn(draw), dy=tapped.dy, x=tapped.x, weight=tapped.weight)
            for draw in range(1, count + 1)
        )
        yield GemmDiagnosis(
            layer=layer.name,
            gemm=gemm,
            product=product_figures(exact, outputs, per_token=gemm != "wgrad"),
            operands={
                name: _operand(tapped, gemm, name, one)
                for name, one in zip(OPERANDS[gemm], (policy.left, policy.right), strict=True)
                if not one.is_high_precision
            },
            data_noise=noise,
        )


def is_random(layer: QuantLinear, gemm: Gemm, at: Position) -> bool:
    """Whether two draws of a GEMM may differ, also through operands from the forward pass."""
    recipe = layer.recipe_at(at.tokens)
    policies = [recipe.gemm(gemm).left, recipe.gemm(gemm).right]
    if any(policy.source == "forward" for policy in policies):
        policies += [recipe.fprop.left, recipe.fprop.right]
    return any(
        policy.rounding != "nearest" or policy.signs in ("step", "call") or policy.scale == "ms_eden"
        for policy in policies
    )


def _exact(tapped: Tapped, gemm: Gemm) -> Tensor:
    w = tapped.weight.to(torch.float32)
    if gemm == "fprop":
        return tapped.x.to(torch.float32) @ w.t()
    return tapped.dy.to(torch.float32) @ w


def _exact_weight_gradient(tapped: Tapped) -> tuple[Tensor, DataNoise | None]:
    """Return the exact dw, and its data noise."""
    dy, x = tapped.dy.to(torch.float32), tapped.x.to(torch.float32)
    sequences = tapped.sequences or 1
    parts = next(count for count in (_PARTS, 2, 1) if sequences % count == 0)
    rows = len(x) // parts
    exact = dy[:rows].t() @ x[:rows]
    energies = [float(exact.square().sum().item())]
    for part in range(1, parts):
        own = slice(part * rows, (part + 1) * rows)
        piece = dy[own].t() @ x[own]
        energies.append(float(piece.square().sum().item()))
        exact += piece
    return exact, data_noise(energies, float(exact.square().sum().item()), sequences)


def _operand(tapped: Tapped, gemm: Gemm, name: str, policy: OperandPolicy) -> OperandFigures:
    layer, at = tapped.layer, tapped.at.redrawn(1)
    axis = contracted_axis(gemm, name)
    stored = {"x": tapped.x, "dy": tapped.dy, "w": tapped.weight}[name]
    if policy.source == "forward":  # measure only this second quantisation
        stored = dequantised(layer.operand(stored, "fprop", name, at))
    draw = layer.draw(stored, gemm, name, at)
    grid = on_grid(stored, draw.policy, axis=axis, key=draw.key, amax=draw.amax)
    quantised = dequantised(layer.operand(stored, gemm, name, at)).to(torch.float32)
    last = stored.to(torch.float32)
    if axis == 0:
        quantised, last = quantised.t(), last.t()
    return operand_figures(grid, quantised, last, channels=1 if axis == 1 else 0)
