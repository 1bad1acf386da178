"""The parts of a foreign model, found by building it on torch's meta device: no memory, no data.

How it fails: ``UserError`` as in ``foreign``, also for a model without a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ablate.base.errors import Problem, UserError
from ablate.layers.apply import linear_places
from ablate.models.foreign import build
from ablate.run.architecture import LinearLayer

if TYPE_CHECKING:
    from ablate.run.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Linear layers that can follow a recipe, the number of parameters, and matrices outside linear layers.

    ``attention_flops_per_token``: forward and backward at this sequence length, 0 if unknown.
    """

    layers: tuple[LinearLayer, ...]
    parameters: int
    attention_flops_per_token: int
    other_matrices: tuple[str, ...]


def outline(model: ModelConfig, *, vocab_size: int, seq_len: int) -> Outline:
    """Return the outline of a foreign model.

    Raises:
        UserError: the model is not available, cannot be built, or has no linear layer.
    """
    with torch.device("meta"):
        module = build(model, vocab_size=vocab_size, seq_len=seq_len).module
    name = model.hf or model.function
    try:
        where = linear_places(module)
    except ValueError as error:
        hint = "only torch.nn.Linear, and no subclass of it, is replaced"
        raise UserError(Problem(what=f"model {name}: {error}", hint=hint)) from None
    layers = []
    for layer_name, place in where.items():
        linear = module.get_submodule(layer_name)
        assert isinstance(linear, nn.Linear)
        layers.append(
            LinearLayer(
                name=layer_name,
                inputs=linear.in_features,
                outputs=linear.out_features,
                is_head=place.is_head,
            )
        )
    return Outline(
        layers=tuple(layers),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        attention_flops_per_token=_attention_flops(module, seq_len),
        other_matrices=tuple(_other_matrices(module, set(where))),
    )


def _other_matrices(module: nn.Module, linear: set[str]) -> list[str]:
    tables = {name for name, layer in module.named_modules() if isinstance(layer, nn.Embedding)}
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2 and name.rpartition(".")[0] not in linear | tables
    ]


def _attention_flops(module: nn.Module, seq_len: int) -> int:
    """Return the FLOPs of causal attention, as Hugging Face configurations describe it; 0 if unknown."""
    config = getattr(module, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return 0
    head_dim = getattr(config, "head_dim", None) or width // heads
    return 6 * layers * heads * head_dim * seq_len
