"""A run without memory or arithmetic: one forward and backward pass of the model on torch's meta device.

It takes seconds and some hundred megabytes for a model of any size, and uses the same layers, custom
operators and recipe as training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ablate.backends.select import Selection
from ablate.base.errors import UserError
from ablate.layers.linear import quantised_layers
from ablate.layers.state import RecipeState
from ablate.models.custom_models import describe_error, named
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
        UserError: a model that is not built in cannot be used, or raises.
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
        try:
            network.loss(model, tokens, tokens, "mean")[0].backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:
            if config.model.is_built_in:
                raise
            hint = (
                "it is called as module(tokens), a loss as loss(module, inputs, targets), without values here"
            )
            raise UserError(f"{named(config.model)} raised {describe_error(error)}", hint=hint) from error
    for name, p in model.named_parameters():
        if p.requires_grad and (p.grad is None or p.grad.shape != p.shape):
            what = f"no gradient reaches its parameter {name}"
            hint = "leave it out, or freeze it by requires_grad_(False)"
            raise UserError(f"{named(config.model)}: {what}", hint=hint)
    return DryRun(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_layers=len(layers),
        tokens=tokens.numel(),
    )
