"""Foreign models: a Hugging Face causal model, or the result of a user's function; and their outlines.

The function is called as ``function(vocab_size=…, seq_len=…, **options)``. It returns a ``torch.nn.Module``
that maps tokens [batch, positions] to logits [batch, positions, vocabulary] (or to an object with
``logits``); or that module and its loss, ``loss(module, inputs, targets)`` → mean nats per token.

How it fails: ``UserError`` with a remedy, whatever the foreign code raises.
"""

from __future__ import annotations

import logging
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ablate.base.errors import UserError, likely
from ablate.base.user_functions import load_function
from ablate.data.hub import config_folder
from ablate.layers.apply import survey
from ablate.recipes.coverage import coverage_of
from ablate.run.architecture import LinearLayer, layer_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes import Recipe
    from ablate.recipes.coverage import Coverage, Matrix
    from ablate.run.config import ModelConfig


_LIBRARIES = {
    Path(__file__).parents[1],
    *(Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "purelib", "platlib")),
}


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A module, its own loss if it has one, and whether it comes from transformers."""

    module: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    is_hf: bool = False


def build(model: ModelConfig, *, vocab_size: int, seq_len: int) -> Foreign:
    """Build a model that is not built in, with weights from torch's random generator or a checkpoint.

    Raises:
        UserError: the model is not available, cannot be built, or is not a causal torch module.
    """
    if model.hf is not None:
        return _from_hf(model, vocab_size, seq_len)
    assert model.function is not None
    function = load_function(model.function)
    try:
        made = function(vocab_size=vocab_size, seq_len=seq_len, **model.options)
    except Exception as error:  # the user's own code may raise anything
        hint = "it is called with vocab_size, seq_len and model.options"
        raise UserError(f"{named(model)} raised {describe_error(error)}", hint=hint) from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        hint = "expected a torch.nn.Module, or (module, loss)"
        raise UserError(f"{named(model)} returned {type(made).__name__}", hint=hint)
    return Foreign(module=module.float(), loss=loss)


def _from_hf(model: ModelConfig, vocab_size: int, seq_len: int) -> Foreign:
    folder = config_folder(str(model.hf), weights=model.pretrained)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # indirectly imported packages log during the import
    try:
        import transformers.modeling_utils  # noqa: F401  imports what is noisy
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        what = f"model.hf needs a package that is not installed: {error.name}"
        raise UserError(what, hint="pip install -e '.[hf]'") from None
    finally:
        logging.disable(before)
    try:
        # Random weights have the data's vocabulary, and none of the checkpoint's special tokens.
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        own = {} if model.pretrained else {"vocab_size": vocab_size, **none}
        # trust_remote_code is given, because transformers would otherwise ask on the terminal.
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, return_unused_kwargs=True, **own, **model.options
        )
        _check(model, config, unused, vocab_size, seq_len)
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
        raise UserError(f"{named(model)} cannot be built: {describe_error(error)}", hint=hint) from error
    _make_linear(module)
    _refuse_a_view_ahead(module, model, seq_len)
    return Foreign(module=module, is_hf=True)


def _refuse_a_view_ahead(module: nn.Module, model: ModelConfig, seq_len: int) -> None:
    """Raise ``UserError`` for an encoder, such as BERT: it sees the tokens that it must predict."""
    length, device = min(seq_len, 8), next(module.parameters()).device
    if device.type == "meta":
        return
    tokens = torch.arange(length, device=device)[None] % 2
    later = tokens.clone()
    later[:, length // 2 :] += 1
    training = module.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, other = (
            module.eval()(one, use_cache=False).logits[:, : length // 2] for one in (tokens, later)
        )
    module.train(training)
    if not torch.allclose(first, other, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
        hint = "an encoder needs model.options: {is_decoder: true}"
        raise UserError(f"{named(model)}: what it says of a token depends on later ones", hint=hint)


def named(model: ModelConfig) -> str:
    """Name a foreign model in messages: its field of the study file and its value."""
    return f"model.hf {model.hf}" if model.hf is not None else f"model.function {model.function}"


def describe_error(error: Exception) -> str:
    """Describe an error: type, first line, and the innermost line of the user's own code in its trace."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    own = [
        f", at {path.name}:{line}"
        for path, line in frames
        if path.is_file() and _LIBRARIES.isdisjoint(path.parents)
    ]
    return text + "".join(own[-1:])


def _check(model: ModelConfig, config: Any, unused: dict[str, Any], vocab_size: int, seq_len: int) -> None:
    for name in unused:
        hint = likely(name, config.to_dict(), "its documentation lists them")
        raise UserError(f"model.options: {type(config).__name__} has no '{name}'", hint=hint)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        hint = "lower training.seq_len, or set model.options: {max_position_embeddings: …} for random weights"
        raise UserError(f"model.hf {model.hf} has {positions} positions, but seq_len is {seq_len}", hint=hint)
    if config.vocab_size < vocab_size:
        what = f"model.hf {model.hf} has {config.vocab_size} tokens, but the data have {vocab_size}"
        hint = "a checkpoint needs the tokenizer that it was trained with; pretrained: false takes any"
        raise UserError(what, hint=hint)


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
    """A model's matrices, the linear layers among them that can follow a recipe, and the parameter count.

    ``attention_flops_per_token``: forward and backward at this sequence length, 0 if unknown.
    """

    layers: tuple[LinearLayer, ...]
    matrices: tuple[Matrix, ...]
    parameters: int
    attention_flops_per_token: int

    def coverage(self, recipe: Recipe) -> Coverage:
        """Find which of the model's matrices a recipe reaches."""
        return coverage_of(recipe, self.matrices, layer_places(self.layers))


def outline(model: ModelConfig, *, vocab_size: int, seq_len: int) -> Outline:
    """Build a foreign model without weights, on the meta device, and outline it.

    Raises:
        UserError: the model is not available, cannot be built, or has no linear layer.
    """
    with torch.device("meta"):
        module = build(model, vocab_size=vocab_size, seq_len=seq_len).module
    name = model.hf or model.function
    try:
        found = survey(module)
    except ValueError as error:
        raise UserError(f"model {name}: {error}", hint="ablate applies each arm's recipe itself") from None
    if not found.linears:
        hint = "only torch.nn.Linear, and no subclass of it, follows a recipe"
        raise UserError(f"model {name}: no linear layer to replace in {type(module).__name__}", hint=hint)
    layers = (
        LinearLayer(
            name=name,
            inputs=linear.in_features,
            outputs=linear.out_features,
            is_head=found.places[name].is_head,
        )
        for name, linear in found.linears.items()
    )
    known = (each for each in module.parameters() if not isinstance(each, UninitializedParameter))
    return Outline(
        layers=tuple(layers),
        matrices=found.matrices,
        parameters=sum(each.numel() for each in known),
        attention_flops_per_token=_attention_flops(module, seq_len),
    )


def _attention_flops(module: nn.Module, seq_len: int) -> int:
    """FLOPs per token of causal attention, from a Hugging Face configuration; 0 without one."""
    config = getattr(module, "config", None)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, width = (getattr(config, name, None) for name in names)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return 0
    head_dim: int = getattr(config, "head_dim", None) or width // heads
    return 6 * layers * heads * head_dim * seq_len
