"""Foreign models: a Hugging Face causal model, or the result of a user's function.

The function is called as ``function(vocab_size=…, seq_len=…, **options)``. It returns a ``torch.nn.Module``
that maps tokens [batch, positions] to logits [batch, positions, vocabulary] (or to an object with
``logits``); or that module and its loss, ``loss(module, inputs, targets)`` → mean nats per token.

How it fails: ``UserError`` with a remedy, whatever the foreign code raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ablate.base.code import load_function
from ablate.base.errors import Problem, UserError
from ablate.models.hf_files import config_folder

if TYPE_CHECKING:
    from collections.abc import Callable

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
        raise _unusable(f"model.function {model.function} raised {_first_line(error)}", hint) from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        hint = "expected a torch.nn.Module, or (module, loss)"
        raise _unusable(f"model.function {model.function} returned {type(made).__name__}", hint)
    return Foreign(module=module.float(), loss=loss)


def _from_hf(model: ModelConfig, vocab_size: int, seq_len: int) -> Foreign:
    import torch

    folder = config_folder(str(model.hf), weights=model.pretrained)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        own = {} if model.pretrained else {"vocab_size": vocab_size, **_no_special_tokens()}
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
        raise _unusable(f"model.hf {model.hf} cannot be built: {_first_line(error)}", hint) from error
    _make_linear(module)
    return Foreign(module=module, is_hf=True)


def _no_special_tokens() -> dict[str, None]:
    """Return options without special tokens: the vocabulary is the data's, not the checkpoint's."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _check(model: ModelConfig, config: Any, vocab_size: int, seq_len: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        hint = "lower training.seq_len, or set model.options: {max_position_embeddings: …} for random weights"
        raise _unusable(f"model.hf {model.hf} has {positions} positions, but seq_len is {seq_len}", hint)
    if config.vocab_size < vocab_size:
        hint = "a checkpoint needs the tokenizer that it was trained with; pretrained: false takes any"
        raise _unusable(
            f"model.hf {model.hf} has {config.vocab_size} tokens, but the data have {vocab_size}", hint
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


def _unusable(what: str, hint: str) -> UserError:
    return UserError(Problem(what=what, hint=hint))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
