"""FSDP2: one training run shared by all devices of this machine, beside the same run on one of them.

How it fails: processes that have not ended after some minutes, or one that ends by an error, fail the check.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed

from ablate.backends.testing.check import Check
from ablate.check.setup import RECIPES, config_of, skipped
from ablate.check.training import SHARE_APART, VOCABULARY
from ablate.run.config import ModelConfig
from ablate.train.group import ONE_DEVICE, Layout, join_group
from ablate.train.loop import assemble, gradients, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.check.setup import Setup

_STEPS = 3
_WAIT_SEC = 300.0
_MICRO = 8
"""Sequences of a micro-batch, of which each device has one."""
_MODEL = ModelConfig(width=128, layers=2, heads=2, ffn=256)


def fsdp2(setup: Setup) -> Iterator[Check]:
    """Yield a sharded run of each recipe beside one device."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count() if setup.on_gpu else 0)]
    if len(devices) < 2:
        yield skipped("devices", "FSDP2 needs two GPUs")
        return
    for backend, name, _ in setup.trained():
        yield Check(backend=backend, of=name, run=partial(_beside_one, devices, backend, name))


def _beside_one(devices: Sequence[str], backend: str, recipe: str) -> str:
    sequences = _MICRO * len(devices)
    alone, together = (
        sharded_losses(chosen, backend, recipe, sequences) for chosen in (devices[:1], devices)
    )
    apart = max(abs(one - other) for one, other in zip(alone, together, strict=True))
    detail = f"{len(devices)} devices: losses at most {apart:.5f} from one device's in {_STEPS} steps"
    assert apart < SHARE_APART * alone[0], detail
    return detail


def sharded_losses(devices: Sequence[str], backend: str, recipe: str, sequences: int) -> list[float]:
    """Train a small model, a process for each device; return the losses of its steps, nats per token.

    ``sequences``: of a step, on all devices together.

    Raises:
        RuntimeError: a process failed, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawned = get_context("spawn")
        members = [
            spawned.Process(
                target=_member, args=(rank, devices, folder, backend, recipe, sequences), daemon=True
            )
            for rank in range(len(devices))
        ]
        for member in members:
            member.start()
        for member in members:
            member.join(_WAIT_SEC)
        codes = [member.exitcode for member in members]
        for member in members:
            member.kill()
        if any(codes):
            raise RuntimeError(f"exit codes of the processes: {codes}")
        if None in codes:
            raise RuntimeError(f"no end after {_WAIT_SEC:.0f} s")
        losses: list[float] = json.loads((Path(folder) / "losses").read_text(encoding="utf-8"))
        return losses


def _member(
    rank: int, devices: Sequence[str], folder: str, backend: str, recipe: str, sequences: int
) -> None:
    """Train as one process of a group; the first writes the losses."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout, shared = ONE_DEVICE, len(devices) > 1
    if shared:
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/meet", rank=rank, world_size=len(devices),
        )  # fmt: skip
        layout = Layout(group=join_group(device.type))
    config = config_of(
        _MODEL, RECIPES[recipe], backend, VOCABULARY,
        tokens=sequences * 32 * _STEPS, seq_len=32, batch_size=sequences, micro_batch_size=_MICRO,
    )  # fmt: skip
    losses = []
    trainee = assemble(config, str(device), layout)
    window = np.random.default_rng(0).integers(0, VOCABULARY, (sequences, config.training.seq_len + 1))
    for _ in range(_STEPS):
        losses.append(gradients(trainee, window, config.training.grad_clip)[0])
        take_step(trainee)
    if rank == 0:
        (Path(folder) / "losses").write_text(json.dumps(losses), encoding="utf-8")
    if shared:
        distributed.destroy_process_group()
