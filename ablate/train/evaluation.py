"""Validation losses, by the recipe's Fprop and by bf16, on windows that all runs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ablate.data.batches import validation_batches
from ablate.layers.linear import quantised_layers
from ablate.layers.state import EVAL_CALL
from ablate.recipes import LayerRecipe
from ablate.train.step import Trainee, inputs_and_targets, on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    LossOf = Callable[[Trainee, Tensor], Tensor]

_BF16 = LayerRecipe()


def summed_loss(trainee: Trainee, sequences: Tensor) -> Tensor:
    """Sum the loss (nats) over [sequences, seq_len + 1] tokens: fp64, on the device. Waits for no device."""
    inputs, targets = inputs_and_targets(sequences)
    return trainee.loss(trainee.module, inputs, targets, "sum")[1].double()


def evaluate(
    trainee: Trainee, tokens: NDArray[Any], loss_of: LossOf = summed_loss
) -> dict[str, float]:
    """Compute the validation losses that ``training.evaluate_in`` asks for, in nats per token.

    ``val_loss`` uses the recipe's own Fprop, or bf16 if only that is asked for. ``val_loss_bf16`` uses bf16
    in addition to the recipe's. If the recipe's Fprop is in bf16 anyway, one evaluation gives both.
    ``loss_of``: ``summed_loss``, or the same work as CUDA graphs.
    """
    evaluated_in = trainee.settings.evaluate_in
    losses: dict[str, float] = {}
    if evaluated_in != "bf16":
        losses["val_loss"] = _mean_loss(trainee, tokens, loss_of)
    if evaluated_in == "recipe":
        return losses
    layers = quantised_layers(trainee.module).values()
    name = "val_loss" if evaluated_in == "bf16" else "val_loss_bf16"
    if losses and all(
        layer.recipe_at(trainee.state.tokens).fprop.is_untouched for layer in layers
    ):
        losses[name] = losses["val_loss"]
        return losses
    for layer in layers:
        layer.override = _BF16
    try:
        losses[name] = _mean_loss(trainee, tokens, loss_of)
    finally:
        for layer in layers:
            layer.override = None
    return losses


def _mean_loss(trainee: Trainee, tokens: NDArray[Any], loss_of: LossOf) -> float:
    """Compute the mean loss in nats per token on the fixed validation set."""
    group = trainee.group
    settings = trainee.settings
    sequences = settings.micro_batch_size or settings.batch_size // group.size
    batches = list(
        validation_batches(
            tokens,
            settings.seq_len,
            settings.eval_tokens,
            sequences,
            settings.eval_windows,
        )
    )
    count = len(batches)
    # Gathering weights needs all processes: a process without a batch repeats the last one.
    evaluated = {}
    for turn in range(group.rank, count + -count % group.size, group.size):
        index = min(turn, count - 1)
        evaluated[index] = batches[index]
    sums = summed_losses(trainee, evaluated, loss_of)
    num_tokens = sum(len(batch) * settings.seq_len for batch in batches)
    return group.total(sums, count) / num_tokens


def summed_losses(
    trainee: Trainee, batches: Mapping[int, NDArray[Any]], loss_of: LossOf
) -> dict[int, float]:
    """Sum the loss (nats) over each batch [sequences, seq_len + 1] of an evaluation, by its number."""
    module = trainee.module
    state = trainee.state
    training_call = state.call
    sums: list[Tensor] = []
    module.eval()
    with torch.no_grad():
        for index, batch in batches.items():
            state.call = EVAL_CALL + index
            sums.append(loss_of(trainee, on_device(batch, trainee.device)))
    module.train()
    state.call = training_call
    return dict(zip(batches, torch.stack(sums).tolist(), strict=True))
