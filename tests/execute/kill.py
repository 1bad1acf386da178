"""Runs that are killed: each attempt in a forked process, which may die at any operation on a file.

Forking a process that has torch loaded makes an attempt cheap enough for hundreds of kills.
"""

import json
import os
import signal
import sys
from dataclasses import asdict

import safetensors.torch  # noqa: F401  what a child would load anew each time is loaded before it is forked
import torch
import torch._dynamo

from ablate.data import prepare
from ablate.execute.environment import code_digest
from ablate.execute.pending_runs import RunRequest
from ablate.execute.worker import execute_run
from ablate.recipes import PRESETS
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    ResourcesConfig,
    RunConfig,
    TrainingConfig,
    config_from_json,
)

torch.set_num_threads(1)
code_digest()
# Autograd decides at a process's first backward pass whether it needs threads, and a process with them cannot
# be forked. Tests with fake tensors of a GPU make it think so. All modules are imported before any test runs.
torch.ones(1, requires_grad=True).sum().backward()


def tiny_config(seed, steps=8):
    """A run of a few steps with every kind of stream: RHT, SR, delayed nothing; about a tenth of a second."""
    return RunConfig(
        model=ModelConfig(width=64, layers=1, heads=2, ffn=64), data=data(), data_digest="x", vocab_size=256,
        training=TrainingConfig(
            tokens=64 * steps, seq_len=64, batch_size=1, eval_every_tokens=128, eval_tokens=64,
            warmup_tokens=64,
        ),
        recipe=PRESETS["tseng"].recipe, backend="auto", seed=seed,
    )  # fmt: skip


def data():
    return DataConfig(source="stdlib", tokenizer="bytes", max_bytes=200_000)


def request_of(run, config, tokens_dir=None, **resources):
    return RunRequest(
        run_id=run.run_id, folder=run, stop_path=run.path.parent / "stop", config=config,
        tokens_dir=tokens_dir, resources=ResourcesConfig(**resources),
    )  # fmt: skip


def task_of(run, storage, **resources):
    folder = prepare(data(), storage / "tokens").folder
    config = config_from_json(run.config())
    return request_of(run, config, folder, **{"checkpoint_every_sec": 0.0, **resources})


def in_child(work):
    """Start work in a forked process; returns its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def wait_for(pid):
    """Return how a child ended: its exit code, or minus the signal that killed it."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def execute_and_die_at(task, operation):
    """Return work that is killed just before its n-th operation on a file of the run."""

    def work():
        operations_left = [operation]

        def count():
            operations_left[0] -= 1
            if operations_left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(event, arguments):
            writes = event == "open" and int(arguments[2]) & (os.O_WRONLY | os.O_RDWR)
            if (
                writes or event in ("os.rename", "os.link", "os.remove", "os.truncate")
            ) and str(arguments[0]).startswith(str(task.folder.path)):
                count()

        sys.addaudithook(audit)
        for name in ("write", "fsync"):
            real = getattr(os, name)
            setattr(os, name, lambda *a, real=real: (count(), real(*a))[1])
        execute_run(task)

    return work


def timeless(rows):
    times = ("time_unix", "tokens_per_sec")
    return [
        {key: value for key, value in row.items() if key not in times} for row in rows
    ]


def rows_in(path):
    """Read the rows of a file, times left out."""
    return timeless(map(json.loads, path.read_text().splitlines()))


def outcome_of(run):
    """Return what must not depend on how often a run was killed: its end and its rows."""
    status = run.status()
    return (
        status.state,
        status.tokens,
        status.step,
        status.message,
        rows_in(run.metrics_path),
    )


def make_run(run, seed, steps=8):
    run.create(asdict(tiny_config(seed, steps)))
    return run
