"""The search over a study's recipes: its plan, its runs, what their ends mean, the study that confirms it.

Planning is pure: one plan for each budget, and each recipe's step time on the hardware. The step time is
*modelled* (``speed``) and relative to the baseline's; nothing is measured here. It is the mean over a run of
the last budget, because phases may differ. A recipe with a format that the hardware has no unit for is
dropped with that reason.

A run that diverged, or that misses the target in a search by token cost, is a result too: its values are a
bound, with a violation, because Optuna would take an infinity for a success.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ablate.base.config_base import written_short
from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.modelled.speed import LLAMA_8B, token_time, workload_of
from ablate.plan import Plan, build_plan
from ablate.plan.shares import this_machine
from ablate.run.outcome import find_crossing
from ablate.search.engine import TrialResult, end_loss, losses_of
from ablate.search.halving import (
    DIVERGED,
    SearchPlan,
    candidate_of,
    search_grid,
    short_tokens,
)
from ablate.store import END_STATES
from ablate.store.plan_file import DroppedCell
from ablate.study.template import study_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.plan.plan import PlannedArm
    from ablate.plan.shares import Machines
    from ablate.search.engine import Asked, Losses, TrialRuns
    from ablate.store import StudyStore
    from ablate.store.plan_file import Target
    from ablate.study import Study
    from ablate.study.search_space import Search

LOCK = "search.lock.json"
SEEDS = 5
"""Seeds of the study that confirms a search."""
_LONGEST_NAME = 70
_FORMAT = 2


class StoppedError(Exception):
    """A round is incomplete; its trials stay open."""


def plan_search(study: Study, machines: Machines = this_machine) -> SearchPlan:
    """Plan a search. ``machines``: as for ``build_plan``.

    Raises:
        UserError: data that cannot be used; a baseline without a modelled time; fewer trials than the
            baseline and the named arms.
    """
    search = study.search
    assert search is not None
    plans = []
    for budget in search.budgets:
        training = replace(study.training, tokens=budget)
        arms = tuple(replace(arm, training=training) for arm in study.arms)
        at_budget = replace(study, search=None, training=training, arms=arms)
        plans.append(build_plan(at_budget, machines=machines))
    times = _times(study, search, plans[0])
    reason = f"{search.hardware} has no unit for one of its formats"
    without_time = [arm.name for arm in plans[0].arms if arm.name not in times]
    dropped = (
        *study.dropped,
        *(DroppedCell(name=name, reason=reason) for name in without_time),
    )
    cells: dict[str, list[dict[str, str]]] = {name: [] for name in times}
    for levels, arm in search.cells:
        if arm in cells:
            cells[arm].append(levels)
    named = [name for name in study.source.mapping("arms") if name in times]
    first = tuple(dict.fromkeys([study.baseline, *named]))
    if search.trials < len(first):
        message = f"search.trials: {search.trials} are fewer than the baseline and the named arms ({len(first)})"
        raise UserError(
            study.source.problem(("search", "trials"), message, "these are tried first")
        )
    timed_plans = []
    for plan in plans:
        timed = tuple(arm for arm in plan.arms if arm.name in times)
        timed_plans.append(replace(plan, arms=timed, dropped=dropped))
    return SearchPlan(
        name=study.name,
        search=search,
        cells=cells,
        first=first,
        study=study,
        plans=tuple(timed_plans),
        times=times,
    )


def _times(study: Study, search: Search, plan: Plan) -> dict[str, float]:
    """Model each arm's step time over the baseline's; arms that the hardware has no unit for are left out."""
    baseline = plan.arm(plan.baseline)
    work = LLAMA_8B
    if search.shapes == "study":
        if not baseline.config.model.describes(baseline.config.trainer):
            message = "search.shapes: step times are modelled at a study's own shapes for built-in models alone"
            raise UserError(
                study.source.problem(
                    ("search", "shapes"), message, "set shapes: llama-8b"
                )
            )
        work = workload_of(baseline.config)
    work = replace(work, total_tokens=search.budgets[-1])
    baseline_time = token_time(work, baseline.config.recipe, search.hardware)
    if baseline_time is None:
        message = f"search.hardware: {search.hardware} has no unit for a format of the baseline"
        hint = f"'{plan.baseline}' is {baseline.recipe}"
        raise UserError(study.source.problem(("search", "hardware"), message, hint))
    times = {}
    for arm in plan.arms:
        time = token_time(work, arm.config.recipe, search.hardware)
        if time is not None:
            times[arm.name] = time.total / baseline_time.total
    return times


def search_recipes(
    planned: SearchPlan,
    storage: BaseStorage,
    runs: TrialRuns,
    say: Callable[[str], None],
) -> None:
    """Start or resume a search; ``say`` is told of each round and of runs that failed.

    Raises:
        StoppedError: an interruption, a run without a result, or a baseline that failed.
        UserError: the baseline diverged, or never reached the target.
    """

    def run(asked: Sequence[Asked]) -> list[TrialResult]:
        group = asked[0].group
        numbers = [trial.trial.number for trial in asked]
        budget = group.arms(asked[0].trial)[0].config.training.tokens
        say(
            f"Round {numbers[0] // planned.search.at_once + 1} at {short_tokens(budget)} tokens: trials "
            f"{numbers[0] + 1}–{numbers[-1] + 1} of {group.num_trials}"
        )
        runs.train(asked, tried_plan(planned, planned.read(storage)))
        if runs.outcome.interrupted:
            raise StoppedError("Stopped. Trials that have ended are kept")
        states = [runs.states(trial)[0] for trial in asked]
        if runs.outcome.problem or not {*END_STATES, "failed"}.issuperset(states):
            raise StoppedError(runs.outcome.problem or "A run has no result")
        results = []
        for trial in asked:
            (arm,) = trial.group.arms(trial.trial)
            result = result_of(planned, runs.store, arm)
            results.append(result)
            if result.failed is None:
                continue
            say(f"Failed: {arm.name}: {result.failed}")
            if arm.name == planned.baseline:
                raise StoppedError(
                    "Without the baseline there is nothing to hold recipes against"
                )
        return results

    search_grid(planned, storage, run)


def tried_plan(
    planned: SearchPlan, budgets: Iterable[Iterable[FrozenTrial]] = ()
) -> Plan:
    """Plan the trials of each budget, in their order; without any, the baseline at the first budget.

    If the search has several budgets, arms have theirs in their names.
    """
    names = [(planned.search.budgets[0], planned.baseline)]
    for budget, trials in zip(planned.search.budgets, budgets, strict=False):
        names += [(budget, candidate_of(trial)) for trial in trials]
    arms = []
    for budget, name in names:
        arm = planned.arm(budget, name)
        if len(planned.plans) > 1:
            arm = replace(arm, name=f"{name} @ {short_tokens(budget)}")
        arms.append(arm)
    # the first trial is the baseline's
    return replace(
        planned.plans[0],
        baseline=arms[0].name,
        arms=tuple(arms[1:] or arms),
        folded={},
    )


def check_same(planned: SearchPlan, store: StudyStore) -> None:
    """Refuse to resume a search that began with other settings; only trials and keep may change.

    Raises:
        UserError: another search, or a study, of this name is in the storage.
    """
    settings = asdict(planned.search)
    for key in ("trials", "keep", "cells"):
        del settings[key]
    recipes = {}
    for name in planned.cells:
        recipes[name] = [plan.arm(name).runs[0].id for plan in planned.plans]
    content = {
        "format": _FORMAT,
        **settings,
        "first": planned.first,
        "recipes": recipes,
    }
    path = store.path / LOCK
    try:
        locked = read_record(path)
    except FileNotFoundError:
        if (store.path / "runs").exists():
            raise UserError(
                f"{store.path} holds a study of this name (give the search another)"
            ) from None
        write_record(path, content)
        return
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: {error} (remove it to go on with the search as the file is now)"
        ) from None
    plain = json.loads(json.dumps(content))
    changed = [key for key in plain if locked.get(key) != plain[key]]
    if changed:
        raise UserError(
            f"{store.path} holds a search of this name with other {', '.join(changed)} (give this one "
            "another name; only trials and keep may change)"
        )


def result_of(planned: SearchPlan, store: StudyStore, arm: PlannedArm) -> TrialResult:
    """Return the result of a run that ended or failed: loss or token cost, and step time over the baseline's.

    Raises:
        UserError: the baseline diverged, or misses the target in a search by token cost.
    """
    run = store.run(arm.runs[0].id)
    status = run.status()
    if status.state == "failed":
        return TrialResult(failed=status.message or "failed")
    time = planned.times[arm.name]
    has_diverged = status.state == "diverged"
    if has_diverged and arm.name == planned.baseline:
        raise UserError(
            f"the baseline '{arm.name}' diverged, so that there is nothing to hold recipes against"
        )
    violation = DIVERGED if has_diverged else None
    if planned.search.objective == "loss":
        return TrialResult(values=(end_loss(run), time), violation=violation)
    target = planned.plans[0].target
    assert target is not None  # a search without one is refused
    budget = arm.config.training.tokens
    baseline_run = store.run(planned.arm(budget, planned.baseline).runs[0].id)
    baseline_tokens = _tokens_to(target, losses_of(baseline_run))
    if baseline_tokens is None:
        raise UserError(
            f"the baseline '{planned.baseline}' does not reach the target within {budget:,} tokens, so that "
            "no token cost has a meaning (raise search.budgets or the target, or search for objective: loss)"
        )
    tokens = None
    if not has_diverged:
        losses = losses_of(run)
        tokens = _tokens_to(target, losses)
        if tokens is None:
            violation = max(losses[max(losses)] - target.val_loss, 1e-9)
    cost = (tokens or budget) / baseline_tokens - 1
    return TrialResult(values=(cost, time), violation=violation)


def _tokens_to(target: Target, losses: Losses) -> float | None:
    crossing = find_crossing(
        list(losses), list(losses.values()), target.val_loss, target.crossing
    )
    return None if crossing is None else crossing[1]


def confirm_study(planned: SearchPlan, names: Sequence[str], source: str) -> str:
    """Return the text of a study file: the baseline and these arms at the last budget, with new seeds.

    The winner of a search looks better than it is: the best of many single runs is partly luck. ``source``:
    the file of the search, named in the text.
    """
    baseline = planned.plans[-1].arm(planned.baseline)
    target = planned.plans[0].target
    assert target is not None
    first_seed = planned.search.seed + 1
    head = {
        "name": f"{planned.name[:_LONGEST_NAME]}-confirm",
        "description": f"The front of the search '{planned.name}', run again with seeds that it has not "
        "seen: the best of many single runs is partly the luckiest.",
        "baseline": planned.baseline,
        "target": {target.kind: target.value, "crossing": target.crossing},
        "seeds": list(range(first_seed, first_seed + SEEDS)),
    }
    sections = {
        name: getattr(baseline.config, name)
        for name in ("model", "data", "training", "backend", "trainer")
    }
    specs = {arm.name: arm.recipe_spec for arm in planned.study.arms}
    arms = {
        name: {"recipe": written_short(specs[name]) or "bf16"}
        for name in (planned.baseline, *names)
    }
    comment = f"Written by `ablate search {source}`; `ablate run` of this file confirms what it found."
    return study_text(comment, head, sections | {"resources": baseline.resources}, arms)
