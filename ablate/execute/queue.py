"""The runs of one execution: handed to workers, waiting for a retry, executed elsewhere, or ended.

A state machine without a clock and without Ray: the caller passes times and ended runs, and ``Hands`` does
the work. The rules are here: seed order, pauses before retries, turns of runs on several devices, runs that
another process executes, runs that are not needed, a stop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.execute.worker import TaskEnd
    from ablate.store import State

_LOOK_AGAIN_SEC = 2.0
"""Time between two checks of a run that another process executes."""


class Hands(Protocol):
    """Does the queue's work: with Ray and the run store, or as a fake in a test."""

    def start(self, run_id: str, given_up: int) -> None:
        """Hand a run to a worker. ``given_up``: the attempt whose holder was found dead, or 0."""

    def cancel(self, run_id: str) -> None:
        """Take back a run that no worker has begun; ``take`` still gets its end."""

    def stop_all(self) -> None:
        """Ask all runs that are executed here to stop."""

    def ask_to_stop(self, run_id: str, reason: str) -> None:
        """Ask a run's worker to end it."""

    def state(self, run_id: str) -> State:
        """Look up the state of a run."""

    def abandoned(self, run_id: str) -> int | None:
        """Return the latest attempt of a run without a live worker, else None."""

    def mark_stopped(self, run_id: str, reason: str) -> State:
        """Mark a run as not needed, unless it has ended or is held; return its state."""

    def mark_failed(self, run_id: str, end: TaskEnd, attempts: int) -> State:
        """Mark a run that has used all its attempts as failed; return its state."""


class Queue:
    """``states``: of the runs that have ended; ``handed``: the runs that workers have, in order."""

    def __init__(
        self,
        runs: Sequence[str],
        hands: Hands,
        *,
        gangs: Collection[str] = (),
        gangs_at_once: int = 1,
        pauses_sec: Sequence[float],
    ) -> None:
        """Hand the runs over in order. ``pauses_sec``: before each retry after a fault that may pass.

        ``gangs``: the runs on several devices, at most ``gangs_at_once`` together.
        """
        self._hands, self._pauses_sec = hands, pauses_sec
        self._gangs, self._gangs_at_once = frozenset(gangs), gangs_at_once
        self._tries = dict.fromkeys(runs, 0)
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
        if run_id in self._gangs and len(self._gangs & self.handed.keys()) >= self._gangs_at_once:
            self._turns.append((run_id, given_up))  # waiting inside Ray would occupy a process
            return
        self.handed[run_id] = None
        self._hands.start(run_id, given_up)

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
        if end.state == "elsewhere":
            self._elsewhere[run_id] = None
        elif run_id in self._unneeded and end.state not in {*END_STATES, "failed"}:
            self.states[run_id] = self._hands.mark_stopped(run_id, self._unneeded[run_id])
        elif may_try and self._tries[run_id] < len(self._pauses_sec):
            self._waiting[run_id] = now + self._pauses_sec[self._tries[run_id]]
            self._tries[run_id] += 1
        elif may_try:
            self.states[run_id] = self._hands.mark_failed(run_id, end, len(self._pauses_sec) + 1)
        else:
            self.states[run_id] = end.state

    def _look_at(self, run_id: str) -> None:
        """Check a run that another process executes; take it over if its holder is gone."""
        state = self._hands.state(run_id)
        if state in END_STATES or state == "failed":
            del self._elsewhere[run_id]
            self.states[run_id] = state
            return
        abandoned = self._hands.abandoned(run_id)
        if abandoned is None:
            return
        del self._elsewhere[run_id]
        if run_id in self._unneeded:
            self.states[run_id] = self._hands.mark_stopped(run_id, self._unneeded[run_id])
        else:
            self._hand_over(run_id, given_up=abandoned)

    def retire(self, unneeded: Mapping[str, str]) -> None:
        """End runs whose results are not needed, each for its reason: ask those that have begun to stop."""
        for run_id, reason in unneeded.items():
            if run_id not in self._tries or run_id in self.states or run_id in self._unneeded:
                continue
            self._unneeded[run_id] = reason
            if run_id in self.handed or run_id in self._elsewhere:
                self._hands.ask_to_stop(run_id, reason)
                if run_id in self.handed and self._hands.state(run_id) != "running":
                    self._hands.cancel(run_id)
            else:
                self._waiting.pop(run_id, None)
                self._turns = deque(turn for turn in self._turns if turn[0] != run_id)
                self.states[run_id] = self._hands.mark_stopped(run_id, reason)

    def stop(self) -> None:
        """Hand over no more runs, take back those that have not begun, and ask the others to stop."""
        self._is_stopping = True
        self._hands.stop_all()
        for run_id in (*self._waiting, *self._elsewhere, *(run_id for run_id, _ in self._turns)):
            self.states[run_id] = self._hands.state(run_id)
        self._turns.clear()
        self._waiting.clear()
        self._elsewhere.clear()
        for run_id in self.handed:
            if self._hands.state(run_id) != "running":
                self._hands.cancel(run_id)
