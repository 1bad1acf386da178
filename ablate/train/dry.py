"""A run without memory or arithmetic: one forward and backward pass of the model on torch's meta device.

It takes seconds and some hundred megabytes for a model of any size, and uses the same layers, custom
operators and recipe as training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ablate.backends.select import Selection
from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.layers.state import RecipeState
from ablate.models.network import build_network
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import check_operand
from ablate.recipes.policy import STORED, contracted_axis

if TYPE_CHECKING:
    from ablate.run.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The size of a dry run: parameters, linear layers, and tokens of one forward pass."""

    parameters: int
    linear_layers: int
    tokens: int


def dry_run(config: RunConfig, devices: int = 1) -> DryRun:
    """Build a run's model and pass one device's micro-batch forward and backward, with shapes only.

    Raises:
        ValueError: an operand of a layer does not fit its policy.
    """
    settings = config.training
    sequences = settings.micro_batch_size or settings.batch_size // devices
    state = RecipeState(
        recipe=config.recipe, backend=Selection("emulated"), seed=config.seed, total_tokens=settings.tokens
    )
    with torch.device("meta"):
        network = build_network(config, state, initial_seed=0)
        model = network.module
        layers = quantised_layers(model)
        for layer in layers.values():
            layer.register_forward_pre_hook(_check_operands)
        tokens = torch.zeros(sequences, settings.seq_len, dtype=torch.long)
        network.loss(model, tokens, tokens, "mean")[0].backward()  # type: ignore[no-untyped-call]
    wrong = [name for name, p in model.named_parameters() if p.grad is None or p.grad.shape != p.shape]
    if wrong:
        raise ValueError(f"no gradient of its shape for {wrong[0]}")
    return DryRun(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_layers=len(layers),
        tokens=tokens.numel(),
    )


def _check_operands(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Check a layer's six operands against their policies in every phase, because meta runs no quantiser."""
    assert isinstance(layer, QuantLinear)
    (x,) = inputs
    sizes = {"M": x.numel() // layer.in_features, "N": layer.out_features, "K": layer.in_features}
    for _, recipe in layer.state.phases(layer.place):
        for gemm, operand, policy in recipe.operands():
            shape = [sizes[letter] for letter in STORED[operand]]
            values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            key = Key(seed=0, layer=layer.name, gemm=gemm, operand=operand, step=0)
            try:
                check_operand(values, policy, contracted_axis(gemm, operand), key)
            except ValueError as error:
                raise ValueError(f"{gemm.capitalize()}'s {operand} of {layer.name}: {error}") from None
