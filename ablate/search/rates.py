"""The search before a study's seeds, with trials that are ordinary runs of a study beside it.

The ledger says what was asked and told, the run store what was trained: an open trial's runs are found by
their ids, and those that have ended are not run again. The plan of the trials' study grows round by round, so
that whatever reads a study reads it, too.

How it fails: a run that failed leaves its trial open, and the search ends there, for no other trial is picked
on half a round; so does an interruption. A run that diverged counts at the loss from which a run is called
diverged, because Optuna takes an infinity for a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.execute.driver import Outcome, missing_runs
from ablate.plan.found import TrialRecord
from ablate.plan.lock import to_lock
from ablate.plan.tuning import fingerprint, trial_ids, trial_plan
from ablate.run.schedule import divergence_bound
from ablate.search.ledger import Ledger, open_storage
from ablate.search.pick import Settings, best_trial
from ablate.search.tune import Asked, Came, Curve, SearchGroup, search
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.execute.driver import RunRequest
    from ablate.plan import Plan
    from ablate.plan.found import GroupTuning, Tuning
    from ablate.store import State, StudyStore
    from ablate.study.space import Tune

    Unneeded = Callable[[], Mapping[str, str]]
    Execute = Callable[[list[RunRequest], Unneeded], Outcome]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """How far a search came. ``plan``: of its trials; ``open_runs``: of trials without an end."""

    tuning: Tuning
    plan: Plan
    open_runs: frozenset[str]
    outcome: Outcome


def first_trials(plan: Plan, tuning: Tuning) -> Plan:
    """Return the plan of the trials of which one knows before any is run: the study's own values."""
    return trial_plan(plan, tuning, [(group.name, 0, group.shared) for group in tuning.groups])


def tune_arms(
    store: StudyStore,
    plan: Plan,
    tuning: Tuning,
    *,
    requests: Callable[[Plan], list[RunRequest]],
    execute: Execute,
    retry_failed: bool = False,
) -> Searched:
    """Search the values of every group; ``store`` is the trials' study, which nobody else may write to.

    ``requests`` returns the runs of a plan, ``execute`` runs some of them.
    """
    storage = open_storage(None, store.path)
    groups = [_search_group(storage, plan, tuning, group) for group in tuning.groups]
    batch = _TrialRuns(store, plan, tuning, groups, requests, execute, retry_failed=retry_failed)
    batch.write_plan()
    is_done = search(groups, settings_of(tuning.tune), batch)
    found = tuple(
        _found(store, tuning.tune, group, one.ledger, is_done=is_done)
        for group, one in zip(tuning.groups, groups, strict=True)
    )
    opened = {
        run_id
        for one in groups
        for trial in one.ledger.trials()[: tuning.tune.trials]
        if trial.state == "open"
        for run_id in trial.attrs["runs"]
    }
    return Searched(
        tuning=replace(tuning, groups=found),
        plan=batch.plan_of_all(),
        open_runs=frozenset(opened),
        outcome=batch.outcome,
    )


def settings_of(tune: Tune) -> Settings:
    """Return how a study's groups are searched."""
    return Settings(
        space=tune.fields,
        sampler=tune.sampler,
        trials=tune.trials,
        at_once=tune.at_once,
        prune=tune.prune,
        tokens=tune.tokens,
        seed=tune.seeds[0],
    )


def _search_group(storage: Any, plan: Plan, tuning: Tuning, group: GroupTuning) -> SearchGroup:
    def runs_of(values: Mapping[str, Any]) -> list[str]:
        return [run_id for arm in group.arms for run_id in trial_ids(plan.arm(arm), tuning.tune, values)]

    name = f"{tuning.study}: {group.name} [{fingerprint(plan, tuning.tune, group)}]"
    return SearchGroup(name=group.name, ledger=Ledger(storage, name), shared=group.shared, runs_of=runs_of)


def _found(
    store: StudyStore, tune: Tune, group: GroupTuning, ledger: Ledger, *, is_done: bool
) -> GroupTuning:
    """Return a group with its told trials, and with the best values once all are told."""
    trials = ledger.trials()[: tune.trials]
    records = tuple(
        TrialRecord(
            number=trial.number,
            values=trial.params,
            state="complete" if trial.state == "complete" else "pruned",
            loss=trial.values[0] if trial.values else None,
            diverged=round(trial.violation or 0),
            tokens=sum(store.run(run_id).status().tokens for run_id in trial.attrs["runs"]),
            runs=tuple(trial.attrs["runs"]),
        )
        for trial in trials
        if trial.state in ("complete", "pruned")
    )
    if not is_done:
        return replace(group, trials=records)
    best = best_trial(trials)
    return replace(group, trials=records, chosen=group.shared if best is None else best.params)


@dataclass
class _Losses:
    """One run's validation losses by tokens, read anew when its file has changed."""

    stamp: tuple[int, int] = (0, 0)
    by_tokens: Curve = field(default_factory=dict)


class _TrialRuns:
    """Runs a batch of trials, and tells the driver of those that need not go on."""

    def __init__(
        self,
        store: StudyStore,
        plan: Plan,
        tuning: Tuning,
        groups: Sequence[SearchGroup],
        requests: Callable[[Plan], list[RunRequest]],
        execute: Execute,
        *,
        retry_failed: bool,
    ) -> None:
        self._store, self._plan, self._tuning = store, plan, tuning
        self._groups = groups
        self._requests, self._execute, self._retry_failed = requests, execute, retry_failed
        self._losses: dict[str, _Losses] = {}
        self.outcome = Outcome(states={}, interrupted=False)

    def plan_of_all(self) -> Plan:
        """Return the plan of every trial that was asked; before any, of the study's own values."""
        asked = [
            (group.name, trial.number, trial.params)
            for group in self._groups
            for trial in group.ledger.trials()
        ]
        return (
            trial_plan(self._plan, self._tuning, asked) if asked else first_trials(self._plan, self._tuning)
        )

    def write_plan(self) -> None:
        """Write the plan of the trials' study."""
        self._store.write_plan(to_lock(self.plan_of_all()))

    def __call__(
        self, asked: Sequence[Asked], is_hopeless: Callable[[Asked, Curve], bool]
    ) -> dict[tuple[str, int], Came]:
        """Train what the trials lack, and return what they came to."""
        self.write_plan()

        def unneeded() -> dict[str, str]:
            return {
                run_id: f"trial {one.number} is worse than the median of earlier ones"
                for one in asked
                if is_hopeless(one, self._curve(one.run_ids))
                for run_id in one.run_ids
            }

        plan = trial_plan(self._plan, self._tuning, [(one.group, one.number, one.values) for one in asked])
        left_out = unneeded()
        todo = [
            run
            for run in missing_runs(self._store, self._requests(plan), retry_failed=self._retry_failed)
            if run.run_id not in left_out
        ]
        if todo:
            ended = self._execute(todo, unneeded)
            self.outcome = replace(ended, states=self.outcome.states | ended.states)
        came = {one.key: self._came(one, is_hopeless) for one in asked}
        return {key: one for key, one in came.items() if one is not None}

    def _came(self, one: Asked, is_hopeless: Callable[[Asked, Curve], bool]) -> Came | None:
        curve = self._curve(one.run_ids)
        states = [self._store.run(run_id).state() for run_id in one.run_ids]
        if all(state in END_STATES for state in states):
            losses = [self._final(run_id, state) for run_id, state in zip(one.run_ids, states, strict=True)]
            return Came(curve=curve, loss=fmean(losses), diverged=states.count("diverged"))
        return Came(curve=curve, loss=None) if is_hopeless(one, curve) else None

    def _final(self, run_id: str, state: State) -> float:
        """Return a run's last validation loss, or the bound of divergence for one that diverged."""
        if state == "diverged":
            config = self._store.run(run_id).config()
            return divergence_bound(config["training"]["divergence_loss"], config["vocab_size"])
        losses = self._read(run_id)
        return losses[max(losses)]

    def _curve(self, run_ids: Sequence[str]) -> Curve:
        """Return the mean loss over a trial's runs, where all of them were evaluated."""
        curves = [self._read(run_id) for run_id in run_ids]
        common = set.intersection(*(set(curve) for curve in curves))
        return {tokens: fmean(curve[tokens] for curve in curves) for tokens in sorted(common)}

    def _read(self, run_id: str) -> Curve:
        run, known = self._store.run(run_id), self._losses.setdefault(run_id, _Losses())
        try:
            found = run.metrics_path.stat()
        except FileNotFoundError:
            return {}
        if known.stamp != (found.st_ino, found.st_size):
            rows = [row for row in run.metrics() if row["kind"] == "eval"]
            known.by_tokens = {row["tokens"]: row["val_loss"] for row in rows}
            known.stamp = (found.st_ino, found.st_size)
        return known.by_tokens
