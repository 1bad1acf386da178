"""Foreign models: a Hugging Face causal model, or the result of a user's function; and their outlines.

The function is called as ``function(vocab_size=…, seq_len=…, **options)``. It returns a ``torch.nn.Module``
that maps tokens [batch, positions] to logits [batch, positions, vocabulary] (or to an object with
``logits``); or that module and its loss, ``loss(module, inputs, targets)`` → mean nats per token.

How it fails: ``UserError`` with a remedy, whatever the foreign code raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ablate.base.code import load_function
from ablate.base.errors import UserError
from ablate.layers.apply import linear_places
from ablate.models.hf_files import config_folder
from ablate.run.architecture import LinearLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes.place import LayerPlace
    from ablate.run.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A module, its own loss if it has one, and whether it comes from transformers."""

    module: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    is_hf: bool = False


def build(model: ModelConfig, *, vocab_size: int, seq_len: int) -> Foreign:
    """Build a model that is not built in, with weights from torch's random generator or a checkpoint.

    Raises:
        UserError: the model is not available, cannot be built, or is no such model.
    """
    if model.hf is not None:
        return _from_hf(model, vocab_size, seq_len)
    assert model.function is not None
    function = load_function(model.function)
    try:
        made = function(vocab_size=vocab_size, seq_len=seq_len, **model.options)
    except Exception as error:  # the user's own code may raise anything
        hint = "it is called with vocab_size, seq_len and model.options"
        raise UserError(f"model.function {model.function} raised {_first_line(error)}", hint=hint) from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        hint = "expected a torch.nn.Module, or (module, loss)"
        raise UserError(f"model.function {model.function} returned {type(made).__name__}", hint=hint)
    return Foreign(module=module.float(), loss=loss)


def _from_hf(model: ModelConfig, vocab_size: int, seq_len: int) -> Foreign:
    folder = config_folder(str(model.hf), weights=model.pretrained)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        # Random weights have the data's vocabulary, and no special tokens of the checkpoint's.
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        own = {} if model.pretrained else {"vocab_size": vocab_size, **none}
        # trust_remote_code is given, because transformers would otherwise ask on the terminal.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **own, **model.options)
        _check(model, config, vocab_size, seq_len)
        if model.pretrained:
            module = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
        else:
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # many types with one remedy
        hint = "expected the folder or hub name of a causal language model that transformers knows"
        raise UserError(f"model.hf {model.hf} cannot be built: {_first_line(error)}", hint=hint) from error
    _make_linear(module)
    return Foreign(module=module, is_hf=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check(model: ModelConfig, config: Any, vocab_size: int, seq_len: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        hint = "lower training.seq_len, or set model.options: {max_position_embeddings: …} for random weights"
        raise UserError(f"model.hf {model.hf} has {positions} positions, but seq_len is {seq_len}", hint=hint)
    if config.vocab_size < vocab_size:
        hint = "a checkpoint needs the tokenizer that it was trained with; pretrained: false takes any"
        raise UserError(
            f"model.hf {model.hf} has {config.vocab_size} tokens, but the data have {vocab_size}", hint=hint
        )


def _make_linear(module: nn.Module) -> None:
    """Replace GPT-2's ``Conv1D``, a linear layer with a transposed weight, by linear layers."""
    from transformers.pytorch_utils import Conv1D

    for name, layer in list(module.named_modules()):
        if isinstance(layer, Conv1D):
            inputs, outputs = layer.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
            linear.bias = layer.bias
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, linear)


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
        raise UserError(f"model {name}: {error}", hint=hint) from None
    return Outline(
        layers=tuple(_layer(module.get_submodule(name), place) for name, place in where.items()),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        attention_flops_per_token=_attention_flops(module, seq_len),
        other_matrices=tuple(_other_matrices(module, set(where))),
    )


def _layer(linear: Any, place: LayerPlace) -> LinearLayer:
    return LinearLayer(
        name=place.name, inputs=linear.in_features, outputs=linear.out_features, is_head=place.is_head
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
