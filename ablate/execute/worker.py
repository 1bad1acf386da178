"""One run inside a worker process: read its configuration, train, write its files. No Ray and no MLflow here.

How it fails: an exception becomes the state ``failed`` with its last line, and its traceback goes to the
attempt's log; the worker lives on for the next run. A killed worker leaves ``running`` behind; the next
attempt starts the metrics file anew, because without a checkpoint the run starts from its first step.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.store import END_STATES, RunDir, State, Status, write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_TRAINER = "ablate.train:train"


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """What a worker needs to know; paths are on the shared storage."""

    run_dir: str
    tokens_dir: str
    stop_path: str
    threads: int
    device: str
    git_commit: str | None
    resources: dict[str, Any] = field(default_factory=dict)
    trainer: str = DEFAULT_TRAINER


def execute_run(task: RunTask) -> State:
    """Execute one run and return its state. Never raises for a fault of the run itself."""
    run = RunDir(Path(task.run_dir))
    before = run.status()
    if before.state in END_STATES:
        return before.state  # a task that Ray repeats after the result was written
    attempt = before.attempt + 1
    status = Status(state="running", attempt=attempt, started_unix=time.time())
    run.write_status(status)
    run.metrics_path.write_bytes(b"")
    log = run.attempt_log(attempt)
    log.parent.mkdir(exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            status = _train(task, run, status)
        except KeyboardInterrupt:
            status = replace(status, state="interrupted", message="interrupted")
        except Exception as error:  # whatever a trainer raises is this run's failure, not the study's
            traceback.print_exc()
            status = replace(status, state="failed", message=_one_line(error))
    run.write_status(replace(status, ended_unix=time.time()))
    return status.state


def _one_line(error: Exception) -> str:
    """Say what a run failed of, with the way out where there is a usual one."""
    from ablate.execute.preflight import UnfitDeviceError

    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, UnfitDeviceError):
        return lines[0]
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return f"out of GPU memory ({lines[0]}); a smaller training.micro_batch_size needs less"
    if any(word in lines[0] for word in ("CUDA error", "HIP error", "CUDA driver", "NVML")):
        return f"the GPU failed: {lines[0]}; `ablate doctor` tests it"
    return f"{name}: {lines[0]}"


def _train(task: RunTask, run: RunDir, status: Status) -> Status:
    import torch
    from pydantic import TypeAdapter

    from ablate.config import ResourcesConfig, RunConfig
    from ablate.data import load, open_tokens
    from ablate.execute.environment import describe_environment
    from ablate.execute.preflight import fit_choices, run_self_tests

    torch.set_num_threads(task.threads)
    config = TypeAdapter(RunConfig).validate_python(run.config())
    resources = ResourcesConfig(**task.resources)
    choices = fit_choices(config, resources, task.device)
    tests = run_self_tests(choices, task.device, allow_failed=resources.allow_failed_self_test)
    write_json_atomic(
        run.environment_path, describe_environment(choices, tests, task.device, task.git_commit)
    )
    stop = Path(task.stop_path)
    result = _trainer(task.trainer)(
        config,
        lambda row: run.append_metric({**row, "time_unix": time.time()}),
        tokens=open_tokens(load(Path(task.tokens_dir))) if task.tokens_dir else None,
        should_stop=stop.exists,
        device=task.device,
    )
    return replace(status, state=result.state, tokens=result.tokens, step=result.step, message=result.message)


def _trainer(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    trainer: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return trainer
