"""Run what a plan still lacks, as Ray tasks. The run store is the only thing that workers and driver share.

How it fails: one failing run does not stop the others; a killed worker is retried by Ray once; an
interrupted driver writes a stop file that running trainers poll, waits a while for them, and leaves the rest
pending, so that the same command goes on. Metrics never pass through Ray: the driver's memory does not grow
with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.errors import UserError
from ablate.execute.environment import git_commit
from ablate.execute.worker import DEFAULT_TRAINER, RunTask, execute_run
from ablate.store import END_STATES, RunDir, State, StudyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ablate.config import ResourcesConfig

_POLL_SEC = 0.3
_STOP_GRACE_SEC = 30.0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the executor needs of one run."""

    run_id: str
    arm: str
    seed: int
    config: dict[str, Any]
    tokens_dir: str
    resources: ResourcesConfig


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an execution ended: the states of the runs it was given, and whether it was interrupted."""

    states: dict[str, State]
    interrupted: bool


def missing_runs(
    store: StudyStore, runs: Sequence[RunRequest], *, retry_failed: bool = False
) -> list[RunRequest]:
    """Return the runs without a result. Failed ones are left out unless they are to be retried."""
    done = set(END_STATES) if retry_failed else {*END_STATES, "failed"}
    return [run for run in runs if store.run(run.run_id).status().state not in done]


def execute_study(
    store: StudyStore,
    runs: Sequence[RunRequest],
    *,
    address: str | None = None,
    on_poll: Callable[[], None] = lambda: None,
    trainer: str = DEFAULT_TRAINER,
) -> Outcome:
    """Execute the runs on a local Ray, or on the cluster at ``address``, and wait for them.

    ``on_poll`` is called a few times a second. Ctrl-C and SIGTERM stop cleanly.

    Raises:
        UserError: no cluster at the address, or it can never hold one of the runs.
    """
    if not runs:
        return Outcome(states={}, interrupted=False)
    if address is not None and (Path.home() / ".ray" / "auth_token").exists():
        # A cluster with Ray's defaults asks for this token. With an explicit address Ray does not send it
        # unless told so before it is imported; a cluster without authentication takes it all the same.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    for run in runs:
        store.run(run.run_id).create(run.config)
    stop_path = store.path / f".stop-{uuid.uuid4().hex[:8]}"
    commit = git_commit()
    with _ray(address):
        _check_resources(runs)
        remote = ray.remote(max_retries=1)(execute_run)
        pending = {}
        for run in runs:
            task = RunTask(
                run_dir=str(store.run(run.run_id).path.resolve()),
                tokens_dir=run.tokens_dir,
                stop_path=str(stop_path.resolve()),
                threads=run.resources.cpus,
                device="cuda" if run.resources.gpus else "cpu",
                git_commit=commit,
                resources=asdict(run.resources),
                trainer=trainer,
            )
            options = remote.options(
                num_cpus=run.resources.cpus, num_gpus=run.resources.gpus, name=run.run_id
            )
            pending[options.remote(task)] = run.run_id
        states: dict[str, State] = {}
        try:
            interrupted = _wait(pending, states, store, on_poll, stop_path)
        finally:
            stop_path.unlink(missing_ok=True)
    return Outcome(states=states, interrupted=interrupted)


def _wait(
    pending: dict[Any, str],
    states: dict[str, State],
    store: StudyStore,
    on_poll: Callable[[], None],
    stop_path: Path,
) -> bool:
    """Wait for all tasks; return whether the wait was interrupted."""
    interrupted = False
    with _sigterm_as_interrupt():
        try:
            while pending:
                _collect(pending, states, store, _POLL_SEC)
                on_poll()
        except KeyboardInterrupt:
            interrupted = True
            stop_path.touch()
            _cancel_waiting(pending, store)
            give_up = time.monotonic() + _STOP_GRACE_SEC
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
                while pending and time.monotonic() < give_up:
                    _collect(pending, states, store, _POLL_SEC)
                    on_poll()
    return interrupted


def _collect(
    pending: dict[Any, str], states: dict[str, State], store: StudyStore, timeout_sec: float
) -> None:
    import ray

    done, _ = ray.wait(list(pending), num_returns=min(len(pending), 100), timeout=timeout_sec)
    for reference in done:
        run_id = pending.pop(reference)
        try:
            states[run_id] = ray.get(reference)
        except ray.exceptions.TaskCancelledError:
            states[run_id] = "pending"
        except ray.exceptions.RayError as error:
            states[run_id] = _mark_lost(store.run(run_id), error)


def _mark_lost(run: RunDir, error: Exception) -> State:
    """Record a run whose worker died more often than Ray retries."""
    from dataclasses import replace

    status = run.status()
    if status.state in END_STATES:
        return status.state
    first = str(error).strip().splitlines()[0]
    run.write_status(replace(status, state="failed", message=f"worker lost: {first}", ended_unix=time.time()))
    return "failed"


def _cancel_waiting(pending: dict[Any, str], store: StudyStore) -> None:
    """Cancel the tasks that have not begun; the others see the stop file."""
    import ray

    for reference, run_id in pending.items():
        if store.run(run_id).status().state != "running":
            ray.cancel(reference)


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start a local Ray for the time of the block."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    already = ray.is_initialized()
    if not already:
        try:
            ray.init(
                address=address or "local",
                include_dashboard=False if address is None else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = f"at {address}" if address else "on this machine"
            raise UserError(f"cannot start or reach Ray {where}: {first}") from None
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


def _check_resources(runs: Sequence[RunRequest]) -> None:
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resources in {run.resources for run in runs}:
        wanted = {"CPU": resources.cpus, "GPU": resources.gpus}
        if not any(all(node.get(key, 0) >= n for key, n in wanted.items()) for node in nodes):
            biggest = ", ".join(f"{node.get('CPU', 0):g} CPUs {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise UserError(
                f"a run asks for {resources.cpus} CPUs and {resources.gpus} GPUs, which no node has "
                f"(nodes: {biggest}; change base.resources)"
            )


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, as schedulers send it, like Ctrl-C."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: a notebook's own affair
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
