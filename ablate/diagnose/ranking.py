"""The change of the model's gradient when one layer's GEMM alone is quantised, and its repeatable part.

For one layer and one GEMM at a time: forward and backward with everything else in bf16, over a few draws of
the recipe's randomness. The gradient of all parameters is compared with bf16's on the same tokens, so that
an error counts by its effect on the weights, through all layers above and below. The *predicted harm* is the
error energy that is the same in every draw, over the gradient's energy ‖g‖². It adds up from step to step;
the part that differs between draws averages out like the noise of the data.

It is a prediction, not a result: it describes one state of the weights and each GEMM alone, and together
GEMMs may do more or less harm. It includes bf16's own rounding, amplified through the layers: very small
figures mean nothing. A GEMM that quantises the forward pass's operand ("double quantisation") includes Fprop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.diagnose.measure import ratio
from ablate.diagnose.recorder import GemmDiagnosis, Tapped, diagnose_layer, is_random, tapped_copy
from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.layers.state import Position
from ablate.recipes import GEMMS, LayerRecipe
from ablate.train.loop import gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from ablate.recipes import Gemm
    from ablate.train.loop import Trainee


@dataclass(frozen=True, kw_only=True)
class Harm:
    """One GEMM of one layer, quantised alone.

    ``harm``: energy of the gradient's error that is the same in every draw, over ‖g‖²; ``random``: the energy
    that differs between draws, over ‖g‖². ``loss_change``: mean, nats per token; 0 for Dgrad and Wgrad.
    ``diagnosis``: the error of the GEMM's own output (see ``GemmDiagnosis``).
    """

    layer: str
    gemm: Gemm
    draws: int
    harm: float | None
    random: float | None
    loss_change: float
    diagnosis: GemmDiagnosis


@dataclass(frozen=True, kw_only=True)
class LayerGemm:
    """A layer, one of its quantised GEMMs, and the number of passes to measure it."""

    layer: QuantLinear
    gemm: Gemm
    draws: int


def layer_gemms(trainee: Trainee, names: Sequence[str], *, draws: int) -> list[LayerGemm]:
    """List the GEMMs to measure in the named layers, in the order of ``names``.

    ``draws``: passes for each random GEMM; a deterministic one needs one pass.
    """
    layers = quantised_layers(trainee.network.module)
    found = []
    for name in names:
        layer = layers[name]
        at = Position(step=trainee.state.step, call=0, tokens=trainee.state.tokens)
        for gemm in GEMMS:
            if not layer.recipe_at(at.tokens).gemm(gemm).is_untouched:
                count = draws if is_random(layer, gemm, at) else 1
                found.append(LayerGemm(layer=layer, gemm=gemm, draws=count))
    return found


def predict_harm(
    trainee: Trainee,
    window: np.ndarray[Any, Any],
    gemms: Sequence[LayerGemm],
    *,
    draws: int,
    done: Callable[[int], None] = lambda _: None,
) -> list[Harm]:
    """Measure the harm of each GEMM; the largest comes first.

    Args:
        trainee: model and recipe; its weights are not changed, and its model stays in evaluation mode.
        window: tokens [sequences, seq_len + 1].
        gemms: the GEMMs to measure.
        draws: number of draws of the recipe's randomness for the error of each GEMM's own output.
        done: called with the number of passes since the last call.

    Raises:
        ValueError: an operand that its policy cannot take.
    """
    module = trainee.network.module
    module.eval()  # without dropout, which would add an error
    tapped: dict[str, Tapped] = {}

    def tap(name: str, at: Position, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        if name not in tapped:
            tapped[name] = tapped_copy(layers[name], at, dy, x, weight, seq_len=trainee.settings.seq_len)

    high = LayerRecipe()
    own = {each.layer.name: each.layer.recipe_at(trainee.state.tokens) for each in gemms}
    layers = quantised_layers(module)
    for layer in layers.values():
        layer.override = high
    trainee.state.tap = tap
    exact_loss, _ = gradients(trainee, window, None)
    trainee.state.tap = None
    exact = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    energy = sum(float(g.float().square().sum().item()) for g in exact.values())
    done(1)
    found = []
    first_step = trainee.state.step
    for each in gemms:
        recipe = own[each.layer.name]
        policy = recipe.gemm(each.gemm)
        doubly = "forward" in (policy.left.source, policy.right.source)  # then its operand is Fprop's
        quantised = {each.gemm: policy} | ({"fprop": recipe.fprop} if doubly else {})
        each.layer.override = LayerRecipe(**quantised)
        sums: dict[str, Tensor] = {}
        total, loss = 0.0, 0.0
        for draw in range(each.draws):
            trainee.state.step = first_step + draw
            module.zero_grad(set_to_none=True)
            loss += gradients(trainee, window, None)[0] / each.draws
            squares = 0.0
            for name, parameter in module.named_parameters():
                if parameter.grad is not None and name in exact:
                    error = parameter.grad.float() - exact[name].float()
                    squares += float(error.square().sum().item())
                    sums[name] = sums[name].add_(error) if name in sums else error
            total += squares / each.draws
            done(1)
        trainee.state.step = first_step
        bias, variance = total, 0.0
        if each.draws > 1:
            common = sum(float(s.square().sum().item()) for s in sums.values()) / each.draws**2
            variance = (total - common) * each.draws / (each.draws - 1)
            bias = total - variance
        diagnoses = diagnose_layer(tapped[each.layer.name], draws=draws)
        one = next(one for one in diagnoses if one.gemm == each.gemm)
        each.layer.override = high
        found.append(
            Harm(
                layer=one.layer, gemm=one.gemm, draws=each.draws, diagnosis=one,
                harm=ratio(bias, energy), random=ratio(variance, energy), loss_change=loss - exact_loss,
            )
        )  # fmt: skip
    for layer in layers.values():
        layer.override = None
    module.zero_grad(set_to_none=True)
    return sorted(found, key=lambda one: -math.inf if one.harm is None else one.harm, reverse=True)
