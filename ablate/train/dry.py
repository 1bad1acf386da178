"""A run without memory or arithmetic: one forward and backward pass of the model on torch's meta device.

It takes seconds and some hundred megabytes for a model of any size, and uses the same layers, custom
operators and recipe as training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ablate.backends.select import Selection
from ablate.layers.linear import quantised_layers
from ablate.layers.state import RecipeState
from ablate.models.network import build_network

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
        ValueError: the features of a layer do not fit its recipe.
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
