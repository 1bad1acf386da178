"""The memory that `ablate plan` models for a training step, beside the measured peak, on the CPU.

    python benchmarks/memory_model.py
    python benchmarks/memory_model.py --devices 2

Measured: two real optimizer steps of the shared trainer under torch's profiler, which sees every allocation
of a tensor, inside of custom operators too; the largest sum of what was alive. What the process holds besides
tensors (torch itself, the compiled quantiser's scratch) is in neither figure. One thread; half a minute.

With several devices, processes that share the model (FSDP2) through gloo. When gloo frees its copies depends
on how fast they are sent, so that these peaks differ from one run to the next.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from ablate.modelled.on_hardware import PURPOSES, Memory, step_memory
from ablate.recipes import read_recipe
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    ResourcesConfig,
    RunConfig,
    TrainingConfig,
)
from ablate.train.group import Layout, join_group
from ablate.train.probe import time_steps
from ablate.train.step import assemble, gradients

if TYPE_CHECKING:
    from collections.abc import Callable

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
        training = {
            "seq_len": 128,
            "batch_size": 8,
            "tokens": 1_000_000,
        } | self.training
        return RunConfig(
            model=ModelConfig(**self.model),
            data=DataConfig(),
            data_digest="none",
            vocab_size=self.vocab_size,
            training=TrainingConfig(**training),
            recipe=read_recipe(self.recipe),
            backend="emulated",
            seed=0,
        )

    def modelled(self, devices: int = 1) -> Memory:
        """Return what the plan says of it."""
        return step_memory(
            self.config(), ResourcesConfig(devices_per_run=devices), None
        )


CASES = {
    "llama, bf16": Case(model=LLAMA, recipe="bf16"),
    "llama, bf16, bytes": Case(model=LLAMA, recipe="bf16", vocab_size=256),
    "llama, mxfp4 dht16, bytes": Case(
        model=LLAMA, recipe="amd-fdw-dht16", vocab_size=256
    ),
    "llama, nvfp4, bytes": Case(model=LLAMA, recipe=NVFP4, vocab_size=256),
    "llama, fp8, 4 micro-batches": Case(
        model=LLAMA, recipe="fp8", training={"micro_batch_size": 2}
    ),
    "llama, mxfp4, one sequence at a time": Case(
        model=LLAMA, recipe="mxfp4", vocab_size=256, training={"micro_batch_size": 1}
    ),
    "llama, mxfp4, few tokens": Case(
        model=LLAMA,
        recipe="mxfp4",
        vocab_size=256,
        training={"seq_len": 64, "batch_size": 2},
    ),
    "llama, mxfp4, long sequences": Case(
        model=LLAMA,
        recipe="mxfp4",
        vocab_size=256,
        training={"seq_len": 512, "batch_size": 4},
    ),
    "llama, quartet (mask), bytes": Case(model=LLAMA, recipe="quartet", vocab_size=256),
    "llama, tetrajet (double quantisation), bytes": Case(
        model=LLAMA, recipe="tetrajet", vocab_size=256
    ),
    "llama, mxfp4, weights in bf16": Case(
        model=LLAMA,
        recipe="mxfp4",
        vocab_size=256,
        training={"micro_batch_size": 2, "master_weights": "bf16"},
    ),
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


_ALLOCATION = torch._C._profiler._EventType.Allocation  # noqa: SLF001  the one place that tells


def measured_bytes(config: RunConfig) -> int:
    """Return the largest sum of tensors alive at once while a run is built and takes two steps on the CPU."""
    return _peak_bytes(
        lambda: time_steps(config, device="cpu", steps=1, warmup=1, repeats=1)
    )


def measured_bytes_of_one(config: RunConfig, devices: int) -> int:
    """Return the same of the first of several processes that train a run together."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        members = [
            context.Process(target=_member, args=(config, rank, devices, folder))
            for rank in range(devices)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        return int((Path(folder) / "peak").read_text())


def _member(config: RunConfig, rank: int, devices: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=devices
    )
    group = join_group("cpu")

    def two_steps() -> None:
        trainee = assemble(config, "cpu", Layout(group=group))
        shape = (config.training.batch_size, config.training.seq_len + 1)
        for window in np.random.default_rng(0).integers(
            0, config.vocab_size, (2, *shape)
        ):
            gradients(trainee, window, config.training.grad_clip)
            trainee.optimizer.step()
            trainee.optimizer.zero_grad(set_to_none=True)
            trainee.state.step += 1

    peak = _peak_bytes(two_steps)
    if rank == 0:
        (Path(folder) / "peak").write_text(str(peak))
    # with gloo's threads alive the interpreter's own end aborts now and then
    os._exit(0)


def _peak_bytes(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    roots = found.profiler.kineto_results.experimental_event_tree()
    at_the_top = [
        (root.start_time_ns, root.extra_fields.alloc_size)
        for root in roots
        if root.tag == _ALLOCATION
    ]
    changes = sorted(at_the_top + _changes(roots))
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def _changes(events: list[Any]) -> list[tuple[int, int]]:
    """Return (time, bytes) of every allocation, and with a minus of every end of one."""
    changes = []
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        found = [child for child in event.children if child.tag == _ALLOCATION]
        if event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            found = _lasting(found)
        changes += [
            (child.start_time_ns, child.extra_fields.alloc_size) for child in found
        ]
        waiting += [child for child in event.children if child.tag != _ALLOCATION]
    return changes


def _lasting(found: list[Any]) -> list[Any]:
    """Leave out what a product takes and gives back: without bf16 a CPU sums in an fp32 copy."""
    lasting: list[Any] = []
    for child in sorted(found, key=lambda child: child.start_time_ns):
        change = child.extra_fields
        taken = [
            one
            for one in lasting
            if one.extra_fields.ptr == change.ptr and one.extra_fields.alloc_size > 0
        ]
        if change.alloc_size < 0 and taken:
            lasting.remove(taken[-1])
        else:
            lasting.append(child)
    return lasting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1)
    devices = parser.parse_args().devices
    torch.set_num_threads(1)
    print(
        f"{'':<45} {'measured':>9} {'modelled':>9} {'off by':>7}   "
        + " ".join(f"{p:>11}" for p in PURPOSES)
    )
    for name, case in CASES.items():
        config, modelled = case.config(), case.modelled(devices)
        per_pass = config.training.micro_batch_size or 1
        if config.training.batch_size // per_pass % devices:
            continue
        measured = (
            measured_bytes(config)
            if devices == 1
            else measured_bytes_of_one(config, devices)
        )
        print(
            f"{name:<45} {measured / 1e6:7.1f}MB {modelled.total() / 1e6:7.1f}MB "
            f"{modelled.total() / measured - 1:+7.1%}   "
            + " ".join(f"{modelled[part] / 1e6:9.1f}MB" for part in PURPOSES),
            flush=True,
        )


if __name__ == "__main__":
    main()
