"""Trials as ordinary runs of a run store: the ledger has the questions, the store the training.

The plan in the store grows with the trials, so that all readers of a study can read a search. A run that
failed has no result; an interruption leaves runs without one (``outcome``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from ablate.execute.driver import ExecutionEnd
from ablate.execute.pending_runs import find_todo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan
    from ablate.search.engine import Asked
    from ablate.search.ledger import Curve
    from ablate.store import RunDir, State, StudyStore

    Unneeded = Callable[[], Mapping[str, str]]
    Execute = Callable[[list[RunRequest], Unneeded], ExecutionEnd]


@dataclass(kw_only=True)
class TrialRuns:
    """Trains trials in ``store``, to which nobody else may write.

    ``requests`` returns the runs of a plan, ``execute`` runs some of them.
    """

    store: StudyStore
    requests: Callable[[Plan], list[RunRequest]]
    execute: Execute
    retry_failed: bool = False
    outcome: ExecutionEnd = field(default_factory=lambda: ExecutionEnd(states={}, interrupted=False))
    _read: dict[str, tuple[tuple[int, int], Curve]] = field(default_factory=dict)

    def write(self, plan: Plan) -> None:
        """Write the plan of every trial that was asked, for all who read the run store."""
        self.store.write_plan(plan)

    def train(self, asked: Sequence[Asked], plan: Plan) -> None:
        """Run the trials' runs that have not ended. ``plan``: of these trials alone."""

        def unneeded() -> dict[str, str]:
            return {
                run_id: f"trial {one.trial.number} is worse than the median of earlier ones"
                for one in asked
                if one.group.space.prune and one.hopeless_at(self.curve(run_ids(one))) is not None
                for run_id in run_ids(one)
            }

        todo = find_todo(self.store, self.requests(plan), unneeded, retry_failed=self.retry_failed)
        if todo.runs:
            ended = self.execute(list(todo.runs), unneeded)
            self.outcome = replace(ended, states=self.outcome.states | ended.states)

    def states(self, one: Asked) -> list[State]:
        """Return the states of a trial's runs."""
        return [self.store.run(run_id).state() for run_id in run_ids(one)]

    def curve(self, ids: Sequence[str]) -> Curve:
        """Return the mean loss over runs, where all of them were evaluated."""
        curves = [self.losses(run_id) for run_id in ids]
        common = set.intersection(*map(set, curves))
        return {tokens: fmean(curve[tokens] for curve in curves) for tokens in sorted(common)}

    def losses(self, run_id: str) -> Curve:
        """Return a run's validation losses; its file is read anew when it has changed."""
        run = self.store.run(run_id)
        try:
            found = run.metrics_path.stat()
        except FileNotFoundError:
            return {}
        stamp = found.st_ino, found.st_size
        if self._read.get(run_id, (None,))[0] != stamp:
            self._read[run_id] = stamp, losses_of(run)
        return self._read[run_id][1]


def run_ids(one: Asked) -> list[str]:
    """Return the ids of a trial's runs."""
    ids: list[str] = one.trial.user_attrs["runs"]
    return ids


def losses_of(run: RunDir) -> Curve:
    """Return a run's validation losses by tokens."""
    return {row["tokens"]: row["val_loss"] for row in run.metrics("eval")}
