"""The memory that `ablate plan` models for a training step, beside the measured peak, on the CPU.

    python benchmarks/memory_model.py

Measured: two real optimizer steps of the shared trainer under torch's profiler, which sees every allocation
of a tensor, inside of custom operators too; the largest sum of what was alive. What the process holds besides
tensors (torch itself, the compiled quantiser's scratch) is in neither figure. One thread; half a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.profiler import ProfilerActivity, profile

from ablate.config import DataConfig, ModelConfig, ResourcesConfig, RunConfig, TrainingConfig
from ablate.plan.memory import Memory, step_memory
from ablate.recipes import RecipeSpec, expand_word, resolve
from ablate.train.throughput import time_steps

LLAMA = {"width": 256, "layers": 4, "heads": 4, "ffn": 704}
GROUPED = LLAMA | {"heads": 8, "kv_heads": 2, "tied_head": False}
GPT = LLAMA | {"architecture": "gpt", "ffn": 1024}
EXPERTS = LLAMA | {"ffn": 352, "experts": 4}
NVFP4 = {"preset": "nvidia-nvfp4", "layers": []}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it is trained with, and the recipe."""

    model: dict[str, Any]
    recipe: str | dict[str, Any]
    vocab_size: int = 1024
    training: dict[str, Any] = field(default_factory=dict)

    def config(self) -> RunConfig:
        """Return a run of it."""
        training = {"seq_len": 128, "batch_size": 8, "tokens": 1_000_000} | self.training
        return RunConfig(
            model=ModelConfig(**self.model),
            data=DataConfig(),
            data_digest="none",
            vocab_size=self.vocab_size,
            training=TrainingConfig(**training),
            recipe=resolve(TypeAdapter(RecipeSpec).validate_python(expand_word(self.recipe))),
            backend="emulated",
            seed=0,
        )

    def modelled(self) -> Memory:
        """Return what the plan says of it."""
        run = self.config()
        return step_memory(
            run.model, run.vocab_size, run.training, run.recipe, ResourcesConfig(), hardware=None
        ).peak


CASES = {
    "llama, bf16": Case(model=LLAMA, recipe="bf16"),
    "llama, bf16, bytes": Case(model=LLAMA, recipe="bf16", vocab_size=256),
    "llama, mxfp4 dht16, bytes": Case(model=LLAMA, recipe="amd-fdw-dht16", vocab_size=256),
    "llama, nvfp4, bytes": Case(model=LLAMA, recipe=NVFP4, vocab_size=256),
    "llama, fp8, 4 micro-batches": Case(model=LLAMA, recipe="fp8", training={"micro_batch_size": 2}),
    "llama, mxfp4, one sequence at a time": Case(
        model=LLAMA, recipe="mxfp4", vocab_size=256, training={"micro_batch_size": 1}
    ),
    "llama, mxfp4, few tokens": Case(
        model=LLAMA, recipe="mxfp4", vocab_size=256, training={"seq_len": 64, "batch_size": 2}
    ),
    "llama, mxfp4, long sequences": Case(
        model=LLAMA, recipe="mxfp4", vocab_size=256, training={"seq_len": 512, "batch_size": 4}
    ),
    "llama, quartet (mask), bytes": Case(model=LLAMA, recipe="quartet", vocab_size=256),
    "llama, tetrajet (double quantisation), bytes": Case(model=LLAMA, recipe="tetrajet", vocab_size=256),
    "grouped heads, mxfp4": Case(model=GROUPED, recipe="mxfp4"),
    "grouped heads, mxfp4, one sequence at a time": Case(
        model=GROUPED, recipe="mxfp4", training={"micro_batch_size": 1}
    ),
    "gpt, bf16": Case(model=GPT, recipe="bf16"),
    "gpt, tseng, bytes": Case(model=GPT, recipe="tseng", vocab_size=256),
    "gpt, nvfp4, 4 micro-batches": Case(
        model=GPT, recipe=NVFP4, vocab_size=256, training={"micro_batch_size": 2}
    ),
    "experts, bf16": Case(model=EXPERTS, recipe="bf16"),
    "experts, nvfp4, bytes": Case(model=EXPERTS, recipe=NVFP4, vocab_size=256),
    "experts, mxfp4, 2 micro-batches": Case(
        model=EXPERTS, recipe="mxfp4", vocab_size=256, training={"micro_batch_size": 4}
    ),
}


def measured_bytes(config: RunConfig) -> int:
    """Return the largest sum of tensors alive at once while a run is built and takes two steps on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        time_steps(config, device="cpu", steps=1, warmup=1, repeats=1)
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    changes = sorted(_changes(found.profiler.kineto_results.experimental_event_tree()))
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def _changes(events: list[Any]) -> list[tuple[int, int]]:
    """Return (time, bytes) of every allocation, and with a minus of every end of one."""
    changes = []
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:  # noqa: SLF001  the one place that tells
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return changes


def main() -> None:
    torch.set_num_threads(1)
    parts = [part.name for part in fields(Memory)]
    print(f"{'':<45} {'measured':>9} {'modelled':>9} {'off by':>7}   " + " ".join(f"{p:>11}" for p in parts))
    for name, case in CASES.items():
        measured, modelled = measured_bytes(case.config()), case.modelled()
        print(
            f"{name:<45} {measured / 1e6:7.1f}MB {modelled.total / 1e6:7.1f}MB "
            f"{modelled.total / measured - 1:+7.1%}   "
            + " ".join(f"{getattr(modelled, part) / 1e6:9.1f}MB" for part in parts),
            flush=True,
        )


if __name__ == "__main__":
    main()
