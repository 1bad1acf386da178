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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import first_line
from ablate.base.files import read_json, write_json_atomic
from ablate.execute.worker import LOST_PEER, TaskEnd, end_of, execute_run, follow_run, lost_run

if TYPE_CHECKING:
    from ablate.execute.pending_runs import RunRequest
    from ablate.train.group import Group


def execute_together(task: RunRequest) -> TaskEnd:
    """Execute one run on as many devices as its resources ask for, and wait for its end."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    wanted, run = task.resources, task.folder
    scratch = run.path / f".ray-train-{uuid.uuid4().hex[:8]}"
    trainer = TorchTrainer(
        _member,
        train_loop_config={"task": task, "ends": scratch},
        torch_config=TorchConfig(
            backend="nccl" if wanted.num_gpus else "gloo", timeout_s=round(2 * wanted.hang_after_sec)
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=wanted.devices_per_run,
            use_gpu=bool(wanted.num_gpus),
            resources_per_worker={"CPU": wanted.cpus, "GPU": wanted.num_gpus, **wanted.custom},
        ),
        run_config=ray.train.RunConfig(name=scratch.name, storage_path=str(run.path)),
    )
    fault, ends = "a process of the run ended", {}
    scratch.mkdir()
    try:
        trainer.fit()
    except Exception as error:  # what a process raised, in one of Ray's many wrappers
        fault = first_line(error)
    finally:
        for path in sorted(scratch.glob("end-*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                ends[path.name] = TaskEnd(**read_json(path))
        shutil.rmtree(scratch, ignore_errors=True)
    end = ends.pop("end-0.json", None) or lost_run(task, fault)
    # Another process's own fault explains more than the first one's, which is only that it lost a peer.
    cause = next((other for other in ends.values() if other.message != LOST_PEER), end)
    if not end.transient:
        return end
    if not cause.transient:
        with contextlib.suppress(OSError, ValueError):
            run.write_status(replace(run.status(), state="failed", message=cause.message))
    return cause


def _member(config: dict[str, Any]) -> None:
    """Ray Train calls this in each process of the run."""
    import torch
    from ray.train.torch import get_device

    from ablate.train.group import join_group

    device = str(get_device())
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # FSDP2 gathers on the process's current device
    task, group = replace(config["task"], device=device), join_group(device)
    end_path = Path(config["ends"]) / f"end-{group.rank}.json"
    begun: int | None = None
    if group.rank > 0:
        if (step := group.first(begun)) is not None:
            try:
                follow_run(task, group, step)
            except Exception as error:
                write_json_atomic(end_path, asdict(end_of(error)))
                raise
        return

    def begin(step: int) -> Group:
        nonlocal begun
        begun = step
        group.first(step)
        return group

    try:
        end = execute_run(task, begin)
    finally:
        if begun is None:  # the others still wait for the first message
            group.first(None)
    write_json_atomic(end_path, asdict(end))
    if begun is not None and (end.state == "failed" or end.transient):
        raise RuntimeError(end.message)  # makes Ray Train end the others, which wait for this process
