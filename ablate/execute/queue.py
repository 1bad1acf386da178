"""The runs of one execution: handed to workers, waiting for a retry, executed elsewhere, or ended.

``Queue`` has the rules: seed order, pauses before retries, turns of runs on several devices, runs that wait
for the state of another, runs that another process executes, runs that are not needed, a stop. It has no
clock: the caller passes times and ended runs. ``Workers`` trains them as Ray tasks.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import first_line
from ablate.execute.multi_device import execute_together
from ablate.execute.worker import TaskEnd, execute_run, lost_run
from ablate.store import END_STATES, RunDir
from ablate.store.checkpoints import newest_step
from ablate.store.leases import Leases, end_holder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import Prefixes, RunRequest
    from ablate.store import State

_POLL_SEC = 0.3
_LOOK_AGAIN_SEC = 2.0
"""Time between two checks of runs that other processes execute, and of whether our own workers live."""
_LATER_SEC = 15.0
"""A worker that hangs ends itself. If it cannot, the driver ends it this much later."""


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
        self._ended: set[tuple[str, int]] = set()
        self._looked = time.monotonic()

    def start(self, run: RunRequest) -> None:
        """Hand a run to a worker."""
        wanted = run.resources
        if wanted.devices_per_run > 1:  # the processes that Ray Train starts hold the devices
            remote = self._together.options(num_cpus=0, name=run.run_id)
        else:
            remote = (self._alone if run.config.trainer is None else self._foreign).options(
                num_cpus=wanted.cpus,
                num_gpus=wanted.gpus,
                resources=wanted.custom or None,
                name=run.run_id,
            )
        task = remote.remote(run)
        beats = Leases(RunDir(run.run_dir).attempts, wanted.hang_after_sec + _LATER_SEC)
        self._running[run.run_id] = task, run, beats

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

        for run_id, (_, _, beats) in self._running.items():
            attempt = beats.latest()
            if attempt and (run_id, attempt) not in self._ended and beats.stands_still(attempt):
                self._ended.add((run_id, attempt))
                message = f"no progress for {beats.stale_sec:.0f} s: the driver ended it"
                for node in ray.nodes():  # it is on one of them
                    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    ending = ray.remote(num_cpus=0, scheduling_strategy=strategy)(end_holder)
                    ending.remote(beats.folder, attempt, message)


class Queue:
    """``states``: of the runs that have ended; ``handed``: the runs that workers have, in order."""

    def __init__(
        self,
        runs: Sequence[RunRequest],
        workers: Workers,
        prefixes: Prefixes,
        *,
        gangs_at_once: int = 1,
        pauses_sec: Sequence[float],
    ) -> None:
        """Prepare to hand the runs over in order.

        ``gangs_at_once``: the number of runs on several devices that are handed over at once.
        ``pauses_sec``: the pause before each retry after a fault that may pass.
        """
        self._runs = {run.run_id: run for run in runs}
        self._dirs = {run.run_id: RunDir(run.run_dir) for run in runs}
        self._leases = {run_id: Leases(run.attempts) for run_id, run in self._dirs.items()}
        self._workers, self._prefixes, self._pauses_sec = workers, prefixes, pauses_sec
        self._gangs = {run.run_id for run in runs if run.resources.devices_per_run > 1}
        self._gangs_at_once = gangs_at_once
        self._due = dict.fromkeys(self._runs, (0.0, 0))
        """Runs to hand over: not before which time, and the attempt that was given up (0: none)."""
        self._tries: Counter[str] = Counter()
        self._reached: Counter[str] = Counter()
        self._elsewhere: dict[str, None] = {}
        self._looked = 0.0
        self._unneeded: dict[str, str] = {}
        self._is_stopping = False
        self.handed: dict[str, None] = {}
        self.states: dict[str, State] = {}

    @property
    def is_open(self) -> bool:
        """Whether some run has not ended."""
        return bool(self.handed or self._due or self._elsewhere)

    def move(self, now: float) -> None:
        """Hand over the runs that are due at ``now`` (seconds), and check runs executed elsewhere."""
        for run_id, (due, given_up) in list(self._due.items()):
            if due > now:
                continue
            # Inside Ray a run that waits for another's state, or for devices, would occupy a process.
            holder = self._prefixes.waits_for(run_id)
            if holder in self._runs and holder not in self.states:
                continue
            if run_id in self._gangs and len(self._gangs & self.handed.keys()) >= self._gangs_at_once:
                continue
            del self._due[run_id]
            if (reason := self._prefixes.why_it_cannot_begin(run_id)) is not None:
                self._end(run_id, "failed", reason)
                continue
            self._dirs[run_id].stop_path.unlink(missing_ok=True)  # a request to an earlier attempt
            self.handed[run_id] = None
            self._workers.start(replace(self._runs[run_id], given_up=given_up))
        if self._elsewhere and now - self._looked >= _LOOK_AGAIN_SEC:
            self._looked = now
            for run_id in list(self._elsewhere):
                self._look_at(run_id)

    def take(self, run_id: str, end: TaskEnd, now: float) -> None:
        """Record the end of a run that was handed over, or plan a retry; ``now`` in seconds."""
        del self.handed[run_id]
        if end.state == "elsewhere":
            self._elsewhere[run_id] = None
        elif run_id in self._unneeded and end.state not in {*END_STATES, "failed"}:
            self._mark_stopped(run_id)
        elif not end.transient or self._is_stopping:
            self.states[run_id] = end.state
        else:
            if (reached := newest_step(self._dirs[run_id].checkpoints)) > self._reached[run_id]:
                # It came further than before, so it was ended by something else, such as a kill.
                self._reached[run_id], self._tries[run_id] = reached, 0
            if self._tries[run_id] == len(self._pauses_sec):
                self._end(run_id, "failed", f"{end.message} ({len(self._pauses_sec) + 1} attempts)")
                return
            self._due[run_id] = now + self._pauses_sec[self._tries[run_id]], 0
            self._tries[run_id] += 1

    def _look_at(self, run_id: str) -> None:
        """Check a run that another process executes; take it over if its holder is gone."""
        state, leases = self._dirs[run_id].state(), self._leases[run_id]
        if state in END_STATES or state == "failed":
            self.states[run_id] = state
        elif leases.is_held(latest := leases.latest()):
            return
        elif run_id in self._unneeded:
            self._mark_stopped(run_id)
        else:
            self._due[run_id] = 0.0, latest
        del self._elsewhere[run_id]

    def end_unneeded(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed, given by id with the reason.

        Runs that have begun are asked to stop.
        """
        for run_id, reason in unneeded.items():
            if run_id not in self._runs or run_id in self.states or run_id in self._unneeded:
                continue
            self._unneeded[run_id] = reason
            if self._due.pop(run_id, None) is not None:
                self._mark_stopped(run_id)
            else:
                self._dirs[run_id].ask_to_stop(reason)
                self._take_back(run_id)

    def stop(self) -> None:
        """Hand over no more runs, take back those that have not begun, and ask the others to stop."""
        self._is_stopping = True
        for path in {run.stop_path for run in self._runs.values()}:
            path.touch()
        self.states |= {run_id: self._dirs[run_id].state() for run_id in (*self._due, *self._elsewhere)}
        self._due.clear()
        self._elsewhere.clear()
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
