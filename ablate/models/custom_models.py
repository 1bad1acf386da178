"""A run's model with its initial weights, recipe and loss: built-in, Hugging Face's, or of a user's function.

The function is called as ``function(vocab_size=…, seq_len=…, **options)``. It returns a ``torch.nn.Module``
that maps tokens [batch, positions] to logits [batch, positions, vocabulary] (or to an object with
``logits``); or that module and its loss, ``loss(module, inputs, targets)`` → mean nats per token.

How it fails: ``UserError`` with a remedy, whatever the foreign code raises; ``ValueError`` for a model
without a linear layer.
"""

from __future__ import annotations

import logging
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ablate.base.errors import UserError, likely, with_type
from ablate.base.user_functions import load_function
from ablate.data.hub import config_folder
from ablate.layers.apply import convert_conv1d, quantise_layers, survey
from ablate.layers.experts import expert_parameters
from ablate.models.decoder import Decoder
from ablate.recipes.coverage import ALLOW
from ablate.run.architecture import LinearLayer, ModelSize

if TYPE_CHECKING:
    from ablate.layers.state import RecipeState
    from ablate.recipes.coverage import Matrix
    from ablate.run.config import ModelConfig, RunConfig

_LIBRARIES = {
    Path(__file__).parents[1],
    *(Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "purelib", "platlib")),
}


Reduction = Literal["mean", "sum"]
OwnLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor, Reduction], tuple[Tensor, Tensor]]
"""(module, inputs and targets [sequences, positions], reduction) → (training loss, nats per token).

Each is a mean or a sum; they differ if a model adds a loss of its own.
"""


def build_network(config: RunConfig, state: RecipeState, *, initial_seed: int) -> tuple[nn.Module, Loss]:
    """Build a run's model and its loss.

    It has the weights of this seed, on torch's default device; on ``meta`` it has none.

    Raises:
        UserError: foreign code or a foreign configuration cannot be used.
        ValueError: the model has no linear layer that can follow the recipe, or it has a matrix that the
            recipe does not reach and ``model.allow`` does not name.
    """
    if config.model.is_built_in:
        module = Decoder(config.model, config.vocab_size, config.training.seq_len, state)
        if not module.embedding.is_meta:
            module.initialise(torch.Generator().manual_seed(initial_seed))
        return module, partial(_decoder_loss, config.model.balance_loss)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(initial_seed)
        foreign, own_loss = build(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    quantise_layers(foreign, state, allow=config.model.allow, key=ALLOW)
    return foreign, partial(_foreign_loss, config, own_loss)


def build(model: ModelConfig, *, vocab_size: int, seq_len: int) -> tuple[nn.Module, OwnLoss | None]:
    """Build a model that is not built in, with weights from torch's random generator or a checkpoint.

    Returns its own loss, too, if it has one.

    Raises:
        UserError: the model is not available, cannot be built, or is not a causal torch module.
    """
    if model.hf is not None:
        return _from_hf(model, vocab_size, seq_len), None
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
    return module.float(), loss


def _from_hf(model: ModelConfig, vocab_size: int, seq_len: int) -> nn.Module:
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
    convert_conv1d(module)
    _refuse_a_view_ahead(module, model, seq_len)
    result: nn.Module = module
    return result


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
    frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    own = [
        f", at {path.name}:{line}"
        for path, line in frames
        if path.is_file() and _LIBRARIES.isdisjoint(path.parents)
    ]
    return with_type(error) + "".join(own[-1:])


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


def _decoder_loss(
    balance_weight: float, module: nn.Module, inputs: Tensor, targets: Tensor, reduction: Reduction
) -> tuple[Tensor, Tensor]:
    loss = _cross_entropy(module(inputs), targets, reduction)
    balance = getattr(module, "balance", None)
    if balance is None or not module.training:
        return loss, loss
    return loss + balance_weight * balance, loss


def _foreign_loss(
    config: RunConfig,
    own_loss: OwnLoss | None,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    call: dict[str, Any] = {} if config.model.hf is None else {"use_cache": False}
    if inputs.is_meta and call:
        # Without a mask transformers searches the positions for packed sequences.
        square = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device="meta")
        call["attention_mask"] = square.tril()[None, None]
    # Master weights in fp32, activations in bf16, as in the built-in models.
    with torch.autocast("cpu" if inputs.is_meta else inputs.device.type, dtype=torch.bfloat16):
        if own_loss is None:
            out = module(inputs, **call)
        else:
            loss: object = own_loss(module, inputs, targets)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                hint = "expected a tensor without dimensions: mean nats per token"
                raise UserError(f"{named(config.model)}: its loss returned {_kind(loss)}", hint=hint)
            loss = loss * targets.numel() if reduction == "sum" else loss
            return loss, loss
    logits: object = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    wanted = f"[sequences, positions, vocab_size], here {[*inputs.shape, config.vocab_size]}"
    if not isinstance(logits, Tensor):
        hint = f"expected logits {wanted}; what returns others needs a loss of its own"
        raise UserError(f"{named(config.model)} returned {_kind(out)}", hint=hint)
    shape = list(logits.shape)
    if shape[:-1] != list(inputs.shape) or shape[-1] < config.vocab_size:  # a padded vocabulary is larger
        raise UserError(f"{named(config.model)} returned logits {shape}", hint=f"expected {wanted}")
    loss = _cross_entropy(logits, targets, reduction)
    return loss, loss


def _kind(found: object) -> str:
    return f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model's matrices, the linear layers among them that can follow a recipe, and its size."""

    layers: tuple[LinearLayer, ...]
    matrices: tuple[Matrix, ...]
    size: ModelSize


def outline(model: ModelConfig, *, vocab_size: int, seq_len: int) -> Outline:
    """Build a foreign model without weights, on the meta device, and outline it.

    Raises:
        UserError: the model is not available, cannot be built, or has no linear layer.
    """
    with torch.device("meta"):
        module, _ = build(model, vocab_size=vocab_size, seq_len=seq_len)
    name = model.hf or model.function
    try:
        found = survey(module)
    except ValueError as error:
        raise UserError(f"model {name}: {error}", hint="ablate applies each arm's recipe itself") from None
    if not found.places:
        hint = "only torch.nn.Linear, and no subclass of it, follows a recipe"
        raise UserError(f"model {name}: no linear layer to replace in {type(module).__name__}", hint=hint)
    config = getattr(module, "config", None)  # of Hugging Face; without one attention is not counted
    shapes: dict[str, tuple[int, ...]] = {name: (1, *one.weight.shape) for name, one in found.linears.items()}
    shapes |= {name: expert_parameters(holder)[own].shape for name, (holder, own, _) in found.experts.items()}
    chosen = getattr(config, "num_experts_per_tok", None)
    layers = tuple(
        LinearLayer(
            name=name,
            inputs=inputs,
            outputs=outputs,
            is_head=found.places[name].is_head,
            token_share=chosen / experts if chosen and name in found.experts else 1.0,
        )
        for name, (experts, outputs, inputs) in shapes.items()
    )
    known = (each for each in module.parameters() if not isinstance(each, UninitializedParameter))
    flops = 6 * round(sum(layer.inputs * layer.outputs * layer.token_share for layer in layers))
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    depth, heads, width = (getattr(config, key, None) for key in sizes)
    if isinstance(depth, int) and isinstance(heads, int) and isinstance(width, int):
        flops += 6 * depth * heads * (getattr(config, "head_dim", None) or width // heads) * seq_len
    size = ModelSize(parameters=sum(each.numel() for each in known), flops_per_token=flops)
    return Outline(layers=layers, matrices=found.matrices, size=size)
