"""The speed of a run's steps, outside any study: whole optimizer steps on random tokens, timed alone.

Speed does not depend on the tokens. Loading, evaluation, checkpoints and logging are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ablate.train.group import ONE_DEVICE, Layout
from ablate.train.loop import assemble, gradients, stream_seed, take_step
from ablate.train.malloc import keep_freed_memory

if TYPE_CHECKING:
    from ablate.run.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds per step, one figure per repeat; and the device's peak memory in bytes, if it is known."""

    sec_per_step: tuple[float, ...]
    tokens_per_step: int
    peak_memory_bytes: int | None


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
    trainee = assemble(replace(config, fork=None), device, layout)  # its own recipe from the first step on
    draw = np.random.default_rng(stream_seed(config.seed, "throughput"))
    shape = (config.training.batch_size, config.training.seq_len + 1)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def take(count: int) -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            window = draw.integers(0, config.vocab_size, shape)
            gradients(trainee, window, config.training.grad_clip)
            take_step(trainee)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    take(warmup)
    return StepTimes(
        sec_per_step=tuple(take(steps) / steps for _ in range(repeats)),
        tokens_per_step=trainee.plan.tokens_per_step,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )
