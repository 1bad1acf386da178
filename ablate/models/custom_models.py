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
from collections.abc import Callable, Iterator
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
from ablate.layers.apply import Survey, convert_conv1d, quantise_layers, survey
from ablate.layers.experts import expert_parameters
from ablate.models.decoder import Decoder
from ablate.recipes.coverage import ALLOW, WeightMatrix
from ablate.run.architecture import LinearLayer, ModelSize

if TYPE_CHECKING:
    from ablate.layers.state import RecipeState
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


def build_network(
    config: RunConfig, state: RecipeState, *, initial_seed: int
) -> tuple[nn.Module, Loss]:
    """Build a run's model and its loss.

    It has the weights of this seed, on torch's default device; on ``meta`` it has none.

    Raises:
        UserError: foreign code or a foreign configuration cannot be used.
        ValueError: the model has no linear layer that can follow the recipe, or it has a matrix that the
            recipe does not reach and ``model.allow`` does not name.
    """
    if config.model.is_built_in:
        module = Decoder(
            config.model, config.vocab_size, config.training.seq_len, state
        )
        if not module.embedding.is_meta:
            module.initialise(torch.Generator().manual_seed(initial_seed))
        return module, partial(_decoder_loss, config.model.balance_loss)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(initial_seed)
        foreign, own_loss = build(
            config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len
        )
    model = config.model
    quantise_layers(foreign, state, allow=model.allow, reach=model.reach, key=ALLOW)
    return foreign, partial(_foreign_loss, config, own_loss)


def build(
    model: ModelConfig, *, vocab_size: int, seq_len: int
) -> tuple[nn.Module, OwnLoss | None]:
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
        fault = f"{named(model)} raised {describe_error(error)}"
        hint = "it is called with vocab_size, seq_len and model.options"
        raise UserError(fault, hint=hint) from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        hint = "expected a torch.nn.Module, or (module, loss)"
        raise UserError(f"{named(model)} returned {type(made).__name__}", hint=hint)
    return module.float(), loss


def _from_hf(model: ModelConfig, vocab_size: int, seq_len: int) -> nn.Module:
    folder = config_folder(str(model.hf), weights=model.pretrained)
    before = logging.root.manager.disable
    # indirectly imported packages log during the import
    logging.disable(logging.WARNING)
    try:
        import transformers.modeling_utils  # noqa: F401  imports what is noisy
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        fault = f"model.hf needs a package that is not installed: {error.name}"
        raise UserError(fault, hint="pip install -e '.[hf]'") from None
    finally:
        logging.disable(before)
    try:
        # Random weights have the data's vocabulary, and none of the checkpoint's special tokens.
        settings: dict[str, Any] = {}
        if not model.pretrained:
            settings = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
            settings["vocab_size"] = vocab_size
        # trust_remote_code is given, because transformers would otherwise ask on the terminal.
        plain: dict[str, Any] = {"trust_remote_code": False}
        config, unused = AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, **plain, **settings, **model.options
        )
        _check(model, config, unused, vocab_size, seq_len)
        plain["dtype"] = torch.float32
        module: nn.Module
        if model.pretrained:
            module = AutoModelForCausalLM.from_pretrained(
                folder, config=config, use_safetensors=True, **plain
            )
        else:
            module = AutoModelForCausalLM.from_config(config, **plain)
    except UserError:
        raise
    except Exception as error:  # many types with one remedy
        fault = f"{named(model)} cannot be built: {describe_error(error)}"
        hint = "expected the folder or hub name of a causal language model that transformers knows"
        raise UserError(fault, hint=hint) from error
    convert_conv1d(module)
    _refuse_a_view_ahead(module, model, seq_len)
    return module


def _refuse_a_view_ahead(module: nn.Module, model: ModelConfig, seq_len: int) -> None:
    """Raise ``UserError`` for an encoder, such as BERT: it sees the tokens that it must predict."""
    device = next(module.parameters()).device
    if device.type == "meta":
        return
    length = min(seq_len, 8)
    half = length // 2
    tokens = torch.arange(length, device=device) % 2
    other_end = tokens.clone()
    other_end[half:] += 1
    both = torch.stack((tokens, other_end))
    was_training = module.training
    module.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits, before_other_end = module(both, use_cache=False).logits[:, :half]
    module.train(was_training)
    tolerance = 1e-3 * float(logits.abs().max())
    if not torch.allclose(logits, before_other_end, rtol=1e-3, atol=tolerance):
        fault = f"{named(model)}: what it says of a token depends on later ones"
        hint = "an encoder needs model.options: {is_decoder: true}"
        raise UserError(fault, hint=hint)


def named(model: ModelConfig) -> str:
    """Name a foreign model in messages: its field of the study file and its value."""
    if model.hf is not None:
        return f"model.hf {model.hf}"
    return f"model.function {model.function}"


def describe_error(error: Exception) -> str:
    """Describe an error: type, first line, and the innermost line of the user's own code in its trace."""
    text = with_type(error)
    for frame in reversed(extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and _LIBRARIES.isdisjoint(path.parents):
            return f"{text}, at {path.name}:{frame.lineno}"
    return text


def _check(
    model: ModelConfig,
    config: Any,
    unused: dict[str, Any],
    vocab_size: int,
    seq_len: int,
) -> None:
    for name in unused:
        fault = f"model.options: {type(config).__name__} has no '{name}'"
        hint = likely(name, config.to_dict(), "its documentation lists them")
        raise UserError(fault, hint=hint)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        fault = (
            f"model.hf {model.hf} has {positions} positions, but seq_len is {seq_len}"
        )
        hint = "lower training.seq_len, or set model.options: {max_position_embeddings: …} for random weights"
        raise UserError(fault, hint=hint)
    if config.vocab_size < vocab_size:
        fault = f"model.hf {model.hf} has {config.vocab_size} tokens, but the data have {vocab_size}"
        hint = "a checkpoint needs the tokenizer that it was trained with; pretrained: false takes any"
        raise UserError(fault, hint=hint)


def _decoder_loss(
    balance_weight: float,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    reduction: Reduction,
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
    call: dict[str, Any] = {}
    if config.model.hf is not None:
        call["use_cache"] = False
        if inputs.is_meta:
            # Without a mask transformers searches the positions for packed sequences.
            positions = inputs.shape[1]
            square = torch.ones(positions, positions, dtype=torch.bool, device="meta")
            call["attention_mask"] = square.tril()[None, None]
    # Master weights in fp32, activations in bf16, as in the built-in models.
    kind = "cpu" if inputs.is_meta else inputs.device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        if own_loss is None:
            out = module(inputs, **call)
        else:
            loss: object = own_loss(module, inputs, targets)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                fault = f"{named(config.model)}: its loss returned {_kind(loss)}"
                hint = "expected a tensor without dimensions: mean nats per token"
                raise UserError(fault, hint=hint)
            if reduction == "sum":
                loss = loss * targets.numel()
            return loss, loss
    logits: object = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    here = [*inputs.shape, config.vocab_size]
    wanted = f"[sequences, positions, vocab_size], here {here}"
    if not isinstance(logits, Tensor):
        hint = f"expected logits {wanted}; what returns others needs a loss of its own"
        raise UserError(f"{named(config.model)} returned {_kind(out)}", hint=hint)
    shape = list(logits.shape)
    # a padded vocabulary is larger
    if shape[:-1] != here[:-1] or shape[-1] < config.vocab_size:
        fault = f"{named(config.model)} returned logits {shape}"
        raise UserError(fault, hint=f"expected {wanted}")
    loss = _cross_entropy(logits, targets, reduction)
    return loss, loss


def _kind(returned: object) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor {list(returned.shape)}"
    return f"a {type(returned).__name__}"


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction
    )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model's matrices, the linear layers among them that can follow a recipe, and its size."""

    layers: tuple[LinearLayer, ...]
    matrices: tuple[WeightMatrix, ...]
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
        surveyed = survey(module, model.reach)
    except ValueError as error:
        raise UserError(f"model {name}: {error}") from None
    if not surveyed.places:
        hint = "only torch.nn.Linear follows a recipe, and what model.reach names"
        raise UserError(
            f"model {name}: no linear layer to replace in {type(module).__name__}",
            hint=hint,
        )
    # of Hugging Face; without one attention is not counted
    config = getattr(module, "config", None)
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    layers = tuple(_linear_layers(surveyed, experts_per_token))
    products = sum(layer.inputs * layer.outputs * layer.token_share for layer in layers)
    flops = 6 * round(products) + _attention_flops(config, seq_len)
    parameters = 0
    for parameter in module.parameters():
        if not isinstance(parameter, UninitializedParameter):
            parameters += parameter.numel()
    size = ModelSize(parameters=parameters, flops_per_token=flops)
    return Outline(layers=layers, matrices=surveyed.matrices, size=size)


def _linear_layers(
    surveyed: Survey, experts_per_token: int | None
) -> Iterator[LinearLayer]:
    """Yield the layers of a model that can follow a recipe, the experts last."""
    shapes = {name: linear.weight.shape for name, linear in surveyed.linears.items()}
    for name, (holder, parameter, _) in surveyed.experts.items():
        shapes[name] = expert_parameters(holder)[parameter].shape
    for name, (*experts, outputs, inputs) in shapes.items():
        token_share = 1.0
        if experts and experts_per_token:
            token_share = experts_per_token / experts[0]
        yield LinearLayer(
            name=name,
            inputs=inputs,
            outputs=outputs,
            is_head=surveyed.places[name].is_head,
            token_share=token_share,
        )


def _attention_flops(config: Any, seq_len: int) -> int:
    """Count the FLOPs of attention a token by Hugging Face's configuration; 0 if it does not say."""
    sizes = []
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        size = getattr(config, name, None)
        if not isinstance(size, int):
            return 0
        sizes.append(size)
    layers, heads, width = sizes
    head_dim: int = getattr(config, "head_dim", None) or width // heads
    return 6 * layers * heads * head_dim * seq_len
