"""The search before a study's seeds: its trials are runs of a second study, with a smaller budget.

How it fails: a failed run or an interruption leaves the trial open and ends the search, because no trial is
chosen from an incomplete round. A diverged run counts with the loss at which a run is called diverged,
because Optuna takes an infinity for a result.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.plan.tuning import trial_ids, trial_plan
from ablate.search.engine import (
    TrialGroup,
    TrialResult,
    end_loss,
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

    from ablate.plan import Plan
    from ablate.search.engine import Asked, TrialRuns
    from ablate.store import StudyStore
    from ablate.store.plan_file import GroupTuning
    from ablate.study.search_space import Tune

_POINTS = 100_000
_WATCHED_FROM = 1 / 3
"""No trial is hopeless before this share of its budget: a high rate often falls behind at first."""


def propose_values(
    tuning: Tune, own: Mapping[str, Any], seen: Sequence[FrozenTrial], seed: int
) -> FrozenTrial:
    """Make an open trial of untried values: the study's ``own``, then spread points, then TPE's."""
    fields, tried = tuning.fields, [trial.params for trial in seen]
    distributions = {name: field.distribution() for name, field in fields.items()}

    def proposals() -> Iterator[dict[str, Any]]:
        yield dict(own)
        if tuning.sampler == "grid":
            yield from combinations(fields)
        elif len(seen) >= 2 * (1 + len(fields)):  # the first points are spread over the space
            options = {"n_startup_trials": 1, "multivariate": len(fields) > 1}
            for one in suggestions(seen, distributions, seed_of(tuning.seeds[0], seed), **options):
                yield {name: fields[name].tidy(value) for name, value in one.items()}
        for at in range(len(seen), len(seen) + _POINTS):
            yield spread_point(fields, at)

    values = next(values for values in proposals() if values not in tried)
    return open_trial(values, distributions, {})


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the lowest loss and without diverged runs, or None."""
    good = [trial for trial in trials if trial.state.name == "COMPLETE" and not violation(trial)]
    return min(good, key=lambda trial: (trial.values, trial.number), default=None)


def tune_arms(plan: Plan, tuning: Tune, runs: TrialRuns) -> tuple[Tune, set[str]]:
    """Search the values of every group; ``runs`` trains them in the store of the trials' study.

    Returns the search as far as it came, and the ids of the runs of trials without an end.
    """
    storage = open_storage(runs.store.path)
    groups = []
    for group in tuning.groups:

        def propose(seen: Sequence[FrozenTrial], seed: int, group: GroupTuning = group) -> FrozenTrial:
            trial = propose_values(tuning, group.shared, seen, seed)
            trial.user_attrs["runs"] = trial_ids(plan, tuning, group, trial.params)
            return trial

        name = f"{tuning.study}: {group.name} [{group.fingerprint}]"
        groups.append(
            TrialGroup(
                name=group.name,
                study=open_study(storage, name),
                propose=propose,
                num_trials=tuning.trials,
                watched_from=round(tuning.budget * _WATCHED_FROM) if tuning.prune else None,
            )
        )

    def run(asked: Sequence[Asked]) -> list[TrialResult]:
        every = [(one.name, trial.number, trial.params) for one in groups for trial in one.study.get_trials()]
        runs.store.write_plan(trial_plan(plan, tuning, every))
        these = [(one.group.name, one.trial.number, one.trial.params) for one in asked]
        runs.train(asked, trial_plan(plan, tuning, these))
        return [_result(runs, one) for one in asked]

    is_done = search(groups, tuning.at_once, run)
    told = [group.study.get_trials()[: group.num_trials] for group in groups]
    found = [_found(runs.store, *pair, is_done=is_done) for pair in zip(tuning.groups, told, strict=True)]
    open_trials = [trial for trials in told for trial in trials if not trial.state.is_finished()]
    open_runs = {run_id for trial in open_trials for run_id in trial.user_attrs["runs"]}
    return replace(tuning, done=is_done, groups=tuple(found)), open_runs


def _result(runs: TrialRuns, one: Asked) -> TrialResult:
    """Give no values until all runs ended; count a diverged run with the loss at which it is called so."""
    curve, states = runs.curve(one), runs.states(one)
    if not all(state in END_STATES for state in states):
        return TrialResult(curve=curve)
    losses = [end_loss(runs.store.run(run_id)) for run_id in one.run_ids]
    return TrialResult(values=(fmean(losses),), violation=float(states.count("diverged")), curve=curve)


def _found(
    store: StudyStore, group: GroupTuning, trials: Sequence[FrozenTrial], *, is_done: bool
) -> GroupTuning:
    """Add its told trials to a group, and the best values once the search is done."""
    records = []
    for trial in trials:
        if trial.state.is_finished():
            is_complete, ids = trial.state.name == "COMPLETE", trial.user_attrs["runs"]
            record = TrialRecord(
                number=trial.number,
                values=trial.params,
                state="complete" if is_complete else "pruned",
                loss=trial.value if is_complete else None,
                diverged=round(violation(trial)),
                tokens=sum(store.run(run_id).status().tokens for run_id in ids),
                runs=tuple(ids),
            )
            records.append(record)
    best = best_trial(trials)
    chosen = group.shared if best is None else best.params
    return replace(group, trials=tuple(records), chosen=chosen if is_done else None)
