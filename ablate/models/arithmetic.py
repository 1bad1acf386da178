"""Quantities derived from a configuration: parameters, operations per token, and the schedule in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.run.architecture import block_layers

if TYPE_CHECKING:
    from ablate.models.custom_models import Outline
    from ablate.run.config import ModelConfig, TrainingConfig


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
    used = model.layers * sum(layer.inputs * layer.outputs * layer.token_share for layer in block)
    head = model.width * vocab_size
    norms = (2 * model.layers + 1) * model.width
    router = model.layers * (model.experts or 0) * model.width
    gpt = 0
    if model.architecture == "gpt":  # biases of norms and linear layers, and the positions
        gpt = norms + model.layers * sum(layer.outputs for layer in block) + seq_len * model.width
    return ModelSize(
        parameters=linear + norms + router + gpt + head * (1 if model.tied_head else 2),
        flops_per_token=6 * (round(used) + router + head) + 6 * model.layers * model.width * seq_len,
    )


def outlined_size(outline: Outline) -> ModelSize:
    """Compute the size of a model that is not built in."""
    linear = sum(layer.inputs * layer.outputs for layer in outline.layers)
    return ModelSize(
        parameters=outline.parameters, flops_per_token=6 * linear + outline.attention_flops_per_token
    )


def parameters_text(count: int) -> str:
    """Format a number of parameters in millions or billions."""
    return f"{count / 1e6:.3g} M" if count < 999.5e6 else f"{count / 1e9:.3g} B"


def schedule_text(training: TrainingConfig) -> str:
    """Describe the learning rate schedule in one line."""
    peak, final = f"{training.learning_rate:g}", f"{training.learning_rate * training.final_lr_ratio:g}"
    text = f"linear warm-up over {training.warmup_tokens:,} tokens, then " if training.warmup_tokens else ""
    if training.schedule == "constant":
        return f"{text}constant at {peak}"
    if training.schedule == "cosine":
        return f"{text}cosine from {peak} to {final} at the end of the budget"
    return f"{text}{peak}, and linear decay to {final} over the last {training.decay_tokens:,} tokens"
