"""Trainers for tests of the execution, imported by name inside Ray's workers."""

import ctypes
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import torch

from ablate.base.files import write_json_atomic
from ablate.execute.orphans import end_after
from ablate.train.loop import TrainResult

HANG_AFTER_SEC = 3600.0


def train_row(tokens, step, loss):
    rates = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_sec": 100.0}
    return {"kind": "train", "tokens": tokens, "step": step, "loss": loss, **rates}


def quick(config, on_metrics, *, tokens, should_stop, checkpoints, device):
    loss = 3.0 + config.seed
    for step in range(1, 4):
        on_metrics(train_row(10 * step, step, loss))
        on_metrics(
            {"kind": "eval", "tokens": 10 * step, "step": step, "val_loss": loss / step}
        )
    return TrainResult(state="finished", tokens=30, step=3)


def one_fails_and_one_diverges(config, on_metrics, **options):
    """Seed 1 has a bug, seed 2 diverges, seed 3 is too large."""
    if config.seed == 1:
        print("about to fail")
        raise RuntimeError("a bug in the trainer\nwith a second line")
    if config.seed == 2:
        return TrainResult(
            state="diverged", tokens=10, step=1, message="non-finite training loss"
        )
    if config.seed == 3 and first_time(options["checkpoints"]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    return quick(config, on_metrics, **options)


def only_seed_0_ends(config, on_metrics, **options):
    """Seed 0 ends at once; the others train one step, and then wait for the stop."""
    if config.seed == 0:
        return quick(config, on_metrics, **options)
    on_metrics(train_row(10, 1, 3.0))
    _ask_on(options["should_stop"])
    return TrainResult(
        state="interrupted", tokens=0, step=0, message="stopped on request"
    )


def first_time(checkpoints):
    """Tell whether this run was never here before."""
    marker = checkpoints.folder.parent / "marker"
    if marker.exists():
        return False
    marker.touch()
    return True


def _once(fault, *, hangs=False):
    """Return a trainer that has a fault after its first row, if the run was never here before."""

    def trainer(config, on_metrics, *, checkpoints, **options):
        options["checkpoints"] = checkpoints
        if first_time(checkpoints):
            on_metrics(train_row(1, 1, 9.0))
            if hangs:
                _almost_too_long(checkpoints.lease)
            fault(options["should_stop"])
        return quick(config, on_metrics, **options)

    return trainer


def _almost_too_long(lease):
    """Leave 10 s of ``HANG_AFTER_SEC``, which cannot pass while a run starts."""
    beats = threading.Semaphore(0)
    beat = lease.beat
    lease.beat = lambda: (beat(), beats.release())
    for _ in range(2):  # it has noticed the progress before
        beats.acquire()
    end_after(10, sys.stderr)


def _ask_on(should_stop):
    while not should_stop():
        time.sleep(0.1)


def _raise(error):
    raise error


dies_once = _once(lambda _: os.kill(os.getpid(), signal.SIGKILL))
hangs_once = _once(lambda _: time.sleep(3600), hangs=True)
asks_on_once = _once(_ask_on, hangs=True)
# It keeps Python's lock.
never_returns_to_python_once = _once(
    lambda _: ctypes.PyDLL(None).sleep(3600), hangs=True
)
gpu_fails_once = _once(
    lambda _: _raise(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
)
disk_is_full_once = _once(
    lambda _: _raise(OSError(errno.ENOSPC, "No space left on device"))
)


def starts_others(config, on_metrics, **options):
    """Start processes in every way that outlives a parent, write down their ids, and never end."""
    sleep = "import os, sys, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    plain = subprocess.Popen(
        [sys.executable, "-c", sleep], stdout=subprocess.PIPE, text=True
    )
    away = subprocess.Popen(
        [sys.executable, "-c", f"import os\nif os.fork(): os._exit(0)\nexec({sleep!r})"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if not (forked := os.fork()):
        os.setsid()
        time.sleep(600)
        os._exit(0)
    pids = [int(plain.stdout.readline()), int(away.stdout.readline()), forked]
    write_json_atomic(options["checkpoints"].folder.parent / "started.json", pids)
    on_metrics(train_row(1, 1, 9.0))
    if config.seed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def leaves_a_child(config, on_metrics, **options):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (options["checkpoints"].folder.parent / "started").write_text(str(child.pid))
    return quick(config, on_metrics, **options)


def slow(config, on_metrics, **options):
    def late(row):
        time.sleep(0.2)
        on_metrics(row)

    return quick(config, late, **options)


def waits_for_another_node(config, on_metrics, **options):
    """Wait after the first row until the study's folder has a file ``another-node``; then as ``slow``."""

    def row(row):
        on_metrics(row)
        while not (options["checkpoints"].folder.parents[2] / "another-node").exists():
            time.sleep(0.05)

    return slow(config, row, **options)


def together(config, on_metrics, **options):
    """Train made-up tokens with the shared trainer in a group."""
    import numpy as np

    from ablate.train import train
    from ablate.train.group import Layout, join_group

    tokens = np.arange(60_000) % 61, np.arange(10_000) % 61
    layout = Layout(group=join_group(options["device"]))
    return train(config, on_metrics, layout=layout, **options | {"tokens": tokens})


def second_process_dies_once(config, on_metrics, **options):
    """As ``together``, but the second process dies in the third step, if there is no checkpoint yet."""
    from torch import distributed

    is_fresh = options["checkpoints"].load() is None
    asked = itertools.count(1)

    def should_stop():
        if is_fresh and next(asked) == 3 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return together(config, on_metrics, **options | {"should_stop": should_stop})


def _fails(rank, which):
    def trainer(*_, **options):
        from torch import distributed

        if distributed.get_rank() == rank:
            raise ValueError(f"a bug in the {which} process")
        distributed.barrier()

    return trainer


first_process_fails = _fails(0, "first")
second_process_fails = _fails(1, "second")
