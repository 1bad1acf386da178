"""Execute the runs of a plan that have no result yet, as Ray tasks, by the rules of ``queue``.

How it fails: a failing run does not stop the others; docs/reliability.md says what is tried again. An
interrupted driver writes a stop file that trainers poll, waits a while for them, and leaves the rest pending:
the same command resumes. Workers write metrics to the run store, never through Ray, so the driver's memory
does not grow with them.
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.execute.cluster import Head, connection, gangs_at_once
from ablate.execute.environment import git_commit
from ablate.execute.pending_runs import DEFAULT_TRAINER, Prefixes
from ablate.execute.queue import Queue, Workers
from ablate.execute.worker import TaskEnd, on_signal
from ablate.plan import configured_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan
    from ablate.store import State, StudyStore

PAUSES_SEC = (1.0, 5.0, 30.0)
"""Pauses before the retries after a fault that may pass. After the last retry the run is given up."""
_REQUEST = "cancel"
_STOP_GRACE_SEC = 30.0
_ASK_AGAIN_SEC = 1.0
"""Time between two queries for runs that are not needed."""


@dataclass(frozen=True, kw_only=True)
class ExecutionEnd:
    """The end of an execution: its runs' states by run id, and whether it was interrupted.

    ``problem``: why it ended early, in one line, or None.
    """

    states: dict[str, State]
    interrupted: bool
    problem: str | None = None


def request_stop(study_dir: Path) -> None:
    """Ask every process that runs the study now, on any machine, to stop."""
    write_bytes_atomic(study_dir / _REQUEST, uuid.uuid4().hex.encode())


class Cancellation:
    """Looks for a request to stop that is newer than this object; older ones were for others."""

    def __init__(self, study_dir: Path) -> None:
        self._path = study_dir / _REQUEST
        self._before = self._read()

    @property
    def requested(self) -> bool:
        """Whether there is such a request."""
        return self._read() not in (None, self._before)

    def _read(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return self._path.read_bytes()
        return None


def execute_study(
    store: StudyStore,
    runs: Sequence[RunRequest],
    *,
    address: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    on_poll: Callable[[], None] = lambda: None,
    unneeded: Callable[[], Mapping[str, str]] = dict,
    plan: Plan | None = None,
    trainer: str = DEFAULT_TRAINER,
) -> ExecutionEnd:
    """Execute the runs on a local Ray, or on the cluster at ``address``, and wait for them.

    ``say`` takes a warning about the cluster. ``on_poll`` is called a few times a second. ``unneeded`` is
    called at most about once a second; it returns the ids of runs whose results are not needed, with the
    reasons. Such a run becomes ``stopped`` unless it has ended; it has no result, so a later ``find_todo``
    can list it. ``plan``: states of ``runs`` from which its other runs may start later are kept. Ctrl-C and
    SIGTERM stop cleanly.

    Raises:
        UserError: no cluster at the address, or the cluster can never hold one of the runs.
    """
    if not runs:
        return ExecutionEnd(states={}, interrupted=False)
    for run in runs:
        store.run(run.run_id).create(asdict(run.config))
    prefixes = Prefixes(store, runs, () if plan is None else configured_runs(plan))
    commit, stop_path = git_commit(), store.path.resolve() / f".stop-{uuid.uuid4().hex[:8]}"
    runs = [
        replace(
            prefixes.filled_in(run),
            run_dir=store.run(run.run_id).path.resolve(),
            stop_path=stop_path,
            device="cuda" if run.resources.gpus else "cpu",
            git_commit=commit,
            trainer=trainer,
        )
        for run in runs
    ]
    with connection(address, say):
        import ray

        at_once = gangs_at_once(runs)
        head = Head(ray.get_runtime_context().gcs_address)
        cancellation = Cancellation(store.path)

        def check() -> None:
            if cancellation.requested:
                raise KeyboardInterrupt
            if head.is_gone():
                raise ConnectionError(f"Ray's head node at {head.address} does not answer any more")

        workers = Workers()
        queue = Queue(runs, workers, prefixes, gangs_at_once=at_once, pauses_sec=PAUSES_SEC)
        try:
            with on_signal(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
                end = drive(queue, workers.collect, check, on_poll=on_poll, unneeded=unneeded)
        finally:
            stop_path.unlink(missing_ok=True)
        prefixes.clean()
        return end


def drive(
    queue: Queue,
    collect: Callable[[], Iterator[tuple[str, TaskEnd]]],
    check: Callable[[], None],
    *,
    on_poll: Callable[[], None] = lambda: None,
    unneeded: Callable[[], Mapping[str, str]] = dict,
) -> ExecutionEnd:
    """Move the queue until every run has ended or the execution is interrupted.

    ``collect`` waits for a moment and yields the ids of runs that have ended, with their ends. ``check``
    raises ``KeyboardInterrupt`` if somebody asked to stop, ``ConnectionError`` if the cluster is gone.
    """

    def take() -> None:
        for run_id, end in collect():
            queue.take(run_id, end, time.monotonic())

    asked = 0.0
    try:
        queue.move(time.monotonic())
        while queue.is_open:
            take()
            queue.move(time.monotonic())
            on_poll()
            if time.monotonic() - asked >= _ASK_AGAIN_SEC:
                asked = time.monotonic()
                queue.end_unneeded(unneeded())
            check()
    except ConnectionError as error:
        return ExecutionEnd(states=queue.states, interrupted=False, problem=str(error))
    except KeyboardInterrupt:
        queue.stop()
        give_up = time.monotonic() + _STOP_GRACE_SEC
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
            while queue.handed and time.monotonic() < give_up:
                take()
                on_poll()
        return ExecutionEnd(states=queue.states, interrupted=True)
    return ExecutionEnd(states=queue.states, interrupted=False)
