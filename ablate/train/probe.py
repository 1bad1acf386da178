"""The size and the speed of a run, without a study and without data.

A dry run passes one micro-batch forward and backward on torch's meta device: it takes seconds and some
hundred megabytes for a model of any size, and uses the same layers, custom operators and recipe as training.
Whole optimizer steps are timed, on random tokens, because speed does not depend on the tokens. Loading,
evaluation, checkpoints and logging are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ablate.backends.select import Selection
from ablate.base.errors import UserError
from ablate.layers.linear import quantised_layers, weights_used_beside
from ablate.layers.state import RecipeState
from ablate.models.custom_models import build_network, describe_error, named
from ablate.train.graphed import WARM_UP, WholeSteps, unproven, why_eager
from ablate.train.group import ONE_DEVICE, Layout
from ablate.train.step import assemble, keep_freed_memory, on_device, stream_seed

if TYPE_CHECKING:
    from ablate.run.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The size of a dry run: parameters, linear layers, and tokens of one forward pass."""

    parameters: int
    linear_layers: int
    tokens: int


def dry_run(config: RunConfig, devices: int = 1) -> DryRun:
    """Build a run's model and pass one device's micro-batch forward and backward, with shapes only.

    Raises:
        ValueError: the features of a layer do not fit its recipe.
        UserError: a model that is not built in cannot be used, or raises.
    """
    settings = config.training
    sequences = settings.micro_batch_size or settings.batch_size // devices
    state = RecipeState(
        recipe=config.recipe,
        backend=Selection("emulated"),
        seed=config.seed,
        total_tokens=settings.tokens,
    )
    with torch.device("meta"):
        model, loss = build_network(config, state, initial_seed=0)
        tokens = torch.zeros(sequences, settings.seq_len, dtype=torch.long)
        try:
            loss(model, tokens, tokens, "mean")[0].backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:
            if config.model.is_built_in:
                raise
            fault = f"{named(config.model)} raised {describe_error(error)}"
            hint = "it is called as module(tokens), a loss as loss(module, inputs, targets), without values here"
            raise UserError(fault, hint=hint) from error
    if beside := weights_used_beside(state):
        raise UserError(f"{named(config.model)}: {beside}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            fault = f"{named(config.model)}: no gradient reaches its parameter {name}"
            hint = "leave it out, or freeze it by requires_grad_(False)"
            raise UserError(fault, hint=hint)
    return DryRun(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_layers=len(quantised_layers(model)),
        tokens=tokens.numel(),
    )


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds per step, one figure per repeat; and the device's peak memory in bytes, if it is known.

    ``launch``: eager, or one CUDA graph.
    """

    sec_per_step: tuple[float, ...]
    tokens_per_step: int
    peak_memory_bytes: int | None
    launch: str


def time_steps(
    config: RunConfig,
    *,
    device: str,
    steps: int,
    warmup: int,
    repeats: int,
    layout: Layout = ONE_DEVICE,
) -> StepTimes:
    """Time ``steps`` optimizer steps ``repeats`` times, after ``warmup`` steps that do not count.

    Raises:
        ValueError: an operand does not fit its policy.
    """
    keep_freed_memory()
    config = replace(config, fork=None)  # its own recipe from the first step on
    trainee = assemble(config, device, layout)
    eager = why_eager(config, device, devices=layout.group.size)
    eager = eager or unproven(config, device, layout)
    whole_steps = WholeSteps(trainee, eager)
    draw = np.random.default_rng(stream_seed(config.seed, "throughput"))
    shape = (config.training.batch_size, config.training.seq_len + 1)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def take(count: int) -> float:
        started = now()
        for _ in range(count):
            sequences = on_device(draw.integers(0, config.vocab_size, shape), device)
            whole_steps.take(trainee, sequences)
            trainee.state.step += 1
        return now() - started

    take(warmup if eager else max(warmup, WARM_UP + 1))
    sec_per_step = tuple(take(steps) / steps for _ in range(repeats))
    return StepTimes(
        sec_per_step=sec_per_step,
        tokens_per_step=trainee.plan.tokens_per_step,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        launch="eager" if whole_steps.eager else "one CUDA graph",
    )
