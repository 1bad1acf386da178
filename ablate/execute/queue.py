"""The runs of one execution: due, handed to workers, or ended.

``Queue`` has the rules: seed order, pauses before retries, turns of runs on several devices, runs that wait
for the state of another, runs that another process executes, runs that are not needed, a stop. ``Workers``
trains the runs as Ray tasks.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.clock import running_clock
from ablate.base.errors import first_line
from ablate.base.files import write_bytes_atomic
from ablate.execute.multi_device import execute_together
from ablate.execute.prefixes import waits_for, why_it_cannot_begin
from ablate.execute.task_end import TaskEnd
from ablate.execute.worker import execute_run, lost_run
from ablate.store import END_STATES
from ablate.store.checkpoints import newest_step
from ablate.store.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.store import State

PAUSES_SEC = (1.0, 5.0, 30.0)
"""Pauses before the retries after a fault that may pass. After the last retry the run is given up."""
_POLL_SEC = 0.3
_LOOK_AGAIN_SEC = 2.0
"""Time between two checks of a run that another process executes."""
_ASK_AGAIN_SEC = 1.0
"""Time between two queries for runs that are not needed."""
_STOP_GRACE_SEC = 30.0


@dataclass(frozen=True, kw_only=True)
class ExecutionEnd:
    """The end of an execution: its runs' states by run id, and whether it was interrupted.

    ``problem``: why it ended early, in one line, or None.
    """

    states: dict[str, State]
    interrupted: bool
    problem: str | None = None


class Workers:
    """Ray tasks, each of which executes a run."""

    def __init__(self) -> None:
        import ray

        # Ray's own retries have no pauses and do not write the ledger.
        self._together = ray.remote(max_retries=0)(execute_together)
        self._alone = ray.remote(max_retries=0)(execute_run)
        self._in_own_process = ray.remote(max_retries=0, max_calls=1)(execute_run)
        self._has_several_gpus = any(
            node["Resources"].get("GPU", 0) > 1 for node in ray.nodes()
        )
        self._running: dict[Any, tuple[RunRequest, Any]] = {}

    def start(self, run: RunRequest) -> None:
        """Hand a run to a worker."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = run.resources
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.num_gpus,
            "resources": resources.custom or None,
        }
        group = None
        remote = self._alone
        if resources.devices_per_run > 1:
            # the processes that Ray Train starts hold the devices
            remote = self._together
            options = {"num_cpus": 0}
        elif run.config.trainer is not None:
            # a user's own code may leave anything behind, so its process ends with the run
            remote = self._in_own_process
        elif resources.num_gpus and self._has_several_gpus:
            # A process stays on the GPU that it first used, while Ray gives its next run any of the node's.
            remote = self._in_own_process
        if resources.nodes > 1:  # the command's other nodes are reserved with the first
            group = placement_group(
                [run.bundle] * resources.nodes, strategy="STRICT_SPREAD"
            )
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
        task = remote.options(name=run.run_id, **options).remote(run)
        self._running[task] = (run, group)

    def cancel(self, run_id: str) -> None:
        """Take back a run that no worker has begun; ``collect`` still yields its end."""
        import ray

        for task, (run, _) in self._running.items():
            if run.run_id == run_id:
                ray.cancel(task)

    def collect(self) -> Iterator[tuple[str, TaskEnd]]:
        """Wait for a moment, then yield id and end of each run whose task has ended."""
        import ray

        if not self._running:
            time.sleep(_POLL_SEC)
            return
        tasks = list(self._running)
        ended, _ = ray.wait(tasks, num_returns=min(len(tasks), 100), timeout=_POLL_SEC)
        for task in ended:
            run, group = self._running.pop(task)
            if group is not None:
                ray.util.remove_placement_group(group)
            try:
                end = ray.get(task)
            except ray.exceptions.TaskCancelledError:
                end = TaskEnd(state="pending")
            except ray.exceptions.RayError as error:
                # of a task that raised: its text begins with a traceback
                cause = getattr(error, "cause", None) or error
                end = lost_run(run, first_line(cause))
            yield run.run_id, end


class _QueuedRun:
    """A run in the queue: due, then handed to a worker, then ended with a ``state``.

    ``due``: not before which time it is handed over (s); infinite once it was. ``is_elsewhere``: another
    process executed it when it was last looked at. ``unneeded``: why its result is not needed.
    ``tries``: retries since it came to ``last_step``, by its rows and checkpoints: what ends a run further
    on is something else.
    """

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.folder = request.folder
        self.leases = Leases(self.folder.attempts)
        self.due = 0.0
        self.state: State | None = None
        self.is_elsewhere = False
        self.unneeded: str | None = None
        self.last_step = 0
        self.tries = 0

    @property
    def is_handed(self) -> bool:
        """Whether a worker has the run."""
        return self.state is None and self.due == math.inf

    @property
    def is_gang(self) -> bool:
        """Whether several devices train the run."""
        return self.request.resources.devices_per_run > 1

    def end(self, state: State, message: str) -> None:
        """Record an end that no worker has written."""
        self.state = state
        with contextlib.suppress(OSError, ValueError):
            ended = replace(
                self.folder.status(),
                state=state,
                message=message,
                ended_unix=time.time(),
            )
            self.folder.write_status(ended)

    def stop(self) -> None:
        """Record that the run is not needed, unless it has ended or is held."""
        self.state = self.folder.state()
        has_ended = self.state in {*END_STATES, "failed", "stopped"}
        if not has_ended and not self.leases.is_held():
            self.end("stopped", self.unneeded or "")
            self.folder.stop_path.unlink(missing_ok=True)


class Queue:
    """Decides which run is handed over next, and what follows from a run's end."""

    def __init__(
        self, runs: Sequence[RunRequest], workers: Workers, *, gangs_at_once: int = 1
    ) -> None:
        """Prepare to hand the runs over in order.

        ``gangs_at_once``: the number of runs on several devices that are handed over at once.
        """
        self._queued = {run.run_id: _QueuedRun(run) for run in runs}
        self._workers = workers
        self._gangs_at_once = gangs_at_once
        self._is_stopping = False

    @property
    def states(self) -> dict[str, State]:
        """The states of the runs that have ended."""
        return {
            run_id: run.state
            for run_id, run in self._queued.items()
            if run.state is not None
        }

    def run(
        self,
        check: Callable[[], None],
        *,
        on_poll: Callable[[], None] = lambda: None,
        unneeded: Callable[[], Mapping[str, str]] = dict,
    ) -> ExecutionEnd:
        """Execute until every run has ended or the execution is interrupted.

        ``check`` raises ``KeyboardInterrupt`` if somebody asked to stop, ``ConnectionError`` if the cluster
        is gone.
        """
        asked_sec = 0.0
        problem = None
        try:
            while any(run.state is None for run in self._queued.values()):
                self.move(time.monotonic())
                self._collect()
                on_poll()
                if time.monotonic() - asked_sec >= _ASK_AGAIN_SEC:
                    asked_sec = time.monotonic()
                    self.end_unneeded(unneeded())
                check()
        except ConnectionError as error:
            problem = str(error)
        except KeyboardInterrupt:
            self.stop()
            clock = running_clock()
            # a second Ctrl-C does not wait
            with contextlib.suppress(KeyboardInterrupt):
                while clock() < _STOP_GRACE_SEC and any(
                    run.is_handed for run in self._queued.values()
                ):
                    self._collect()
                    on_poll()
        return ExecutionEnd(
            states=self.states, interrupted=self._is_stopping, problem=problem
        )

    def _collect(self) -> None:
        for run_id, end in self._workers.collect():
            self.take(run_id, end, time.monotonic())

    def move(self, now: float) -> None:
        """Hand over the runs that are due at ``now`` (seconds), those that have waited longest first."""
        num_gangs = sum(run.is_handed and run.is_gang for run in self._queued.values())
        ready = [
            run for run in self._queued.values() if run.state is None and run.due <= now
        ]
        for run in sorted(ready, key=lambda run: run.due):
            given_up = 0
            if run.is_elsewhere:
                given_up = run.leases.latest()
                self._look_elsewhere(run, given_up, now)
                if run.state is not None or run.due > now:
                    continue
            # Inside Ray a run that waits for another's state, or for devices, would occupy a process.
            holder = self._queued.get(waits_for(run.request) or "")
            if holder is not None and holder.state is None:
                continue
            if run.is_gang and num_gangs >= self._gangs_at_once:
                continue
            if (reason := why_it_cannot_begin(run.request)) is not None:
                run.end("failed", reason)
                continue
            num_gangs += run.is_gang
            run.due = math.inf
            run.is_elsewhere = False
            # a request to an earlier attempt
            run.folder.stop_path.unlink(missing_ok=True)
            self._workers.start(replace(run.request, given_up=given_up))

    def _look_elsewhere(self, run: _QueuedRun, attempt: int, now: float) -> None:
        """See whether another process still executes a run; ``attempt``: its latest."""
        state = run.folder.state()
        if state in END_STATES or state == "failed":
            run.state = state
        elif run.leases.is_held(attempt):
            run.due = now + _LOOK_AGAIN_SEC
        elif run.unneeded is not None:
            run.stop()

    def take(self, run_id: str, end: TaskEnd, now: float) -> None:
        """Record the end of a run that was handed over, or plan a retry; ``now`` in seconds."""
        run = self._queued[run_id]
        if end.state == "running":
            run.due = now + _LOOK_AGAIN_SEC
            run.is_elsewhere = True
        elif run.unneeded is not None and end.state not in {*END_STATES, "failed"}:
            run.stop()
        elif not end.transient or self._is_stopping:
            run.state = end.state
        else:
            steps = [row["step"] for row in run.folder.metrics()]
            step = max(newest_step(run.folder.checkpoints), *steps, 0)
            if step > run.last_step:
                run.last_step = step
                run.tries = 0
            if run.tries == len(PAUSES_SEC):
                run.end("failed", f"{end.message} ({run.tries + 1} attempts)")
                return
            run.due = now + PAUSES_SEC[run.tries]
            run.tries += 1

    def end_unneeded(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed, given by id with the reason.

        Runs that have begun are asked to stop.
        """
        for run_id, reason in unneeded.items():
            run = self._queued.get(run_id)
            if run is None or run.state is not None or run.unneeded is not None:
                continue
            run.unneeded = reason
            if run.is_handed or run.is_elsewhere:
                write_bytes_atomic(run.folder.stop_path, reason.encode())
                self._take_back(run)
            else:
                run.stop()

    def stop(self) -> None:
        """Hand over no more runs, take back those that have not begun, and ask the others to stop."""
        self._is_stopping = True
        for path in {run.request.stop_path for run in self._queued.values()}:
            path.touch()
        for run in self._queued.values():
            if run.is_handed:
                self._take_back(run)
            elif run.state is None:
                run.state = run.folder.state()

    def _take_back(self, run: _QueuedRun) -> None:
        if run.is_handed and run.folder.state() != "running":
            self._workers.cancel(run.request.run_id)
