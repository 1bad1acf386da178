"""Names and shapes of the built-in models' linear layers, computed without torch and without a model.

Planning, the speed model and the models themselves use these functions, so that they always agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.recipes.place import LayerPlace, places

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.run.config import ModelConfig

HEAD = "head"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayer:
    """A linear layer: its name, in-features and out-features, and the share of the tokens it receives."""

    name: str
    inputs: int
    outputs: int
    is_head: bool = False
    token_share: float = 1.0


def block_layers(model: ModelConfig) -> tuple[LinearLayer, ...]:
    """Return the linear layers of one block of a built-in model, with their names within the block."""
    head_dim = model.width // model.heads
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    attention = (
        LinearLayer(
            name="attention.qkv", inputs=model.width, outputs=(model.heads + 2 * kv_heads) * head_dim
        ),
        LinearLayer(name="attention.out", inputs=model.heads * head_dim, outputs=model.width),
    )
    if model.experts is None:
        return (*attention, *_feed_forward(model, "ffn", 1.0))
    share = min(1.0, model.experts_per_token / model.experts)
    experts = (_feed_forward(model, f"ffn.experts.{i}", share) for i in range(model.experts))
    return (*attention, *(layer for expert in experts for layer in expert))


def _feed_forward(model: ModelConfig, name: str, share: float) -> tuple[LinearLayer, LinearLayer]:
    inner, outputs = ("up", model.ffn) if model.architecture == "gpt" else ("gate_up", 2 * model.ffn)
    return (
        LinearLayer(name=f"{name}.{inner}", inputs=model.width, outputs=outputs, token_share=share),
        LinearLayer(name=f"{name}.down", inputs=model.ffn, outputs=model.width, token_share=share),
    )


def linear_layers(model: ModelConfig, vocab_size: int) -> tuple[LinearLayer, ...]:
    """Return all linear layers of a built-in model that can follow a recipe, in order, the head last."""
    block = block_layers(model)
    return (
        *(replace(one, name=f"blocks.{i}.{one.name}") for i in range(model.layers) for one in block),
        LinearLayer(name=HEAD, inputs=model.width, outputs=vocab_size, is_head=True),
    )


def part_of(name: str) -> str:
    """Return a built-in layer's name within its block; the head's is ``head``."""
    return name if name == HEAD else name.split(".", 2)[2]


def layer_places(layers: Iterable[LinearLayer]) -> dict[str, LayerPlace]:
    """Return the places of layers, for the rules of a recipe."""
    known = list(layers)
    return places((layer.name for layer in known), heads={layer.name for layer in known if layer.is_head})


def model_places(model: ModelConfig) -> dict[str, LayerPlace]:
    """Return the places of a built-in model's linear layers."""
    return layer_places(linear_layers(model, vocab_size=1))
