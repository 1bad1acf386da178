"""Run what a plan still lacks, as Ray tasks. The run store is the only thing that workers and driver share.

How it fails: one failing run does not stop the others. What may pass by itself (a killed worker or node, a
GPU error, a full disk, a preemption, a hang) is tried again after a pause, a few times; a fault of the run
itself is not. A run that somebody else executes on the same storage is waited for, and taken over if its
holder dies. A run whose result the caller does not need is stopped, and keeps its checkpoint. An interrupted
driver writes a stop file that running trainers poll, waits a while for them, and leaves the rest pending, so
that the same command goes on. Metrics never pass through Ray: the driver's memory does not grow with them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import uuid
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.execute.cancel import Cancellation
from ablate.execute.environment import git_commit
from ablate.execute.gang import execute_together
from ablate.execute.head import Head
from ablate.execute.token import use_token
from ablate.execute.worker import DEFAULT_TRAINER, RunTask, TaskEnd, execute_run, lost_run
from ablate.store import END_STATES, RunDir, State, StudyStore
from ablate.store.leases import STALE_SEC, Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.execute.todo import RunRequest
    from ablate.run.config import ResourcesConfig

_POLL_SEC = 0.3
_STOP_GRACE_SEC = 30.0
_PAUSES_SEC = (1.0, 5.0, 30.0)
"""Before a run is tried again after a fault that may pass; after the last of them it is left as it is."""
_LOOK_AGAIN_SEC = 2.0
"""Between two looks at a run that somebody else executes."""
_ASK_AGAIN_SEC = 1.0
"""Between two questions which runs need not go on."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an execution ended: the states of the runs it was given, and whether it was interrupted.

    ``problem``: what ended it before its time, in a line.
    """

    states: dict[str, State]
    interrupted: bool
    problem: str | None = None


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

    ``on_poll`` is called a few times a second, and ``unneeded`` at most about once: it returns the ids of
    runs whose results are not needed, each with the reason. Such a run, unless it has ended, becomes
    ``stopped``, which ``missing_runs`` still lists. Ctrl-C and SIGTERM stop cleanly. ``stale_sec``: after how
    long without a sign of life a worker of another machine is taken for dead.

    Raises:
        UserError: no cluster at the address, or it can never hold one of the runs.
    """
    if not runs:
        return Outcome(states={}, interrupted=False)
    if address is not None:
        use_token()
    for run in runs:
        store.run(run.run_id).create(run.config)
    stop_path = store.path / f".stop-{uuid.uuid4().hex[:8]}"
    commit = git_commit()
    with connection(address):
        _check_resources(runs)
        queue = _Queue(store, runs, trainer, stop_path, commit, stale_sec)
        try:
            interrupted = _wait(queue, on_poll, unneeded, stop_path)
            problem = None
        except _HeadGoneError as error:
            interrupted, problem = False, str(error)
        finally:
            stop_path.unlink(missing_ok=True)
    return Outcome(states=queue.states, interrupted=interrupted, problem=problem)


class _Queue:
    """The runs of one execution: handed to Ray, waiting to be tried again, executed elsewhere, ended."""

    def __init__(
        self,
        store: StudyStore,
        runs: Sequence[RunRequest],
        trainer: str,
        stop_path: Path,
        commit: str | None,
        stale_sec: float,
    ) -> None:
        import ray

        # Ray's own retries know neither pauses nor the ledger.
        self._remote = ray.remote(max_retries=0)(execute_run)
        self._remote_together = ray.remote(max_retries=0)(execute_together)
        self._turns: deque[tuple[str, int]] = deque()
        self._gangs = _gangs_at_once(runs)
        self._store = store
        self._requests = {run.run_id: run for run in runs}
        self._trainer, self._stop_path, self._commit, self._stale_sec = trainer, stop_path, commit, stale_sec
        self._leases = {run.run_id: Leases(store.run(run.run_id).attempts, stale_sec) for run in runs}
        self._tries = dict.fromkeys(self._requests, 0)
        self._waiting: dict[str, float] = {}
        self._elsewhere: set[str] = set()
        self._looked = 0.0
        self._unneeded: dict[str, str] = {}
        self.handed: dict[Any, str] = {}
        self.states: dict[str, State] = {}
        for run in runs:
            self._hand_over(run.run_id)

    @property
    def is_open(self) -> bool:
        """Whether any run has not come to an end."""
        return bool(self.handed or self._waiting or self._elsewhere or self._turns)

    def _is_gang(self, run_id: str) -> bool:
        return self._requests[run_id].resources.devices_per_run > 1

    def _hand_over(self, run_id: str, given_up: int = 0) -> None:
        run = self._requests[run_id]
        if self._is_gang(run_id) and sum(map(self._is_gang, self.handed.values())) >= self._gangs:
            self._turns.append((run_id, given_up))  # each that waits inside of Ray holds a process
            return
        run_dir = self._store.run(run_id)
        run_dir.stop_path.unlink(missing_ok=True)  # a request to an earlier attempt
        task = RunTask(
            run_dir=str(run_dir.path.resolve()),
            tokens_dir=run.tokens_dir,
            stop_path=str(self._stop_path.resolve()),
            threads=run.resources.cpus,
            device="cuda" if run.resources.gpus else "cpu",
            git_commit=self._commit,
            resources=asdict(run.resources),
            trainer=self._trainer,
            diagnostics=None if run.diagnostics is None else asdict(run.diagnostics),
            stale_sec=self._stale_sec,
            given_up=given_up,
        )
        if self._is_gang(run_id):  # the processes that Ray Train starts hold the devices
            options = self._remote_together.options(num_cpus=0, name=run_id)
        else:
            options = self._remote.options(
                num_cpus=run.resources.cpus,
                num_gpus=run.resources.gpus,
                resources=run.resources.custom or None,
                name=run_id,
            )
        self.handed[options.remote(task)] = run_id

    def move(self) -> None:
        """Collect what has ended, and hand over again what is due."""
        self.collect()
        for _ in range(len(self._turns)):
            self._hand_over(*self._turns.popleft())
        now = time.monotonic()
        for run_id in [run_id for run_id, due in self._waiting.items() if due <= now]:
            del self._waiting[run_id]
            self._hand_over(run_id)
        if self._elsewhere and now - self._looked >= _LOOK_AGAIN_SEC:
            self._looked = now
            for run_id in list(self._elsewhere):
                self._look_at(run_id)

    def collect(self) -> None:
        """Take in the tasks that have ended, waiting for a moment."""
        import ray

        if not self.handed:
            time.sleep(_POLL_SEC)
            return
        done, _ = ray.wait(list(self.handed), num_returns=min(len(self.handed), 100), timeout=_POLL_SEC)
        for reference in done:
            run_id = self.handed.pop(reference)
            try:
                end = ray.get(reference)
            except ray.exceptions.TaskCancelledError:
                end = TaskEnd(state="pending")
            except ray.exceptions.RayError as error:
                end = lost_run(self._store.run(run_id), str(error).strip().splitlines()[0])
            self._take(run_id, end)

    def _take(self, run_id: str, end: TaskEnd) -> None:
        if end.state == "elsewhere":
            self._elsewhere.add(run_id)
        elif run_id in self._unneeded and end.state not in {*END_STATES, "failed"}:
            self.states[run_id] = self._mark_stopped(run_id)
        elif end.transient and not self._stop_path.exists() and self._tries[run_id] < len(_PAUSES_SEC):
            self._waiting[run_id] = time.monotonic() + _PAUSES_SEC[self._tries[run_id]]
            self._tries[run_id] += 1
        elif end.transient and not self._stop_path.exists():
            self.states[run_id] = _give_up(self._store.run(run_id), end)
        else:
            self.states[run_id] = end.state

    def _look_at(self, run_id: str) -> None:
        """See how a run stands that somebody else executes; take it over if nobody does any more."""
        state = self._store.run(run_id).state()
        if state in END_STATES or state == "failed":
            self._elsewhere.discard(run_id)
            self.states[run_id] = state
            return
        leases = self._leases[run_id]
        latest = leases.latest()
        if leases.is_held(latest):
            return
        self._elsewhere.discard(run_id)
        if run_id in self._unneeded:
            self.states[run_id] = self._mark_stopped(run_id)
        else:
            self._hand_over(run_id, given_up=latest)

    def retire(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed: ask those that have begun, take back the others."""
        import ray

        references = {run_id: reference for reference, run_id in self.handed.items()}
        for run_id, reason in unneeded.items():
            if run_id not in self._requests or run_id in self.states or run_id in self._unneeded:
                continue
            self._unneeded[run_id] = reason
            reference = references.get(run_id)
            if reference is None and run_id not in self._elsewhere:
                self._waiting.pop(run_id, None)
                self._turns = deque(turn for turn in self._turns if turn[0] != run_id)
                self.states[run_id] = self._mark_stopped(run_id)
                continue
            run = self._store.run(run_id)
            run.ask_to_stop(reason)
            if reference is not None and run.state() != "running":
                ray.cancel(reference)

    def _mark_stopped(self, run_id: str) -> State:
        """Write that a run which nobody executes is not needed; return the state that it has then."""
        run = self._store.run(run_id)
        state = run.state()
        if state not in {*END_STATES, "failed", "stopped"} and not self._leases[run_id].is_held():
            reason = self._unneeded[run_id]
            run.write_status(replace(run.status(), state="stopped", message=reason, ended_unix=time.time()))
            run.stop_path.unlink(missing_ok=True)
            state = "stopped"
        return state

    def stop(self) -> None:
        """Hand nothing over any more, and cancel the tasks that have not begun; the others see the stop."""
        import ray

        for run_id in (*self._waiting, *self._elsewhere, *(run_id for run_id, _ in self._turns)):
            self.states[run_id] = self._store.run(run_id).state()
        self._turns.clear()
        self._waiting.clear()
        self._elsewhere.clear()
        for reference, run_id in self.handed.items():
            if self._store.run(run_id).state() != "running":
                ray.cancel(reference)


class _HeadGoneError(Exception):
    """Ray's head does not answer any more."""


def _wait(
    queue: _Queue, on_poll: Callable[[], None], unneeded: Callable[[], Mapping[str, str]], stop_path: Path
) -> bool:
    """Wait for all runs; return whether the wait was interrupted."""
    import ray

    interrupted = False
    asked = 0.0
    address = ray.get_runtime_context().gcs_address
    head = Head(address)
    cancellation = Cancellation(stop_path.parent)
    with _sigterm_as_interrupt():
        try:
            while queue.is_open:
                queue.move()
                on_poll()
                if time.monotonic() - asked >= _ASK_AGAIN_SEC:
                    asked = time.monotonic()
                    queue.retire(unneeded())
                cancellation.raise_if_requested()
                if head.is_gone():
                    raise _HeadGoneError(f"Ray's head node at {address} does not answer any more")
        except KeyboardInterrupt:
            interrupted = True
            stop_path.touch()
            queue.stop()
            give_up = time.monotonic() + _STOP_GRACE_SEC
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
                while queue.handed and time.monotonic() < give_up:
                    queue.collect()
                    on_poll()
    return interrupted


def _give_up(run: RunDir, end: TaskEnd) -> State:
    """Record a run that was tried as often as it is worth."""
    with contextlib.suppress(OSError, ValueError):
        message = f"{end.message} ({len(_PAUSES_SEC) + 1} attempts)"
        run.write_status(replace(run.status(), state="failed", message=message, ended_unix=time.time()))
        return "failed"
    return end.state if end.state != "elsewhere" else "interrupted"


@contextlib.contextmanager
def connection(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start a local Ray, on loopback alone, for the time of the block."""
    if address is None:
        # Ray takes a machine whose cluster can hold no other for one that nobody else need reach. It looks
        # when it is imported; without this it listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
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


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _places(resources: ResourcesConfig, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many devices of a run the nodes hold at once."""
    wanted = {key: n for key, n in _wanted(resources).items() if n}
    return sum(min(math.floor(node.get(key, 0) / n) for key, n in wanted.items()) for node in nodes)


def _gangs_at_once(runs: Sequence[RunRequest]) -> int:
    """Return how many runs on several devices the cluster holds at once, at least one."""
    nodes = _nodes()
    gangs = [run.resources for run in runs if run.resources.devices_per_run > 1]
    return max((_places(one, nodes) // one.devices_per_run for one in gangs), default=1) or 1


def _check_resources(runs: Sequence[RunRequest]) -> None:
    nodes = _nodes()
    distinct = {
        (run.resources.devices_per_run, *_wanted(run.resources).items()): run.resources for run in runs
    }
    for resources in distinct.values():
        wanted = _wanted(resources).items()
        if _places(resources, nodes) >= resources.devices_per_run:
            continue
        asked = " and ".join(f"{n:g} {_named(key)}" for key, n in wanted)
        there = ", ".join(
            " ".join(f"{node.get(key, 0):g} {_named(key)}" for key, _ in wanted) for node in nodes
        )
        lacking = "which no node has"
        if resources.devices_per_run > 1:
            asked = f"{resources.devices_per_run} × ({asked})"
            lacking = "which the cluster does not have"
        raise UserError(f"a run asks for {asked}, {lacking} (nodes: {there}; change base.resources)")


def _wanted(resources: ResourcesConfig) -> dict[str, float]:
    return {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}


def _named(key: str) -> str:
    return {"CPU": "CPUs", "GPU": "GPUs"}.get(key, key)


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
