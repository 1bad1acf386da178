"""The search before a study's seeds: its trials are runs of a second study, with a smaller budget.

How it fails: a failed run or an interruption leaves the trial open and ends the search, because no trial is
chosen from an incomplete round. A diverged run counts with the loss at which a run is called diverged,
because Optuna takes an infinity for a result.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.plan.tuning import trial_arms, trials_plan
from ablate.search.engine import (
    TrialGroup,
    TrialResult,
    end_loss,
    is_feasible,
    open_storage,
    open_study,
    open_trial,
    search,
    seed_of,
    suggestions,
    violation,
)
from ablate.store import END_STATES
from ablate.store.plan_file import TrialRecord
from ablate.study.search_space import combinations, spread_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optuna.trial import FrozenTrial

    from ablate.plan import Plan, PlannedArm
    from ablate.search.engine import Asked, TrialRuns
    from ablate.store import StudyStore
    from ablate.store.plan_file import GroupTuning
    from ablate.study.search_space import Tune

_WATCHED_FROM = 1 / 3
"""No trial is hopeless before this share of its budget: a high rate often falls behind at first."""


def propose_values(
    tuning: Tune, shared: Mapping[str, Any], seen: Sequence[FrozenTrial], seed: int
) -> FrozenTrial:
    """Make an open trial of untried values: the study's, ``shared``, then spread points, then TPE's."""
    fields = tuning.fields
    tried = [trial.params for trial in seen]
    distributions = {name: field.distribution() for name, field in fields.items()}

    def proposals() -> Iterator[dict[str, Any]]:
        yield dict(shared)
        if tuning.sampler == "grid":
            yield from combinations(fields)
        elif len(seen) >= 2 * (1 + len(fields)):
            # the first points are spread over the space
            options = {"n_startup_trials": 1, "multivariate": len(fields) > 1}
            seed_of_tpe = seed_of(tuning.seeds[0], seed)
            for values in suggestions(seen, distributions, seed_of_tpe, **options):
                yield {name: fields[name].tidy(value) for name, value in values.items()}
        for index in itertools.count(len(seen)):
            yield spread_point(fields, index)

    untried = next(values for values in proposals() if values not in tried)
    return open_trial(untried, distributions)


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the lowest loss and without diverged runs, or None."""
    return min(
        filter(is_feasible, trials),
        key=lambda trial: (trial.values, trial.number),
        default=None,
    )


def tune_arms(plan: Plan, tuning: Tune, runs: TrialRuns) -> tuple[Tune, set[str]]:
    """Search the values of every group; ``runs`` trains them in the store of the trials' study.

    Returns the search as far as it came, and the ids of the runs of trials without an end.
    """
    storage = open_storage(runs.store.path)
    watched_from = round(tuning.budget * _WATCHED_FROM) if tuning.prune else None
    groups = []
    for group in tuning.groups:

        def arms(
            trial: FrozenTrial, group: GroupTuning = group
        ) -> Sequence[PlannedArm]:
            return trial_arms(plan, tuning, group, trial.number, trial.params)

        study_name = f"{tuning.study}: {group.name} [{group.fingerprint}]"
        groups.append(
            TrialGroup(
                name=group.name,
                study=open_study(storage, study_name),
                propose=partial(propose_values, tuning, group.shared),
                arms=arms,
                num_trials=tuning.trials,
                watched_from=watched_from,
            )
        )

    def run(asked: Sequence[Asked]) -> list[TrialResult]:
        every_arm: list[PlannedArm] = []
        for group in groups:
            for trial in group.study.get_trials():
                every_arm += group.arms(trial)
        runs.train(asked, trials_plan(plan, tuning, every_arm))
        return [_result(runs, trial) for trial in asked]

    is_done = search(groups, tuning.at_once, run)
    ended = []
    open_runs: set[str] = set()
    for group, trial_group in zip(tuning.groups, groups, strict=True):
        trials = trial_group.study.get_trials()[: tuning.trials]
        records = []
        for trial in trials:
            run_ids = trial_group.run_ids(trial)
            if trial.state.is_finished():
                records.append(_record(runs.store, trial, run_ids))
            else:
                open_runs.update(run_ids)
        chosen = None
        if is_done:
            best = best_trial(trials)
            chosen = group.shared if best is None else best.params
        ended.append(replace(group, trials=tuple(records), chosen=chosen))
    return replace(tuning, done=is_done, groups=tuple(ended)), open_runs


def _result(runs: TrialRuns, asked: Asked) -> TrialResult:
    """Give no values until all runs ended; count a diverged run with the loss at which it is called so."""
    curve = runs.curve(asked)
    states = runs.states(asked)
    if not {*END_STATES}.issuperset(states):
        return TrialResult(curve=curve)
    loss = fmean(end_loss(runs.store.run(run_id)) for run_id in asked.run_ids)
    return TrialResult(
        values=(loss,), violation=float(states.count("diverged")), curve=curve
    )


def _record(
    store: StudyStore, trial: FrozenTrial, run_ids: Sequence[str]
) -> TrialRecord:
    is_complete = trial.state.name == "COMPLETE"
    return TrialRecord(
        number=trial.number,
        values=trial.params,
        state="complete" if is_complete else "pruned",
        loss=trial.value if is_complete else None,
        diverged=round(violation(trial)),
        tokens=sum(store.run(run_id).status().tokens for run_id in run_ids),
        runs=tuple(run_ids),
    )
