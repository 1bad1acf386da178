"""Run what a plan still lacks, as Ray tasks, by the rules of ``queue``; workers share the run store with it.

How it fails: a failing run does not stop the others; docs/reliability.md says what is tried again. An
interrupted driver writes a stop file that trainers poll, waits a while for them, and leaves the rest pending:
the same command resumes. Metrics never pass through Ray, so the driver's memory does not grow with them.
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.files import write_bytes_atomic
from ablate.execute.cluster import Head, check_resources, connection, gangs_at_once
from ablate.execute.environment import git_commit
from ablate.execute.gang import execute_together
from ablate.execute.queue import Queue
from ablate.execute.worker import DEFAULT_TRAINER, RunTask, TaskEnd, execute_run, lost_run, on_sigterm
from ablate.store import END_STATES, State, StudyStore
from ablate.store.leases import STALE_SEC, Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.execute.todo import RunRequest

PAUSES_SEC = (1.0, 5.0, 30.0)
"""Pauses before each retry after a fault that may pass; after the last one the run is given up."""
_REQUEST = "cancel"
_POLL_SEC = 0.3
_STOP_GRACE_SEC = 30.0
_ASK_AGAIN_SEC = 1.0
"""Time between two queries for runs that are not needed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of an execution: the states of its runs, and whether it was interrupted.

    ``problem``: why it ended early, in one line.
    """

    states: dict[str, State]
    interrupted: bool
    problem: str | None = None


def request_stop(study_dir: Path) -> None:
    """Ask every process that runs the study now, on any machine, to stop."""
    write_bytes_atomic(study_dir / _REQUEST, uuid.uuid4().hex.encode())


class Cancellation:
    """Checks for requests to stop that are newer than this object; older ones were for others."""

    def __init__(self, study_dir: Path) -> None:
        self._path = study_dir / _REQUEST
        self._before = self._read()

    def raise_if_requested(self) -> None:
        """Raise ``KeyboardInterrupt``, as Ctrl-C would, if there is a new request."""
        if self._read() not in (None, self._before):
            raise KeyboardInterrupt

    def _read(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return self._path.read_bytes()
        return None


def execute_study(
    store: StudyStore,
    runs: Sequence[RunRequest],
    *,
    address: str | None = None,
    on_poll: Callable[[], None] = lambda: None,
    unneeded: Callable[[], Mapping[str, str]] = dict,
    trainer: str = DEFAULT_TRAINER,
    stale_sec: float = STALE_SEC,
) -> Outcome:
    """Execute the runs on a local Ray, or on the cluster at ``address``, and wait for them.

    ``on_poll`` is called a few times a second. ``unneeded``, called at most about once a second, returns the
    ids of runs whose results are not needed, with the reasons. Such a run becomes ``stopped`` unless it has
    ended; ``missing_runs`` still lists it. Ctrl-C and SIGTERM stop cleanly. ``stale_sec``: the time without a
    sign of life after which a worker on another machine counts as dead.

    Raises:
        UserError: no cluster at the address, or the cluster can never hold one of the runs.
    """
    if not runs:
        return Outcome(states={}, interrupted=False)
    for run in runs:
        store.run(run.run_id).create(asdict(run.config))
    with connection(address):
        import ray

        check_resources(runs)
        head = Head(ray.get_runtime_context().gcs_address)
        cancellation = Cancellation(store.path)

        def check() -> None:
            cancellation.raise_if_requested()
            head.raise_if_gone()

        tasks = _Tasks(store, runs, trainer, stale_sec)
        queue = Queue(
            [run.run_id for run in runs],
            tasks,
            gangs={run.run_id for run in runs if run.resources.devices_per_run > 1},
            gangs_at_once=gangs_at_once(runs),
            pauses_sec=PAUSES_SEC,
        )
        with tasks, on_sigterm(signal.default_int_handler):
            return drive(queue, tasks.collect, check, on_poll=on_poll, unneeded=unneeded)


def drive(
    queue: Queue,
    collect: Callable[[], Iterator[tuple[str, TaskEnd]]],
    check: Callable[[], None],
    *,
    on_poll: Callable[[], None] = lambda: None,
    unneeded: Callable[[], Mapping[str, str]] = dict,
) -> Outcome:
    """Move the queue until every run has come to an end, or the execution is interrupted.

    ``collect`` waits for a moment and yields what has ended. ``check`` raises ``KeyboardInterrupt`` where
    somebody asked to stop, and ``ConnectionError`` where the cluster is gone.
    """

    def take() -> None:
        for run_id, end in collect():
            queue.take(run_id, end, time.monotonic())

    asked = 0.0
    try:
        while queue.is_open:
            take()
            queue.move(time.monotonic())
            on_poll()
            if time.monotonic() - asked >= _ASK_AGAIN_SEC:
                asked = time.monotonic()
                queue.retire(unneeded())
            check()
    except ConnectionError as error:
        return Outcome(states=queue.states, interrupted=False, problem=str(error))
    except KeyboardInterrupt:
        queue.stop()
        give_up = time.monotonic() + _STOP_GRACE_SEC
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
            while queue.handed and time.monotonic() < give_up:
                take()
                on_poll()
        return Outcome(states=queue.states, interrupted=True)
    return Outcome(states=queue.states, interrupted=False)


class _Tasks(contextlib.AbstractContextManager["_Tasks"]):
    """The runs of one execution as Ray tasks, and what the run store says of them: the queue's ``Hands``."""

    def __init__(self, store: StudyStore, runs: Sequence[RunRequest], trainer: str, stale_sec: float) -> None:
        import ray

        # Ray's own retries have no pauses and do not write the ledger.
        self._remote = ray.remote(max_retries=0)(execute_run)
        self._remote_together = ray.remote(max_retries=0)(execute_together)
        self._store, self._trainer, self._stale_sec = store, trainer, stale_sec
        self._requests = {run.run_id: run for run in runs}
        self._leases = {run.run_id: Leases(store.run(run.run_id).attempts, stale_sec) for run in runs}
        self._stop_path = store.path.resolve() / f".stop-{uuid.uuid4().hex[:8]}"
        self._commit = git_commit()
        self._references: dict[str, Any] = {}

    def __exit__(self, *_exception: object) -> None:
        self._stop_path.unlink(missing_ok=True)

    def start(self, run_id: str, given_up: int) -> None:
        request, run = self._requests[run_id], self._store.run(run_id)
        run.stop_path.unlink(missing_ok=True)  # a request to an earlier attempt
        resources = request.resources
        task = RunTask(
            **vars(request),
            run_dir=run.path.resolve(),
            stop_path=self._stop_path,
            device="cuda" if resources.gpus else "cpu",
            git_commit=self._commit,
            trainer=self._trainer,
            stale_sec=self._stale_sec,
            given_up=given_up,
        )
        if resources.devices_per_run > 1:  # the processes that Ray Train starts hold the devices
            options = self._remote_together.options(num_cpus=0, name=run_id)
        else:
            options = self._remote.options(
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                resources=resources.custom or None,
                name=run_id,
            )
        self._references[run_id] = options.remote(task)

    def cancel(self, run_id: str) -> None:
        import ray

        ray.cancel(self._references[run_id])

    def collect(self) -> Iterator[tuple[str, TaskEnd]]:
        """Wait for a moment, and yield the tasks that have ended with their ends."""
        import ray

        if not self._references:
            time.sleep(_POLL_SEC)
            return
        waited_for = {reference: run_id for run_id, reference in self._references.items()}
        done, _ = ray.wait(list(waited_for), num_returns=min(len(waited_for), 100), timeout=_POLL_SEC)
        for reference in done:
            run_id = waited_for[reference]
            del self._references[run_id]
            try:
                end = ray.get(reference)
            except ray.exceptions.TaskCancelledError:
                end = TaskEnd(state="pending")
            except ray.exceptions.RayError as error:
                end = lost_run(self._store.run(run_id), str(error).strip().splitlines()[0])
            yield run_id, end

    def stop_all(self) -> None:
        self._stop_path.touch()

    def ask_to_stop(self, run_id: str, reason: str) -> None:
        self._store.run(run_id).ask_to_stop(reason)

    def state(self, run_id: str) -> State:
        return self._store.run(run_id).state()

    def abandoned(self, run_id: str) -> int | None:
        latest = self._leases[run_id].latest()
        return None if self._leases[run_id].is_held(latest) else latest

    def mark_stopped(self, run_id: str, reason: str) -> State:
        run = self._store.run(run_id)
        state = run.state()
        if state in {*END_STATES, "failed", "stopped"} or self._leases[run_id].is_held():
            return state
        run.write_status(replace(run.status(), state="stopped", message=reason, ended_unix=time.time()))
        run.stop_path.unlink(missing_ok=True)
        return "stopped"

    def mark_failed(self, run_id: str, end: TaskEnd, attempts: int) -> State:
        run = self._store.run(run_id)
        with contextlib.suppress(OSError, ValueError):
            message = f"{end.message} ({attempts} attempts)"
            run.write_status(replace(run.status(), state="failed", message=message, ended_unix=time.time()))
            return "failed"
        return end.state if end.state != "elsewhere" else "interrupted"
