"""The search before a study's seeds: its trials are the runs of a study beside it, on a smaller budget.

How it fails: a failed run or an interruption leaves the trial open and ends the search, because no trial is
chosen from an incomplete round. A diverged run counts with the loss at which a run is called diverged,
because Optuna takes an infinity for a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.plan.tuning import fingerprint, trial_ids, trial_plan
from ablate.run.schedule import divergence_bound
from ablate.search.engine import TrialGroup, TrialResult, search
from ablate.search.ledger import Ledger, open_storage, violation
from ablate.search.rates import Rates, best_trial
from ablate.search.runs import run_ids
from ablate.store import END_STATES
from ablate.store.plan_file import TrialRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.execute.driver import ExecutionEnd
    from ablate.plan import Plan
    from ablate.search.engine import Asked
    from ablate.search.ledger import Proposal
    from ablate.search.runs import TrialRuns
    from ablate.store import State, StudyStore
    from ablate.store.plan_file import GroupTuning
    from ablate.study.search_space import Tune


@dataclass(frozen=True, kw_only=True)
class Searched:
    """How far a search came. ``plan``: of its trials; ``open_runs``: of trials without an end."""

    tuning: Tune
    plan: Plan
    open_runs: frozenset[str]
    outcome: ExecutionEnd


def first_trials(plan: Plan, tuning: Tune) -> Plan:
    """Return the plan of each group's first trial, which has the study's own values."""
    return trial_plan(plan, tuning, [(group.name, 0, group.shared) for group in tuning.groups])


def tune_arms(plan: Plan, tuning: Tune, runs: TrialRuns) -> Searched:
    """Search the values of every group; ``runs`` trains them in the store of the trials' study."""
    storage = open_storage(None, runs.store.path)
    groups = [_group(storage, plan, tuning, group) for group in tuning.groups]

    def plan_of_all() -> Plan:
        asked = [(group.name, one.number, one.params) for group in groups for one in group.ledger.trials()]
        return trial_plan(plan, tuning, asked) if asked else first_trials(plan, tuning)

    def run(asked: Sequence[Asked]) -> list[TrialResult | None]:
        runs.write(plan_of_all())
        these = [(one.group.name, one.trial.number, one.trial.params) for one in asked]
        runs.train(asked, trial_plan(plan, tuning, these))
        return [_result(runs, one) for one in asked]

    runs.write(plan_of_all())
    is_done = search(groups, tuning.at_once, run)
    trials = [group.ledger.trials()[: group.num_trials] for group in groups]
    found = [
        _found(runs.store, group, own, is_done=is_done)
        for group, own in zip(tuning.groups, trials, strict=True)
    ]
    unended = [one for own in trials for one in own if not one.state.is_finished()]
    return Searched(
        tuning=replace(tuning, groups=tuple(found)),
        plan=plan_of_all(),
        open_runs=frozenset(run_id for one in unended for run_id in one.user_attrs["runs"]),
        outcome=runs.outcome,
    )


def _group(storage: BaseStorage, plan: Plan, tune: Tune, group: GroupTuning) -> TrialGroup:
    def describe(found: Proposal) -> dict[str, Any]:
        ids = [run_id for arm in group.arms for run_id in trial_ids(plan.arm(arm), tune, found.params)]
        return {"runs": ids}

    space = Rates(
        fields=tune.fields,
        shared=group.shared,
        sampler=tune.sampler,
        prune=tune.prune,
        tokens=tune.tokens,
        seed=tune.seeds[0],
    )
    ledger = Ledger(storage, f"{tune.study}: {group.name} [{fingerprint(plan, tune, group)}]")
    return TrialGroup(name=group.name, ledger=ledger, space=space, num_trials=tune.trials, describe=describe)


def _result(runs: TrialRuns, one: Asked) -> TrialResult | None:
    """Return a trial's result, without values while some run has not ended."""
    curve, states = runs.curve(run_ids(one)), runs.states(one)
    if all(state in END_STATES for state in states):
        losses = [_final(runs, run_id, state) for run_id, state in zip(run_ids(one), states, strict=True)]
        return TrialResult(values=(fmean(losses),), violation=float(states.count("diverged")), curve=curve)
    return TrialResult(curve=curve)


def _final(runs: TrialRuns, run_id: str, state: State) -> float:
    """Return a run's last validation loss, or the bound of divergence for one that diverged."""
    if state == "diverged":
        config = runs.store.run(run_id).config()
        return divergence_bound(config["training"]["divergence_loss"], config["vocab_size"])
    losses = runs.losses(run_id)
    return losses[max(losses)]


def _found(
    store: StudyStore, group: GroupTuning, trials: Sequence[FrozenTrial], *, is_done: bool
) -> GroupTuning:
    """Return a group with its told trials, and with the best values once all are told."""
    records = tuple(
        TrialRecord(
            number=trial.number,
            values=trial.params,
            state="complete" if trial.state.name == "COMPLETE" else "pruned",
            loss=trial.value if trial.state.name == "COMPLETE" else None,
            diverged=round(violation(trial)),
            tokens=sum(store.run(run_id).status().tokens for run_id in trial.user_attrs["runs"]),
            runs=tuple(trial.user_attrs["runs"]),
        )
        for trial in trials
        if trial.state.name in ("COMPLETE", "PRUNED")
    )
    best = best_trial(trials)
    chosen = group.shared if best is None else best.params
    return replace(group, trials=records, chosen=chosen if is_done else None)
