"""One run inside a worker process: claim it, resume from its last checkpoint, train, write its files.

There is no Ray and no MLflow here. Whenever a worker dies, its files are enough for the next attempt to end
with the same bits.

How it fails: after an exception the run is ``failed`` with the first line of the message, and the traceback
is in the attempt's log. Faults that may pass are marked for the driver to retry. After a GPU error or a hang
the process ends, because its state cannot be trusted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.base.files import open_unlinked, restrict_umask
from ablate.execute.orphans import end_with_this_process
from ablate.execute.task_end import TaskEnd, end_of, is_gpu_fault
from ablate.run.command import Command
from ablate.run.log_text import last_bytes
from ablate.store import END_STATES, Status
from ablate.store.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ablate.execute.command_follower import Follower
    from ablate.execute.pending_runs import RunRequest
    from ablate.train import TrainResult
    from ablate.train.group import Group

    Begin = Callable[[int], Group]

EXIT_GPU = 74
"""Exit code of a worker whose GPU failed (EX_IOERR)."""
_TIMEOUT = re.compile(rb"^Timeout \([\d:.]+\)!$", re.MULTILINE)
"""How faulthandler begins what it writes of a process that hung."""


def execute_run(task: RunRequest, begin: Begin | None = None) -> TaskEnd:
    """Execute one run. Never raises for a fault of the run itself.

    ``begin`` is called with the step after which training begins, when all is ready. It returns the group of
    the processes that train the run together. None: this process trains alone.
    """
    run = task.folder
    restrict_umask(run.path)
    end_with_this_process()
    # handed over again after the result was written
    if (state := run.state()) in END_STATES:
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
        return _attempt(task, lease, begin)
    except (OSError, KeyboardInterrupt) as error:
        # The status could not be written, or the task was cancelled before it trained: the next attempt
        # continues from the files.
        end = replace(
            end_of(error), state="interrupted", transient=isinstance(error, OSError)
        )
        with contextlib.suppress(OSError):
            lease.end("interrupted", end.message)
        return end


def _attempt(task: RunRequest, lease: Leases, begin: Begin | None) -> TaskEnd:
    """Train in the attempt that ``lease`` has claimed, and write how it ended."""
    run = task.folder
    attempt = lease.record.attempt
    started = run.status().started_unix or lease.now()
    status = Status(state="running", attempt=attempt, started_unix=started)
    run.write_status(status)
    transient = False
    is_gpu_broken = False
    with (
        open_unlinked(run.attempt_log(attempt), "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            status, transient = _train(task, lease, status, begin)
        except (Exception, KeyboardInterrupt) as error:
            # a trainer's exception fails its run alone
            if isinstance(error, UserError) and error.__cause__ is None:
                print(error)
            else:
                traceback.print_exc()
            end = end_of(error, task.resources.num_gpus)
            status = replace(status, state=end.state, message=end.message)
            transient = end.transient
            is_gpu_broken = is_gpu_fault(error)
        if not lease.is_mine():
            print("another worker has taken this run over")
            return TaskEnd(state="running")
    if status.state == "interrupted" and run.stop_path.exists():
        reason = run.stop_path.read_text(encoding="utf-8", errors="replace")
        status = replace(status, state="stopped", message=reason)
        transient = False
    run.write_status(replace(status, ended_unix=lease.now()), status.files)
    lease.end(status.state, status.message)
    run.stop_path.unlink(missing_ok=True)
    if status.state in END_STATES:
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    if is_gpu_broken:
        os._exit(EXIT_GPU)
    return TaskEnd(state=status.state, transient=transient, message=status.message)


def _train(
    task: RunRequest, lease: Leases, status: Status, begin: Begin | None
) -> tuple[Status, bool]:
    """Train from the last good checkpoint; return the final status, and whether what ended it may pass."""
    from ablate.execute.side_tasks import Watch, sampled

    run = task.folder
    terminated = threading.Event()
    end: TrainResult | Follower
    is_builtin = task.config.trainer is task.trainer is None

    def should_stop() -> bool:
        # it asks once a step; a user's trainer may also ask while it hangs
        if is_builtin:
            watch.progress()
        return (
            watch.lost
            or terminated.is_set()
            or task.stop_path.exists()
            or run.stop_path.exists()
        )

    transient = False
    with (
        Watch(lease, task.resources.hang_after_sec) as watch,
        sampled(run.system_path, lambda: watch.tokens),
        # Schedulers send SIGTERM before they kill.
        on_signal(lambda *_: terminated.set(), signal.SIGTERM),
    ):
        # the device is the command's: it is not looked at
        if isinstance(task.config.trainer, Command):
            from ablate.execute.command import train_by_command

            end, hashes = train_by_command(task, lease, watch, should_stop)
            transient = end.transient
        else:
            # Loaded inside the block, so that the worker shows meanwhile that it lives.
            from ablate.execute.training import train_here

            end, hashes = train_here(task, lease, watch, should_stop, begin)
    message = end.message
    if terminated.is_set() and end.state not in END_STATES:
        message = "preempted (SIGTERM)"
        transient = True
    status = replace(
        status, state=end.state, tokens=end.tokens, step=end.step, message=message, files=hashes
    )  # fmt: skip
    return status, transient


def lost_run(task: RunRequest, fault: str) -> TaskEnd:
    """Find the end of a task whose process died: its result, or ``interrupted`` with the ledger's reason.

    A process that hung has written its stacks into its log, and no more.
    """
    run = task.folder
    if (state := run.state()) in END_STATES:
        return TaskEnd(state=state)
    leases = Leases(run.attempts)
    message = f"worker lost: {fault}"
    record = leases.read(leases.latest())
    if record is not None:
        leases.record = record
        with contextlib.suppress(OSError):
            log = last_bytes(run.attempt_log(record.attempt))
            if record.outcome is None and _TIMEOUT.search(log):
                hang_sec = task.resources.hang_after_sec
                leases.end("interrupted", f"no progress for {hang_sec:.0f} s")
        message = leases.record.message or message
    return TaskEnd(state="interrupted", transient=True, message=message)


@contextlib.contextmanager
def on_signal(
    handle: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Handle these signals with ``handle`` during the block; outside the main thread nothing is done."""
    # signals reach only the main thread
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
