"""One engine for every search: rounds of trials that are asked of a space, run, and told to their ledgers.

``TrialRuns`` trains trials as ordinary runs of a run store: the ledger has the questions, the store the
training. The plan in the store grows with the trials, so that all readers of a study can read a search.

A trial is written to its ledger before it runs, and told when its round is over. A round depends only on the
rounds before it: trials of the same round count as open, however they ended. A killed search therefore
resumes as if it had not been killed: it runs open trials, fills the unfinished round, and asks no told trial
again. All groups go through their rounds together, so that their runs use a whole machine.

How it fails: a round with missing results (an interruption, a failed run) ends the search, and none of its
trials is told. An exception of ``run`` does the same. A trial that failed by its own fault is told as failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.execute.driver import ExecutionEnd
from ablate.execute.pending_runs import find_todo
from ablate.search.ledger import as_open

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.trial import FrozenTrial

    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan
    from ablate.search.ledger import Curve, Ledger, Proposal
    from ablate.search.spaces import Grid, Rates
    from ablate.store import RunDir, State, StudyStore

    Run = Callable[[Sequence["Asked"]], Sequence["TrialResult | None"]]
    """Runs trials; returns their results in order, None for a trial that came to no end."""
    Unneeded = Callable[[], Mapping[str, str]]
    Execute = Callable[[list[RunRequest], Unneeded], ExecutionEnd]


@dataclass(frozen=True, kw_only=True)
class TrialGroup:
    """A ledger, and the space that its trials come from, whose answers depend on what it is given alone.

    ``describe``: further attributes of a trial.
    """

    name: str
    ledger: Ledger
    space: Grid | Rates
    num_trials: int
    describe: Callable[[Proposal], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to be run. ``earlier``: the trials of the rounds before, all of them told."""

    group: TrialGroup
    trial: FrozenTrial
    earlier: Sequence[FrozenTrial]

    @property
    def run_ids(self) -> list[str]:
        """The ids of its runs, of a trial of a run store."""
        return list(self.trial.user_attrs["runs"])

    def hopeless_at(self, curve: Curve) -> int | None:
        """Return the tokens at which the trial need not go on; None if it is worth going on."""
        return self.group.space.hopeless_at(self.earlier, curve)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial's values, with a violation if they stand for a miss; or why it has no values.

    ``curve``: decides whether the trial was hopeless; then ``values`` are ignored.
    """

    values: tuple[float, ...] | None = None
    violation: float | None = None
    failed: str | None = None
    curve: Curve = field(default_factory=dict)


def search(groups: Sequence[TrialGroup], at_once: int, run: Run) -> bool:
    """Run every group's trials; return whether all rounds are complete.

    ``at_once``: the number of a group's trials in a round.
    """
    most = max(group.num_trials for group in groups)
    for round_ in range(-(-most // at_once)):
        asked = [one for group in groups for one in _ask(group, at_once, round_)]
        ended = []
        for one, result in zip(asked, run(asked) if asked else (), strict=True):
            end = None if result is None else one.hopeless_at(result.curve)
            if result is None or (end is None and result.values is None and result.failed is None):
                return False
            ended.append((one, result, end))
        for one, result, end in ended:
            tell = partial(one.group.ledger.tell, one.trial.number)
            if end is not None:
                tell(curve={tokens: loss for tokens, loss in result.curve.items() if tokens <= end})
            else:
                tell(result.values, violation=result.violation, failed=result.failed, curve=result.curve)
    return True


def _ask(group: TrialGroup, at_once: int, round_: int) -> list[Asked]:
    """Fill a group's round, and return its trials that have not been told."""
    trials = group.ledger.trials()
    start, stop = round_ * at_once, min((round_ + 1) * at_once, group.num_trials)
    for number in range(len(trials), stop):
        position = number - start
        found = group.space.propose([*trials[:start], *map(as_open, trials[start:])], round_, position)
        attrs = {**group.describe(found), "round": round_, "position": position, **found.attrs}
        distributions = {name: group.space.distributions[name] for name in found.params}
        trials.append(group.ledger.add(found.params, distributions, attrs))
    return [
        Asked(group=group, trial=trial, earlier=trials[:start])
        for trial in trials[start:stop]
        if not trial.state.is_finished()
    ]


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

    def write(self, plan: Plan) -> None:
        """Write the plan of every trial that was asked, for all who read the run store."""
        self.store.write_plan(plan)

    def train(self, asked: Sequence[Asked], plan: Plan) -> None:
        """Run the trials' runs that have not ended. ``plan``: of these trials alone."""

        def unneeded() -> dict[str, str]:
            return {
                run_id: f"trial {one.trial.number} is worse than the median of earlier ones"
                for one in asked
                if one.group.space.prune and one.hopeless_at(self.curve(one.run_ids)) is not None
                for run_id in one.run_ids
            }

        todo = find_todo(self.store, self.requests(plan), unneeded, retry_failed=self.retry_failed)
        if todo.runs:
            ended = self.execute(list(todo.runs), unneeded)
            self.outcome = replace(ended, states=self.outcome.states | ended.states)

    def states(self, one: Asked) -> list[State]:
        """Return the states of a trial's runs."""
        return [self.store.run(run_id).state() for run_id in one.run_ids]

    def curve(self, ids: Sequence[str]) -> Curve:
        """Return the mean loss over runs, where all of them were evaluated."""
        curves = [losses_of(self.store.run(run_id)) for run_id in ids]
        common = set.intersection(*map(set, curves))
        return {tokens: fmean(curve[tokens] for curve in curves) for tokens in sorted(common)}


def losses_of(run: RunDir) -> Curve:
    """Return a run's validation losses by tokens; its file is read anew when it has changed."""
    found = run.metrics_path.stat() if run.metrics_path.exists() else None
    return _losses(run, None if found is None else (found.st_ino, found.st_size))


@lru_cache(maxsize=1024)
def _losses(run: RunDir, _stamp: tuple[int, int] | None) -> Curve:
    return {row["tokens"]: row["val_loss"] for row in run.metrics("eval")}
