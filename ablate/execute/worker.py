"""One run inside a worker process: claim it, resume from its last checkpoint, train, write its files.

There is no Ray and no MLflow here. Whenever a worker dies, its files are enough for the next attempt to end
with the same bits.

How it fails: after an exception the run is ``failed`` with the first line of the message, and the traceback
is in the attempt's log. Faults that may pass are marked for the driver to retry. After a GPU error or a hang
the process ends, because its state cannot be trusted.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import shutil
import signal
import threading
import traceback
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, first_line
from ablate.base.files import open_unlinked, restrict_umask, write_record
from ablate.execute.orphans import end_with_this_process
from ablate.run.command import Command
from ablate.run.ids import run_id
from ablate.run.log_text import last_bytes
from ablate.store import END_STATES, RunDir, State, Status
from ablate.store.checkpoints import load_newest
from ablate.store.leases import Leases
from ablate.store.metrics import MetricsWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    from ablate.diagnose.recorder import Recorder
    from ablate.execute.pending_runs import RunRequest
    from ablate.store.checkpoints import Checkpoint
    from ablate.train.group import Group
    from ablate.train.step import Trainee

    Begin = Callable[[int], Group]

EXIT_GPU = 74
"""Exit code of a worker whose GPU failed (EX_IOERR)."""
LOST_PEER = "another process of the run is gone"


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """The end of a task. ``state``: the run's; ``running`` if another process executes it.

    ``transient``: the fault is not the run's own, and a retry may help.
    """

    state: State
    transient: bool = False
    message: str | None = None


def execute_run(task: RunRequest, begin: Begin | None = None) -> TaskEnd:
    """Execute one run. Never raises for a fault of the run itself.

    ``begin`` is called with the step after which training begins, when all is ready. It returns the group of
    the processes that train the run together. None: this process trains alone.
    """
    run = task.folder
    restrict_umask(run.path)
    end_with_this_process()
    if (state := run.state()) in END_STATES:  # handed over again after the result was written
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        return TaskEnd(state=state)
    lease = Leases(run.attempts).claim(task.given_up)
    if lease is None:
        return TaskEnd(state="running")
    # Another process may have ended the run between the check and the claim.
    if (state := run.state()) in END_STATES:
        lease.end("superfluous")
        return TaskEnd(state=state)
    try:
        return _attempt(task, run, lease, begin)
    except (OSError, KeyboardInterrupt) as error:
        # The status could not be written, or the task was cancelled before it trained: the next attempt
        # continues from the files.
        end = replace(end_of(error), state="interrupted", transient=isinstance(error, OSError))
        with contextlib.suppress(OSError):
            lease.end("interrupted", end.message)
        return end


def _attempt(task: RunRequest, run: RunDir, lease: Leases, begin: Begin | None) -> TaskEnd:
    attempt, started = lease.record.attempt, run.status().started_unix or lease.now()
    status = Status(state="running", attempt=attempt, started_unix=started)
    run.write_status(status)
    transient, broken_gpu = False, False
    with (
        open_unlinked(run.attempt_log(attempt), "a") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            status, transient = _train(task, run, lease, status, begin)
        except (Exception, KeyboardInterrupt) as error:  # a trainer's exception fails its run alone
            if isinstance(error, UserError) and error.__cause__ is None:
                print(error)
            else:
                traceback.print_exc()
            end, broken_gpu = end_of(error, task.resources.num_gpus), _is_gpu_fault(error)
            status, transient = replace(status, state=end.state, message=end.message), end.transient
        if not lease.is_mine():
            print("another worker has taken this run over")
            return TaskEnd(state="running")
    if status.state == "interrupted" and run.stop_path.exists():
        reason = run.stop_path.read_text(encoding="utf-8", errors="replace")
        status, transient = replace(status, state="stopped", message=reason), False
    run.write_status(replace(status, ended_unix=lease.now()), status.files)
    lease.end(status.state, status.message)
    run.stop_path.unlink(missing_ok=True)
    if status.state in END_STATES:
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    if broken_gpu:
        os._exit(EXIT_GPU)
    return TaskEnd(state=status.state, transient=transient, message=status.message)


def _train(
    task: RunRequest, run: RunDir, lease: Leases, status: Status, begin: Begin | None
) -> tuple[Status, bool]:
    """Train from the last good checkpoint; return the final status, and whether what ended it may pass."""
    from ablate.execute.side_tasks import Watch, sampled

    resources, terminated = task.resources, threading.Event()

    is_ours = task.config.trainer is task.trainer is None

    def should_stop() -> bool:
        if is_ours:  # it asks once a step; a user's trainer may also ask while it hangs
            watch.progress()
        return watch.lost or terminated.is_set() or task.stop_path.exists() or run.stop_path.exists()

    with (
        Watch(lease, resources.hang_after_sec) as watch,
        sampled(run.system_path, lambda: watch.tokens),
        contextlib.ExitStack() as files,
    ):
        # Schedulers send SIGTERM before they kill.
        files.enter_context(on_signal(lambda *_: terminated.set(), signal.SIGTERM))
        if isinstance(task.config.trainer, Command):  # the device is the command's: it is not looked at
            from ablate.execute.command import train_by_command

            result, hashes = train_by_command(task, lease, watch=watch, should_stop=should_stop)
            transient = result.transient
        else:
            # Loaded inside the block, so that the worker shows meanwhile that it lives.
            import torch

            from ablate.backends.select import fit_choices, run_self_tests
            from ablate.execute.environment import describe_environment, fingerprint
            from ablate.train.group import ALONE

            torch.set_num_threads(resources.cpus)
            if task.device == "cuda":
                _hold_to_share(resources.num_gpus)
            choices = fit_choices(task.config, resources, task.device)
            tests = run_self_tests(task.config, task.device, allow_failed=resources.allow_failed_self_test)
            start, told = load_newest(run.checkpoints, task.prefix)
            for line in told:
                print(line, flush=True)
            step, before = (start.step, start.fingerprints) if start else (0, ())
            own = fingerprint(task.device, resources.cpus)
            fingerprints = (*(one for one in before if one != own), own)
            lease.note(fingerprint=own, resumed_from_step=step)
            if step:
                print(f"going on from the checkpoint after step {step}", flush=True)
            if len(fingerprints) > 1:
                print(
                    f"steps before it were trained by other arithmetic: {', '.join(before)}; here it is {own}"
                )
            environment = describe_environment(
                choices, tests, task.device, task.git_commit,
                fingerprints=fingerprints, world_size=resources.devices_per_run,
            )  # fmt: skip
            if is_ours:
                environment["step_eager_because"] = None
            write_record(run.environment_path, environment)

            def on_eager(reason: str) -> None:
                print(f"step: eager, because {reason}", flush=True)
                write_record(run.environment_path, environment | {"step_eager_because": reason})

            kept = start.rows if start else {}
            paths = [run.metrics_path, *[run.diagnostics_path] * bool(task.diagnostics)]
            paths += [run.routes_path] * task.records
            writers = {
                path: files.enter_context(MetricsWriter(path, kept.get(path.name, 0))) for path in paths
            }
            result = _call_trainer(
                task,
                begin(step) if begin else ALONE,
                start,
                writers=writers,
                lease=lease,
                fingerprints=fingerprints,
                on_metrics=watch.writing(writers[run.metrics_path]),
                should_stop=should_stop,
                diagnosed=watch.writing(writers[run.diagnostics_path]) if task.diagnostics else None,
                on_eager=on_eager,
            )
            hashes = {writer.name: writer.sync()[1] for writer in writers.values()}
            transient = False
    preempted = terminated.is_set() and result.state not in END_STATES
    ended = replace(
        status,
        state=result.state,
        tokens=result.tokens,
        step=result.step,
        message="preempted (SIGTERM)" if preempted else result.message,
        files=hashes,
    )
    return ended, preempted or transient


def _hold_to_share(gpus: float) -> None:
    """Let this process take no more of its GPU's memory than its run's share, so that others keep theirs.

    A process that has trained another run before gives back what that left.
    """
    import torch

    from ablate.plan.shares import CONTEXT_BYTES

    gc.collect()
    torch.cuda.empty_cache()
    if gpus < 1:
        gpus -= CONTEXT_BYTES / torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(min(max(gpus, 0.0), 1.0), 0)


def follow_run(task: RunRequest, group: Group, step: int) -> None:
    """Train together with the process that executes the run, from its checkpoint after ``step``.

    Raises:
        Exception: any exception of the trainer; the process that started this one ends the others.
    """
    import torch

    from ablate.store.checkpoints import load_step

    restrict_umask(task.folder.path)
    end_with_this_process()
    torch.set_num_threads(task.resources.cpus)
    start = load_step(task.folder.checkpoints, step) if step else None
    _call_trainer(task, group, start, on_metrics=lambda _: None, should_stop=lambda: False)


def lost_run(task: RunRequest, fault: str) -> TaskEnd:
    """Find the end of a task whose process died: its result, or ``interrupted`` with the ledger's reason.

    A process that hung has written its stacks into its log, and no more.
    """
    run = task.folder
    if (state := run.state()) in END_STATES:
        return TaskEnd(state=state)
    leases, message = Leases(run.attempts), f"worker lost: {fault}"
    if (record := leases.read(attempt := leases.latest())) is not None:
        leases.record = record
        with contextlib.suppress(OSError):
            if record.outcome is None and _TIMEOUT.search(last_bytes(run.attempt_log(attempt))):
                leases.end("interrupted", f"no progress for {task.resources.hang_after_sec:.0f} s")
        message = leases.record.message or message
    return TaskEnd(state="interrupted", transient=True, message=message)


def _call_trainer(
    task: RunRequest,
    group: Group,
    start: Checkpoint | None,
    *,
    writers: Mapping[Path, MetricsWriter] = MappingProxyType({}),
    lease: Leases | None = None,
    fingerprints: Sequence[str] = (),
    diagnosed: Callable[[dict[str, Any]], None] | None = None,
    on_eager: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Any:
    """Call the user's trainer, or ours; only ours takes a layout and an observer."""
    from ablate.data import load, open_tokens
    from ablate.execute import own_trainer
    from ablate.execute.side_tasks import Keeper
    from ablate.train import train
    from ablate.train.routes import record, replay

    name, resources, run = task.config.trainer or task.trainer, task.resources, task.folder
    options |= {
        "tokens": open_tokens(load(task.tokens_dir)) if task.tokens_dir else None,
        "device": task.device,
        "checkpoints": Keeper(
            run.checkpoints,
            [*writers.values()],
            start,
            lease,
            group=group,
            fingerprints=fingerprints,
            every_sec=resources.checkpoint_every_sec,
            every_tokens=resources.checkpoint_every_tokens,
            prefixes=task.prefixes,
        ),
    }
    if name is None:
        from ablate.train.group import Layout

        options["layout"] = Layout(
            group=group,
            checkpoint_activations=resources.activation_checkpointing,
            on_eager=on_eager,
        )

        def observe(trainee: Trainee) -> Recorder | None:
            if (original := task.config.original) is not None:
                replay(trainee, RunDir(run.path.with_name(run_id(original))).routes_path)
            elif task.records:
                record(trainee, writers[run.routes_path].append)
            if (settings := task.diagnostics) is None or diagnosed is None:
                return None
            from ablate.diagnose import recorder

            return recorder.Recorder(trainee, settings, diagnosed)

        result = train(task.config, observe=observe, **options)
    else:
        assert isinstance(name, str)
        result = own_trainer.call(name, task.config, follows=lease is None, **options)
    if task.keep_weights and result.trainee is not None and group.first(lease is None or lease.is_mine()):
        from ablate.train.snapshot import save_weights

        model = result.trainee.module
        save_weights(model, group, task.config, run.weights, tokenizer=task.tokens_dir)
    return result


@contextlib.contextmanager
def on_signal(
    handle: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Handle these signals with ``handle`` during the block; outside the main thread nothing is done."""
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main thread
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


_TIMEOUT = re.compile(rb"^Timeout \([\d:.]+\)!$", re.MULTILINE)
"""How faulthandler begins what it writes of a process that hung."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (*_FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)


def _is_gpu_fault(error: BaseException) -> bool:
    return any(word in str(error) for word in ("CUDA error", "HIP error", "CUDA driver", "NVML"))


def end_of(error: BaseException, gpus: float = 1.0) -> TaskEnd:
    """Turn an error of a process into the end of its task; the message names the usual remedy, if any.

    ``gpus``: those of the process; below 1 it was held to a share of one.
    Faults of the storage, the GPU or another process are ``transient``; a bug or too little memory is not.
    """
    if isinstance(error, KeyboardInterrupt):
        return TaskEnd(state="interrupted", message="interrupted")
    from torch import distributed

    from ablate.backends.select import UnfitDeviceError

    message, name, may_pass = first_line(error), type(error).__name__, False
    if isinstance(error, OSError):
        may_pass = error.errno in _PASSING
        if error.errno in _FULL:
            message = "no space left on the storage; free some and run the same command again"
        else:
            message = f"{name}: {message}"
    elif name == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in message:
        memory = "GPU memory" if name == "OutOfMemoryError" else "memory"
        message = f"out of {memory} ({message}); a smaller training.micro_batch_size needs less"
        if gpus < 1:
            message += f", and a resources.gpus above its {gpus:g} of the GPU gives it more"
    elif (distributed.is_available() and isinstance(error, distributed.DistError)) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    ):
        may_pass, message = True, LOST_PEER
    elif _is_gpu_fault(error):
        may_pass, message = True, f"the GPU failed: {message}; `ablate check device cuda` tests it"
    elif not isinstance(error, UserError | UnfitDeviceError):
        message = f"{name}: {message}"
    return TaskEnd(state="interrupted" if may_pass else "failed", transient=may_pass, message=message)
