"""A run on several devices: Ray Train starts a process on each; the first executes the run, others follow.

The first process holds the lease and writes metrics, status and log, as on a single device.

How it fails: a process that dies ends the run's attempt, and the driver retries from the last checkpoint. If
the first process fails, it also ends the others, which would wait for it forever.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import first_line
from ablate.base.files import read_json, write_json_atomic
from ablate.execute.task_end import LOST_PEER, TaskEnd, end_of
from ablate.execute.worker import execute_run, lost_run

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.execute.pending_runs import RunRequest
    from ablate.train.group import Group


def execute_together(task: RunRequest) -> TaskEnd:
    """Execute one run on as many devices as its resources ask for, and wait for its end."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    run = task.folder
    resources = task.resources
    scratch = run.path / f".ray-train-{uuid.uuid4().hex[:8]}"
    trainer = TorchTrainer(
        _member,
        train_loop_config={"task": task, "ends": scratch},
        torch_config=TorchConfig(
            backend="nccl" if resources.num_gpus else "gloo",
            timeout_s=round(2 * resources.hang_after_sec),
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.devices_per_run,
            use_gpu=bool(resources.num_gpus),
            resources_per_worker=task.bundle,
        ),
        run_config=ray.train.RunConfig(name=scratch.name, storage_path=str(run.path)),
    )
    fault = "a process of the run ended"
    ends: dict[int, TaskEnd] = {}
    scratch.mkdir()
    try:
        trainer.fit()
    except Exception as error:  # what a process raised, in one of Ray's many wrappers
        fault = first_line(error)
    finally:
        for rank in range(resources.devices_per_run):
            with contextlib.suppress(OSError, ValueError, TypeError):
                ends[rank] = TaskEnd(**read_json(_end_path(scratch, rank)))
        shutil.rmtree(scratch, ignore_errors=True)
    end = ends.pop(0, None) or lost_run(task, fault)
    # Another process's own fault explains more than the first one's, which is only that it lost a peer.
    causes = [cause for cause in ends.values() if cause.message != LOST_PEER]
    if not end.transient or not causes:
        return end
    if not causes[0].transient:
        with contextlib.suppress(OSError, ValueError):
            failed = replace(run.status(), state="failed", message=causes[0].message)
            run.write_status(failed)
    return causes[0]


def _end_path(folder: Path, rank: int) -> Path:
    return folder / f"end-{rank}.json"


def _member(config: dict[str, Any]) -> None:
    """Ray Train calls this in each process of the run."""
    import torch
    from ray.train.torch import get_device

    from ablate.execute.training import follow
    from ablate.train.group import join_group

    device = str(get_device())
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # FSDP2 gathers on the process's current device
    task = replace(config["task"], device=device)
    group = join_group(device)
    end_path = _end_path(config["ends"], group.rank)
    if group.rank > 0:
        step: int | None = group.first(None)
        if step is not None:
            try:
                follow(task, group, step)
            except Exception as error:
                write_json_atomic(end_path, asdict(end_of(error)))
                raise
        return
    has_begun = False

    def begin(step: int) -> Group:
        nonlocal has_begun
        has_begun = True
        group.first(step)
        return group

    try:
        end = execute_run(task, begin)
    finally:
        if not has_begun:  # the others still wait for the first message
            group.first(None)
    write_json_atomic(end_path, asdict(end))
    if has_begun and (end.state == "failed" or end.transient):
        # makes Ray Train end the others, which wait for this process
        raise RuntimeError(end.message)
