"""A run's model with its initial weights, recipe and loss: built-in, from Hugging Face, or the user's.

How it fails: ``UserError`` for foreign code or a configuration that is not available or cannot be built,
``ValueError`` for a model without a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.base.errors import UserError
from ablate.layers.apply import quantise_layers
from ablate.models.custom_models import build, named
from ablate.models.decoder import Decoder
from ablate.recipes.coverage import ALLOW

if TYPE_CHECKING:
    from ablate.layers.state import RecipeState
    from ablate.models.custom_models import Foreign
    from ablate.run.config import RunConfig

Reduction = Literal["mean", "sum"]


Loss = Callable[[nn.Module, Tensor, Tensor, Reduction], tuple[Tensor, Tensor]]
"""(module, inputs and targets [sequences, positions], reduction) → (training loss, nats per token).

Each is a mean or a sum; they differ if a model adds a loss of its own.
"""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A module and its loss. ``draws``: the module may use torch's random numbers (dropout)."""

    module: nn.Module
    loss: Loss
    draws: bool


def build_network(config: RunConfig, state: RecipeState, *, initial_seed: int) -> Network:
    """Build a run's model with the weights of this seed on torch's default device (no weights on ``meta``).

    Raises:
        UserError: foreign code or a foreign configuration cannot be used.
        ValueError: the model has no linear layer that can follow the recipe, or it has a matrix that the
            recipe does not reach and ``model.allow`` does not name.
    """
    if config.model.is_built_in:
        module = Decoder(config.model, config.vocab_size, config.training.seq_len, state)
        if not module.embedding.is_meta:
            module.initialise(torch.Generator().manual_seed(initial_seed))
        return Network(module=module, loss=partial(_decoder_loss, config.model.balance_loss), draws=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(initial_seed)
        foreign = build(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    quantise_layers(foreign.module, state, allow=config.model.allow, key=ALLOW)
    return Network(module=foreign.module, loss=partial(_foreign_loss, config, foreign), draws=True)


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
    foreign: Foreign,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    call: dict[str, Any] = {"use_cache": False} if foreign.is_hf else {}
    if inputs.is_meta and foreign.is_hf:
        # Without a mask transformers searches the positions for packed sequences.
        square = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device="meta")
        call["attention_mask"] = square.tril()[None, None]
    # Master weights in fp32, activations in bf16, as in the built-in models.
    with torch.autocast("cpu" if inputs.is_meta else inputs.device.type, dtype=torch.bfloat16):
        if foreign.loss is None:
            out = module(inputs, **call)
        else:
            loss: object = foreign.loss(module, inputs, targets)
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
