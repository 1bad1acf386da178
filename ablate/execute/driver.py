"""Execute the runs of a plan that have no result yet, as Ray tasks, by the rules of ``queue``.

How it fails: a failing run does not stop the others; docs/reliability.md says what is tried again. An
interrupted driver writes a stop file that trainers poll, waits a while for them, and leaves the rest pending:
the same command resumes. Workers write metrics to the run store, never through Ray, so the driver's memory
does not grow with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.execute.cluster import Head, connection, gangs_at_once
from ablate.execute.environment import commit_of
from ablate.execute.prefixes import clean_prefixes, share_prefixes
from ablate.execute.queue import ExecutionEnd, Queue, Workers
from ablate.execute.worker import on_signal
from ablate.plan import configured_runs
from ablate.run.command import secrets_of
from ablate.store import StudyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan

_REQUEST = "cancel"


def _on_hangup() -> AbstractContextManager[None]:
    """Stop as for SIGTERM when the terminal is closed, unless `nohup` has this ignored."""

    def stop(*_: object) -> None:
        for output in (1, 2):  # what is printed to the terminal would be an error now
            if stat.S_ISCHR(os.fstat(output).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return contextlib.nullcontext()
    return on_signal(stop, signal.SIGHUP)


def request_stop(study_dir: Path) -> None:
    """Ask every process that runs the study now, on any machine, to stop."""
    write_bytes_atomic(study_dir / _REQUEST, uuid.uuid4().hex.encode())


def stop_request(study_dir: Path) -> Callable[[], bool]:
    """Return a function that tells whether a stop was requested since now; older requests were for others."""

    def read() -> bytes | None:
        with contextlib.suppress(OSError):
            return (study_dir / _REQUEST).read_bytes()
        return None

    earlier = read()
    return lambda: read() not in (None, earlier)


def execute_study(
    store: StudyStore,
    runs: Sequence[RunRequest],
    *,
    address: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    on_poll: Callable[[], None] = lambda: None,
    unneeded: Callable[[], Mapping[str, str]] = dict,
    plan: Plan | None = None,
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
    store = StudyStore(store.path.resolve())
    for run in runs:
        store.run(run.run_id).create(asdict(run.config))
    commit = commit_of(Path(__file__).resolve().parents[2])
    stop_path = store.path / f".stop-{uuid.uuid4().hex[:8]}"
    runs = [
        replace(
            run,
            folder=store.run(run.run_id),
            stop_path=stop_path,
            device="cuda" if run.resources.num_gpus else "cpu",
            git_commit=commit,
            secrets=secrets_of(run.config.trainer, os.environ),
        )
        for run in runs
    ]
    runs, keys = share_prefixes(
        store, runs, () if plan is None else configured_runs(plan)
    )
    with connection(address, say):
        import ray

        queue = Queue(runs, Workers(), gangs_at_once=gangs_at_once(runs))
        head = Head(ray.get_runtime_context().gcs_address)
        is_requested = stop_request(store.path)

        def check() -> None:
            if is_requested():
                raise KeyboardInterrupt
            if head.is_gone():
                raise ConnectionError(
                    f"Ray's head node at {head.address} does not answer any more"
                )

        try:
            with (
                on_signal(signal.default_int_handler, signal.SIGINT, signal.SIGTERM),
                _on_hangup(),
            ):
                end = queue.run(check, on_poll=on_poll, unneeded=unneeded)
        finally:
            stop_path.unlink(missing_ok=True)
        clean_prefixes(store, keys)
        return end
