"""What the CPU benchmarks share: options, times in turns, a small run, and a line about the machine."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ablate.backends.cpu_bf16 import multiplies_bf16, multiply_in_fp32
from ablate.backends.select import load_backend
from ablate.execute.environment import cpu_name
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.step import Trainee, gradients, keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.recipes import Recipe


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command's options, each of its default's type."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in defaults.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default
        )
    return parser.parse_args()


def prepare(threads: int) -> str:
    """Set the threads, multiply bf16 and keep freed memory as the trainer does, and describe the machine."""
    torch.set_num_threads(threads)
    multiply_in_fp32()
    keep_freed_memory()
    instructions = torch.backends.cpu.get_cpu_capability()
    products = (
        "multiplies bf16"
        if multiplies_bf16()
        else "multiplies bf16 in fp32, rounded once"
    )
    return f"{cpu_name()}, {instructions}, {products}; {load_backend('emulated').detail()}; {threads} thread(s)"


def in_turns(
    work: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each call, but of its first.

    Called in turns, so that a busy machine slows all alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, call in work.items():
            start = clock()
            call()
            if turn:
                taken[name].append(clock() - start)
    return taken


def small_run(width: int, layers: int, recipe: Recipe, **training: int) -> RunConfig:
    """Return a run of a small decoder on bytes that reads no data."""
    return RunConfig(
        model=ModelConfig(
            width=width, layers=layers, heads=max(width // 64, 1), ffn=width * 11 // 4 // 32 * 32
        ),
        data=DataConfig(), data_digest="made up", vocab_size=256, backend="emulated", seed=0, recipe=recipe,
        training=TrainingConfig(**{"seq_len": 128, "batch_size": 16} | training),
    )  # fmt: skip


def step(trainee: Trainee) -> None:
    """Take a training step on made-up tokens."""
    shape = (trainee.settings.batch_size, trainee.settings.seq_len + 1)
    gradients(trainee, np.random.default_rng(0).integers(0, 256, shape), 1.0)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
