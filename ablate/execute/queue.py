"""The runs of one execution: handed to workers, waiting for a retry, executed elsewhere, or ended.

``Queue`` has the rules: seed order, pauses before retries, turns of runs on several devices, runs that begin
with the state of another, runs that another process executes, runs that are not needed, a stop. It is a state
machine without a clock and without Ray: the caller passes times and ended runs, and ``Tasks`` does the work
with Ray and the run store.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.execute.environment import git_commit
from ablate.execute.multi_device import execute_together
from ablate.execute.worker import RunTask, TaskEnd, execute_run, lost_run
from ablate.store import END_STATES, State, StudyStore
from ablate.store.checkpoints import newest_step
from ablate.store.leases import STALE_SEC, Leases, end_holder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.execute.prefixes import Prefixes

_POLL_SEC = 0.3
_LOOK_AGAIN_SEC = 2.0
"""Time between two checks of a run that another process executes, or of the life of one's own."""
_LATER_SEC = 15.0
"""A worker ends itself when it hangs; if it cannot, the driver ends it so much later."""


class Queue:
    """``states``: of the runs that have ended; ``handed``: the runs that workers have, in order."""

    def __init__(
        self,
        runs: Sequence[str],
        tasks: Tasks,
        *,
        gangs: Collection[str] = (),
        gangs_at_once: int = 1,
        pauses_sec: Sequence[float],
    ) -> None:
        """Hand the runs over in order. ``pauses_sec``: before each retry after a fault that may pass.

        ``gangs``: the runs on several devices, at most ``gangs_at_once`` together.
        """
        self._tasks, self._pauses_sec = tasks, pauses_sec
        self._gangs, self._gangs_at_once = frozenset(gangs), gangs_at_once
        self._tries = dict.fromkeys(runs, 0)
        self._reached = dict.fromkeys(runs, 0)
        self._turns: deque[tuple[str, int]] = deque()
        self._waiting: dict[str, float] = {}
        self._elsewhere: dict[str, None] = {}
        self._looked = 0.0
        self._unneeded: dict[str, str] = {}
        self._is_stopping = False
        self.handed: dict[str, None] = {}
        self.states: dict[str, State] = {}
        for run_id in runs:
            self._hand_over(run_id)

    @property
    def is_open(self) -> bool:
        """Whether some run has not ended."""
        return bool(self.handed or self._waiting or self._elsewhere or self._turns)

    def _hand_over(self, run_id: str, given_up: int = 0) -> None:
        holder = self._tasks.waits_for(run_id)
        if holder in self._tries and holder not in self.states:
            self._turns.append((run_id, given_up))
            return
        if run_id in self._gangs and len(self._gangs & self.handed.keys()) >= self._gangs_at_once:
            self._turns.append((run_id, given_up))  # waiting inside Ray would occupy a process
            return
        if (failed := self._tasks.fail_if_it_cannot_begin(run_id)) is not None:
            self.states[run_id] = failed
            return
        self.handed[run_id] = None
        self._tasks.start(run_id, given_up)

    def move(self, now: float) -> None:
        """Hand over the runs that are due at ``now`` (seconds), and check runs executed elsewhere."""
        for _ in range(len(self._turns)):
            self._hand_over(*self._turns.popleft())
        for run_id in [run_id for run_id, due in self._waiting.items() if due <= now]:
            del self._waiting[run_id]
            self._hand_over(run_id)
        if self._elsewhere and now - self._looked >= _LOOK_AGAIN_SEC:
            self._looked = now
            for run_id in list(self._elsewhere):
                self._look_at(run_id)

    def take(self, run_id: str, end: TaskEnd, now: float) -> None:
        """Take in the end of a run that was handed over."""
        del self.handed[run_id]
        may_try = end.transient and not self._is_stopping
        if may_try and (reached := self._tasks.reached(run_id)) > self._reached[run_id]:
            # It came further than before: what ended it, such as a kill from outside, is not its own fault.
            self._reached[run_id], self._tries[run_id] = reached, 0
        if end.state == "elsewhere":
            self._elsewhere[run_id] = None
        elif run_id in self._unneeded and end.state not in {*END_STATES, "failed"}:
            self.states[run_id] = self._tasks.mark_stopped(run_id, self._unneeded[run_id])
        elif may_try and self._tries[run_id] < len(self._pauses_sec):
            self._waiting[run_id] = now + self._pauses_sec[self._tries[run_id]]
            self._tries[run_id] += 1
        elif may_try:
            self.states[run_id] = self._tasks.mark_failed(run_id, end, len(self._pauses_sec) + 1)
        else:
            self.states[run_id] = end.state

    def _look_at(self, run_id: str) -> None:
        """Check a run that another process executes; take it over if its holder is gone."""
        state = self._tasks.state(run_id)
        if state in END_STATES or state == "failed":
            del self._elsewhere[run_id]
            self.states[run_id] = state
            return
        abandoned = self._tasks.abandoned(run_id)
        if abandoned is None:
            return
        del self._elsewhere[run_id]
        if run_id in self._unneeded:
            self.states[run_id] = self._tasks.mark_stopped(run_id, self._unneeded[run_id])
        else:
            self._hand_over(run_id, given_up=abandoned)

    def end_unneeded(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed, each for its reason: ask those that have begun to stop."""
        for run_id, reason in unneeded.items():
            if run_id not in self._tries or run_id in self.states or run_id in self._unneeded:
                continue
            self._unneeded[run_id] = reason
            if run_id in self.handed or run_id in self._elsewhere:
                self._tasks.ask_to_stop(run_id, reason)
                if run_id in self.handed and self._tasks.state(run_id) != "running":
                    self._tasks.cancel(run_id)
            else:
                self._waiting.pop(run_id, None)
                self._turns = deque(turn for turn in self._turns if turn[0] != run_id)
                self.states[run_id] = self._tasks.mark_stopped(run_id, reason)

    def stop(self) -> None:
        """Hand over no more runs, take back those that have not begun, and ask the others to stop."""
        self._is_stopping = True
        self._tasks.stop_all()
        for run_id in (*self._waiting, *self._elsewhere, *(run_id for run_id, _ in self._turns)):
            self.states[run_id] = self._tasks.state(run_id)
        self._turns.clear()
        self._waiting.clear()
        self._elsewhere.clear()
        for run_id in self.handed:
            if self._tasks.state(run_id) != "running":
                self._tasks.cancel(run_id)


def _in_short(error: Exception) -> str:
    """Say why Ray lost a worker; its own text on memory and on dead workers is long and of its log files."""
    known = {
        "OutOfMemoryError": "the machine ran low on memory, and Ray ended it",
        "WorkerCrashedError": "its process was killed, as where memory runs out, or crashed",
    }
    return known.get(type(error).__name__) or str(error).strip().splitlines()[0]


class Tasks(contextlib.AbstractContextManager["Tasks"]):
    """The runs of one execution as Ray tasks, and what the run store says of them."""

    def __init__(
        self,
        store: StudyStore,
        runs: Sequence[RunRequest],
        trainer: str,
        prefixes: Prefixes,
    ) -> None:
        import ray

        # Ray's own retries have no pauses and do not write the ledger.
        self._remote = ray.remote(max_retries=0)(execute_run)
        # A user's own code may leave anything behind: its process ends with the run.
        self._remote_alone = ray.remote(max_retries=0, max_calls=1)(execute_run)
        self._remote_together = ray.remote(max_retries=0)(execute_together)
        self._store, self._trainer = store, trainer
        self._prefixes = prefixes
        self._requests = {run.run_id: run for run in runs}
        self._leases = {run.run_id: Leases(store.run(run.run_id).attempts, STALE_SEC) for run in runs}
        self._stop_path = store.path.resolve() / f".stop-{uuid.uuid4().hex[:8]}"
        self._commit = git_commit()
        self._references: dict[str, Any] = {}
        self._beats = {
            run.run_id: Leases(store.run(run.run_id).attempts, run.resources.hang_after_sec + _LATER_SEC)
            for run in runs
        }
        self._ended: set[tuple[str, int]] = set()
        self._looked = time.monotonic()

    def __exit__(self, *_exception: object) -> None:
        self._stop_path.unlink(missing_ok=True)

    def start(self, run_id: str, given_up: int) -> None:
        """Hand a run to a worker. ``given_up``: the attempt whose holder was found dead, or 0."""
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
            stale_sec=STALE_SEC,
            given_up=given_up,
            prefix=self._prefixes.of(run_id),
            prefixes=self._prefixes.kept(run_id),
        )
        if resources.devices_per_run > 1:  # the processes that Ray Train starts hold the devices
            options = self._remote_together.options(num_cpus=0, name=run_id)
        else:
            remote = self._remote if request.config.trainer is None else self._remote_alone
            options = remote.options(
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                resources=resources.custom or None,
                name=run_id,
            )
        self._references[run_id] = options.remote(task)

    def cancel(self, run_id: str) -> None:
        """Take back a run that no worker has begun; ``collect`` still yields its end."""
        import ray

        ray.cancel(self._references[run_id])

    def collect(self) -> Iterator[tuple[str, TaskEnd]]:
        """Wait for a moment, and yield the tasks that have ended with their ends."""
        import ray

        if not self._references:
            time.sleep(_POLL_SEC)
            return
        if time.monotonic() - self._looked >= _LOOK_AGAIN_SEC:
            self._looked = time.monotonic()
            self._end_what_hangs()
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
                end = lost_run(self._store.run(run_id), _in_short(error))
            yield run_id, end

    def _end_what_hangs(self) -> None:
        """Kill workers that show no life, as one that is stopped or holds Python's lock in a call."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for run_id in self._references:
            beats = self._beats[run_id]
            attempt = beats.latest()
            if not attempt or (run_id, attempt) in self._ended or not beats.stands_still(attempt):
                continue
            self._ended.add((run_id, attempt))
            what = beats.folder, attempt, f"no progress for {beats.stale_sec:.0f} s: the driver ended it"
            if end_holder(*what):
                continue
            for node in ray.nodes():  # on the machine that holds it
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ray.remote(num_cpus=0)(end_holder).options(scheduling_strategy=strategy).remote(*what)

    def stop_all(self) -> None:
        """Ask all runs that are executed here to stop."""
        self._stop_path.touch()

    def ask_to_stop(self, run_id: str, reason: str) -> None:
        """Ask a run's worker to end it."""
        self._store.run(run_id).ask_to_stop(reason)

    def state(self, run_id: str) -> State:
        """Look up the state of a run."""
        return self._store.run(run_id).state()

    def reached(self, run_id: str) -> int:
        """Return the step of the newest checkpoint of a run, 0 without one."""
        return newest_step(self._store.run(run_id).checkpoints)

    def abandoned(self, run_id: str) -> int | None:
        """Return the latest attempt of a run without a live worker, else None."""
        latest = self._leases[run_id].latest()
        return None if self._leases[run_id].is_held(latest) else latest

    def waits_for(self, run_id: str) -> str | None:
        """Return the run to wait for, or None."""
        return self._prefixes.waits_for(run_id)

    def fail_if_it_cannot_begin(self, run_id: str) -> State | None:
        """Mark a run that cannot begin as failed and return its state; None if it can."""
        if (reason := self._prefixes.why_it_cannot_begin(run_id)) is None:
            return None
        return self._mark_failed(run_id, reason) or "pending"

    def mark_stopped(self, run_id: str, reason: str) -> State:
        """Mark a run as not needed, unless it has ended or is held; return its state."""
        run = self._store.run(run_id)
        state = run.state()
        if state in {*END_STATES, "failed", "stopped"} or self._leases[run_id].is_held():
            return state
        run.write_status(replace(run.status(), state="stopped", message=reason, ended_unix=time.time()))
        run.stop_path.unlink(missing_ok=True)
        return "stopped"

    def mark_failed(self, run_id: str, end: TaskEnd, attempts: int) -> State:
        """Mark a run that has used all its attempts as failed; return its state."""
        failed = self._mark_failed(run_id, f"{end.message} ({attempts} attempts)")
        return failed or (end.state if end.state != "elsewhere" else "interrupted")

    def _mark_failed(self, run_id: str, message: str) -> State | None:
        """Write that a run has failed; None where that cannot be written."""
        run = self._store.run(run_id)
        with contextlib.suppress(OSError, ValueError):
            run.write_status(replace(run.status(), state="failed", message=message, ended_unix=time.time()))
            return "failed"
        return None
