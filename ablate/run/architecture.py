"""Shapes of the built-in models, without torch and without a model: linear layers, size, presets.

Planning, the speed model and the models themselves use these functions, so that they always agree.

A preset, as in ``model: {preset: …}``, is a published shape of the Llama or GPT family. The vocabulary comes
from the tokenizer and is no part of it. Llama 3.1's rescaling of the rotary frequencies beyond 8,192
positions is left out, because no study trains on sequences that long. Sources: Touvron et al. 2302.13971 and
2307.09288 (Llama, Llama 2), Dubey et al. 2407.21783 (Llama 3), Jiang et al. 2401.04088 (Mixtral), and the
configurations published with the weights. For GPT: layers and widths of Tseng et al. 2502.20586, heads of
GPT-2 medium (64 wide) and of Brown et al. 2005.14165 (128 wide).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ablate.recipes.place import LayerPlace, places

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    if model.architecture == "gpt":
        inner = "up"
        inner_outputs = model.ffn
    else:
        inner = "gate_up"
        inner_outputs = 2 * model.ffn
    if model.experts is None:
        ffn_names = ["ffn"]
        share = 1.0
    else:
        ffn_names = [f"ffn.experts.{expert}" for expert in range(model.experts)]
        share = min(1.0, model.experts_per_token / model.experts)
    qkv_outputs = (model.heads + 2 * kv_heads) * head_dim
    layers = [
        LinearLayer(name="attention.qkv", inputs=model.width, outputs=qkv_outputs),
        LinearLayer(
            name="attention.out", inputs=model.heads * head_dim, outputs=model.width
        ),
    ]
    for name in ffn_names:
        layers += (
            LinearLayer(
                name=f"{name}.{inner}",
                inputs=model.width,
                outputs=inner_outputs,
                token_share=share,
            ),
            LinearLayer(
                name=f"{name}.down",
                inputs=model.ffn,
                outputs=model.width,
                token_share=share,
            ),
        )
    return tuple(layers)


def linear_layers(model: ModelConfig, vocab_size: int) -> tuple[LinearLayer, ...]:
    """Return all linear layers of a built-in model that can follow a recipe, in order, the head last."""
    block = block_layers(model)
    layers = [
        replace(layer, name=f"blocks.{index}.{layer.name}")
        for index in range(model.layers)
        for layer in block
    ]
    return (
        *layers,
        LinearLayer(name=HEAD, inputs=model.width, outputs=vocab_size, is_head=True),
    )


@lru_cache(maxsize=256)  # the cells of a grid share most of theirs
def layer_places(layers: tuple[LinearLayer, ...]) -> Mapping[str, LayerPlace]:
    """Map the layers' names to their places, which the rules of a recipe need."""
    return places(
        (layer.name for layer in layers),
        heads={layer.name for layer in layers if layer.is_head},
    )


def model_places(model: ModelConfig) -> Mapping[str, LayerPlace]:
    """Map the names of a built-in model's linear layers to their places, the head included."""
    return layer_places(linear_layers(model, vocab_size=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Number of parameters, and floating-point operations of a forward and backward pass per token.

    ``parameters`` counts all experts; ``flops_per_token`` counts only the experts that a token uses.
    """

    parameters: int
    flops_per_token: int


def model_size(model: ModelConfig, *, vocab_size: int, seq_len: int) -> ModelSize:
    """Compute the size of a built-in model; causal attention counts half of the full square."""
    block = block_layers(model)
    linear = model.layers * sum(layer.inputs * layer.outputs for layer in block)
    used = model.layers * sum(
        layer.inputs * layer.outputs * layer.token_share for layer in block
    )
    head = model.width * vocab_size
    norms = (2 * model.layers + 1) * model.width
    router = model.layers * (model.experts or 0) * model.width
    gpt = 0
    # biases of norms and linear layers, and the positions
    if model.architecture == "gpt":
        gpt = (
            norms
            + model.layers * sum(layer.outputs for layer in block)
            + seq_len * model.width
        )
    return ModelSize(
        parameters=linear + norms + router + gpt + head * (1 if model.tied_head else 2),
        flops_per_token=6 * (round(used) + router + head)
        + 6 * model.layers * model.width * seq_len,
    )


def _llama(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> dict[str, Any]:
    shape = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
    }
    return _WHOLE | shape | {"tied_head": False, "rope_base": 500_000.0} | more


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": None,
        "ffn": 4 * width,
    }
    return (
        _WHOLE
        | shape
        | {"architecture": "gpt", "tied_head": True, "rope_base": 10_000.0}
    )


# A preset replaces all inherited fields, so every preset sets each field in which presets differ.
_WHOLE: dict[str, Any] = {"architecture": "llama", "experts": None, "norm_eps": 1e-5}


PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(256, 4, 4, 4, 704, tied_head=True, rope_base=10_000.0),
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, rope_base=10_000.0),
    "llama3.1-8b": _llama(4096, 32, 32, 8, 14_336),
    "llama3.1-70b": _llama(8192, 80, 64, 8, 28_672),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, tied_head=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8, 8192, tied_head=True),
    "moe-tiny": _llama(
        256, 4, 4, 4, 352, tied_head=True, rope_base=10_000.0, experts=4
    ),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14_336, rope_base=1_000_000.0, experts=8),
    "gpt-tiny": _gpt(256, 4, 4),
    "gpt-345m": _gpt(1024, 24, 16),
    "gpt-1.3b": _gpt(2048, 24, 16),
    "gpt-6.7b": _gpt(4096, 32, 32),
}
"""Fields of ``ModelConfig`` by preset name."""
if TYPE_CHECKING:
    Preset = str
else:  # from the dict itself, so that the schema and the hints always agree
    Preset = Literal[tuple(PRESETS)]
