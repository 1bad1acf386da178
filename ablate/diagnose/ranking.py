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

from ablate.diagnose.measure import energy_of, ratio
from ablate.diagnose.recorder import Tapped, diagnose_gemm, draws_of, tapped_copy
from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.recipes import Gemm, LayerRecipe
from ablate.train.step import Trainee, gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ablate.layers.state import Position


@dataclass(frozen=True, kw_only=True)
class Harm:
    """One GEMM of one layer, quantised alone.

    ``harm``: energy of the gradient's error that is the same in every draw, over ‖g‖²; ``random``: the energy
    that differs between draws, over ‖g‖². ``loss_change``: mean, nats per token; 0 for Dgrad and Wgrad.
    ``diagnosis``: the error of the GEMM's own output (see ``diagnose_gemm``).
    """

    layer: str
    gemm: Gemm
    draws: int
    harm: float | None
    random: float | None
    loss_change: float
    diagnosis: dict[str, Any]


def layer_gemms(
    trainee: Trainee, names: Sequence[str], *, draws: int
) -> list[tuple[QuantLinear, Gemm, int]]:
    """List the layer, the GEMM and the number of passes to measure, in the order of ``names``.

    ``draws``: passes for each random GEMM; a deterministic one needs one pass.
    """
    layers = quantised_layers(trainee.module)
    gemms = []
    for name in names:
        layer = layers[name]
        recipe = layer.recipe_at(trainee.state.tokens)
        for gemm, passes in draws_of(recipe, draws).items():
            gemms.append((layer, gemm, passes))
    return gemms


def predict_harm(
    trainee: Trainee,
    window: NDArray[Any],
    gemms: Sequence[tuple[QuantLinear, Gemm, int]],
    *,
    done: Callable[[int], None],
) -> list[Harm]:
    """Measure the harm of each GEMM; the largest comes first.

    Args:
        trainee: model and recipe, which are left as they were.
        window: tokens [sequences, seq_len + 1].
        gemms: what to measure, see ``layer_gemms``.
        done: called with the number of passes since the last call.

    Raises:
        ValueError: an operand that its policy cannot take.
    """
    module = trainee.module
    layers = quantised_layers(module)
    is_training = module.training
    recipes = {}
    for name, layer in layers.items():
        recipes[name] = layer.recipe_at(trainee.state.tokens)
        layer.override = LayerRecipe()
    module.eval()  # without dropout, which would add an error
    exact_loss, exact, tapped = _exact_gradients(trainee, window)
    energy = sum(map(energy_of, exact.values()))
    done(1)
    harms = []
    for layer, gemm, draws in gemms:
        layer.override = _alone(gemm, recipes[layer.name])
        loss, bias, variance = _gradient_error(trainee, window, exact, draws, done)
        harms.append(
            Harm(
                layer=layer.name,
                gemm=gemm,
                draws=draws,
                harm=ratio(bias, energy),
                random=ratio(variance, energy),
                loss_change=loss - exact_loss,
                diagnosis=diagnose_gemm(tapped[layer.name], gemm, draws=draws),
            )
        )
        layer.override = LayerRecipe()
    for layer in layers.values():
        layer.override = None
    module.zero_grad(set_to_none=True)
    module.train(is_training)
    return sorted(
        harms,
        key=lambda harm: -math.inf if harm.harm is None else harm.harm,
        reverse=True,
    )


def _exact_gradients(
    trainee: Trainee, window: NDArray[Any]
) -> tuple[float, dict[str, Tensor], dict[str, Tapped]]:
    """Return loss and gradients without quantisation, and copies of what each layer multiplies."""
    layers = quantised_layers(trainee.module)
    tapped: dict[str, Tapped] = {}

    def tap(name: str, at: Position, *tensors: Tensor) -> None:
        if name not in tapped:
            seq_len = trainee.settings.seq_len
            tapped[name] = tapped_copy(layers[name], at, *tensors, seq_len=seq_len)

    trainee.state.tap = tap
    loss, _ = gradients(trainee, window)
    trainee.state.tap = None
    exact = {}
    for name, parameter in trainee.module.named_parameters():
        if parameter.grad is not None:
            exact[name] = parameter.grad.detach().clone()
    return loss, exact, tapped


def _alone(gemm: Gemm, recipe: LayerRecipe) -> LayerRecipe:
    """Leave one GEMM of the recipe quantised."""
    policy = recipe.gemm(gemm)
    quantised = {gemm: policy}
    # then its operand is Fprop's
    if "forward" in (policy.left.source, policy.right.source):
        quantised["fprop"] = recipe.fprop
    return LayerRecipe(**quantised)


def _gradient_error(
    trainee: Trainee,
    window: NDArray[Any],
    exact: Mapping[str, Tensor],
    draws: int,
    done: Callable[[int], None],
) -> tuple[float, float, float]:
    """Compute gradients with ``draws`` draws of the randomness, each against the exact ones.

    Returns the mean loss; the energy of the error that is the same in every draw; and the energy that differs
    between draws.
    """
    module = trainee.module
    state = trainee.state
    first_step = state.step
    summed_errors: dict[str, Tensor] = {}
    total = 0.0
    loss = 0.0
    for draw in range(draws):
        state.step = first_step + draw
        module.zero_grad(set_to_none=True)
        loss += gradients(trainee, window)[0] / draws
        energy = 0.0
        for name, parameter in module.named_parameters():
            if parameter.grad is None or name not in exact:
                continue
            error = parameter.grad.float() - exact[name].float()
            energy += energy_of(error)
            summed_errors[name] = error + summed_errors.get(name, 0)
        total += energy / draws
        done(1)
    state.step = first_step
    if draws == 1:
        return loss, total, 0.0
    common = sum(map(energy_of, summed_errors.values())) / draws**2
    variance = (total - common) * draws / (draws - 1)
    return loss, total - variance, variance
