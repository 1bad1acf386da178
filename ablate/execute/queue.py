"""The runs of one execution: due, handed to workers, or ended.

``Queue`` has the rules: seed order, pauses before retries, turns of runs on several devices, runs that wait
for the state of another, runs that another process executes, runs that are not needed, a stop. ``Workers``
trains the runs as Ray tasks.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import first_line
from ablate.base.files import write_bytes_atomic
from ablate.execute.multi_device import execute_together
from ablate.execute.pending_runs import waits_for, why_it_cannot_begin
from ablate.execute.worker import TaskEnd, execute_run, lost_run
from ablate.store import END_STATES, RunDir
from ablate.store.checkpoints import newest_step
from ablate.store.leases import Leases, end_holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.store import State

PAUSES_SEC = (1.0, 5.0, 30.0)
"""Pauses before the retries after a fault that may pass. After the last retry the run is given up."""
_POLL_SEC = 0.3
_LOOK_AGAIN_SEC = 2.0
"""Time between two checks of a run that another process executes, and of whether our own workers live."""
_ASK_AGAIN_SEC = 1.0
"""Time between two queries for runs that are not needed."""
_LATER_SEC = 15.0
"""A worker that hangs ends itself. If it cannot, the driver ends it this much later."""
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
        self._alone = ray.remote(max_retries=0)(execute_run)
        # A user's own code may leave anything behind, so its process ends with the run.
        self._foreign = ray.remote(max_retries=0, max_calls=1)(execute_run)
        self._together = ray.remote(max_retries=0)(execute_together)
        self._running: dict[str, tuple[Any, RunRequest, Leases]] = {}
        self._looked = time.monotonic()

    def start(self, run: RunRequest) -> None:
        """Hand a run to a worker."""
        wanted, remote = run.resources, self._alone if run.config.trainer is None else self._foreign
        asked = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus, "resources": wanted.custom or None}
        if wanted.devices_per_run > 1:  # the processes that Ray Train starts hold the devices
            remote, asked = self._together, {"num_cpus": 0}
        task = remote.options(name=run.run_id, **asked).remote(run)
        self._running[run.run_id] = task, run, _beats(run)

    def cancel(self, run_id: str) -> None:
        """Take back a run that no worker has begun; ``collect`` still yields its end."""
        import ray

        ray.cancel(self._running[run_id][0])

    def collect(self) -> Iterator[tuple[str, TaskEnd]]:
        """Wait for a moment, then yield id and end of each run whose task has ended."""
        import ray

        if not self._running:
            time.sleep(_POLL_SEC)
            return
        if time.monotonic() - self._looked >= _LOOK_AGAIN_SEC:
            self._looked = time.monotonic()
            self._end_what_hangs()
        tasks = {task: run for task, run, _ in self._running.values()}
        done, _ = ray.wait(list(tasks), num_returns=min(len(tasks), 100), timeout=_POLL_SEC)
        for task in done:
            run = tasks[task]
            del self._running[run.run_id]
            try:
                end = ray.get(task)
            except ray.exceptions.TaskCancelledError:
                end = TaskEnd(state="pending")
            except ray.exceptions.RayError as error:
                end = lost_run(RunDir(run.run_dir), first_line(error))
            yield run.run_id, end

    def _end_what_hangs(self) -> None:
        """Kill workers that show no life: their process is stopped, or a call holds Python's lock."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for run_id, (task, run, beats) in self._running.items():
            if (attempt := beats.latest()) and beats.stands_still(attempt):
                self._running[run_id] = task, run, _beats(run)  # if this fails, it is tried again later
                message = f"no progress for {beats.stale_sec:.0f} s: the driver ended it"
                for node in ray.nodes():  # it is on one of them
                    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    ending = ray.remote(num_cpus=0, scheduling_strategy=strategy)(end_holder)
                    ending.remote(beats.folder, attempt, message)


def _beats(run: RunRequest) -> Leases:
    return Leases(RunDir(run.run_dir).attempts, run.resources.hang_after_sec + _LATER_SEC)


class Queue:
    """Decides which run is handed over next, and what follows from a run's end.

    ``states``: of the runs that have ended; ``handed``: the runs that workers have, in order.
    """

    def __init__(self, runs: Sequence[RunRequest], workers: Workers, *, gangs_at_once: int = 1) -> None:
        """Prepare to hand the runs over in order.

        ``gangs_at_once``: the number of runs on several devices that are handed over at once.
        """
        self._runs = {run.run_id: run for run in runs}
        self._dirs = {run.run_id: RunDir(run.run_dir) for run in runs}
        self._leases = {run_id: Leases(run.attempts) for run_id, run in self._dirs.items()}
        self._workers = workers
        self._gangs = {run.run_id for run in runs if run.resources.devices_per_run > 1}
        self._gangs_at_once = gangs_at_once
        self._due = dict.fromkeys(self._runs, 0.0)
        """Runs to hand over, and not before which time (s)."""
        self._elsewhere: set[str] = set()
        """Those of ``_due`` that another process executed when they were last looked at."""
        self._tries: Counter[tuple[str, int]] = Counter()
        """Retries by run and newest checkpoint: a run that comes further is ended by something else."""
        self._unneeded: dict[str, str] = {}
        self._is_stopping = False
        self.handed: dict[str, None] = {}
        self.states: dict[str, State] = {}

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
        asked = 0.0
        try:
            while self.handed or self._due:
                self.move(time.monotonic())
                self._collect()
                on_poll()
                if time.monotonic() - asked >= _ASK_AGAIN_SEC:
                    asked = time.monotonic()
                    self.end_unneeded(unneeded())
                check()
        except ConnectionError as error:
            return ExecutionEnd(states=self.states, interrupted=False, problem=str(error))
        except KeyboardInterrupt:
            self.stop()
            give_up = time.monotonic() + _STOP_GRACE_SEC
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait
                while self.handed and time.monotonic() < give_up:
                    self._collect()
                    on_poll()
            return ExecutionEnd(states=self.states, interrupted=True)
        return ExecutionEnd(states=self.states, interrupted=False)

    def _collect(self) -> None:
        for run_id, end in self._workers.collect():
            self.take(run_id, end, time.monotonic())

    def move(self, now: float) -> None:
        """Hand over the runs that are due at ``now`` (seconds)."""
        for run_id in [one for one, due in self._due.items() if due <= now]:
            given_up = 0
            if run_id in self._elsewhere:
                state, leases = self._dirs[run_id].state(), self._leases[run_id]
                is_over = state in END_STATES or state == "failed"
                if not is_over and leases.is_held(given_up := leases.latest()):
                    self._due[run_id] = now + _LOOK_AGAIN_SEC
                    continue
                if is_over or run_id in self._unneeded:
                    del self._due[run_id]
                    self._mark_stopped(run_id)
                    continue
            # Inside Ray a run that waits for another's state, or for devices, would occupy a process.
            run = self._runs[run_id]
            holder = waits_for(run)
            if holder in self._runs and holder not in self.states:
                continue
            if run_id in self._gangs and len(self._gangs & self.handed.keys()) >= self._gangs_at_once:
                continue
            del self._due[run_id]
            self._elsewhere.discard(run_id)
            if (reason := why_it_cannot_begin(run)) is not None:
                self._end(run_id, "failed", reason)
                continue
            self._dirs[run_id].stop_path.unlink(missing_ok=True)  # a request to an earlier attempt
            self.handed[run_id] = None
            self._workers.start(replace(run, given_up=given_up))

    def take(self, run_id: str, end: TaskEnd, now: float) -> None:
        """Record the end of a run that was handed over, or plan a retry; ``now`` in seconds."""
        del self.handed[run_id]
        if end.state == "running":
            self._elsewhere.add(run_id)
            self._due[run_id] = now + _LOOK_AGAIN_SEC
        elif run_id in self._unneeded and end.state not in {*END_STATES, "failed"}:
            self._mark_stopped(run_id)
        elif not end.transient or self._is_stopping:
            self.states[run_id] = end.state
        else:
            at = run_id, newest_step(self._dirs[run_id].checkpoints)
            if self._tries[at] == len(PAUSES_SEC):
                self._end(run_id, "failed", f"{end.message} ({len(PAUSES_SEC) + 1} attempts)")
                return
            self._due[run_id] = now + PAUSES_SEC[self._tries[at]]
            self._tries[at] += 1

    def end_unneeded(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed, given by id with the reason.

        Runs that have begun are asked to stop.
        """
        for run_id, reason in unneeded.items():
            if run_id not in self._runs or run_id in self.states or run_id in self._unneeded:
                continue
            self._unneeded[run_id] = reason
            if run_id in self._due and run_id not in self._elsewhere:
                del self._due[run_id]
                self._mark_stopped(run_id)
            else:
                write_bytes_atomic(self._dirs[run_id].stop_path, reason.encode())
                self._take_back(run_id)

    def stop(self) -> None:
        """Hand over no more runs, take back those that have not begun, and ask the others to stop."""
        self._is_stopping = True
        for path in {run.stop_path for run in self._runs.values()}:
            path.touch()
        self.states |= {run_id: self._dirs[run_id].state() for run_id in self._due}
        self._due.clear()
        for run_id in self.handed:
            self._take_back(run_id)

    def _take_back(self, run_id: str) -> None:
        if run_id in self.handed and self._dirs[run_id].state() != "running":
            self._workers.cancel(run_id)

    def _mark_stopped(self, run_id: str) -> None:
        """Mark a run as stopped, unless it has ended or is held."""
        run = self._dirs[run_id]
        self.states[run_id] = state = run.state()
        if state not in {*END_STATES, "failed", "stopped"} and not self._leases[run_id].is_held():
            self._end(run_id, "stopped", self._unneeded[run_id])
            run.stop_path.unlink(missing_ok=True)

    def _end(self, run_id: str, state: State, message: str) -> None:
        self.states[run_id], run = state, self._dirs[run_id]
        with contextlib.suppress(OSError, ValueError):
            run.write_status(replace(run.status(), state=state, message=message, ended_unix=time.time()))
