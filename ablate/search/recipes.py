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
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ablate.base.config_base import written_short
from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.modelled.speed import LLAMA_8B, token_time, workload_of
from ablate.plan import Plan, build_plan
from ablate.plan.shares import this_machine
from ablate.run.outcome import find_crossing
from ablate.search.engine import TrialResult, end_loss, losses_of
from ablate.search.halving import DIVERGED, SearchPlan, candidate_of, search_grid, short_tokens
from ablate.store import END_STATES
from ablate.store.plan_file import DroppedCell
from ablate.study.template import study_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.plan.shares import Machines
    from ablate.search.engine import Asked, Curve, TrialRuns
    from ablate.store import StudyStore
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
        planned = replace(study, search=None, training=training, arms=arms)
        plans.append(build_plan(planned, machines=machines))
    times, dropped = _times(study, search, plans[0])
    cells: dict[str, list[dict[str, str]]] = {name: [] for name in times}
    for levels, arm in search.cells:
        if arm in cells:
            cells[arm].append(levels)
    named = (name for name, _ in study.source.items("arms") if name in times)
    first = tuple(dict.fromkeys([study.baseline, *named]))
    if search.trials < len(first):
        what = f"search.trials: {search.trials} are fewer than the baseline and the named arms ({len(first)})"
        raise UserError(study.problem(("search", "trials"), what, "these are tried first"))
    kept = (
        replace(
            plan, arms=tuple(arm for arm in plan.arms if arm.name in times), dropped=(*plan.dropped, *dropped)
        )
        for plan in plans
    )
    return SearchPlan(
        name=study.name, search=search, cells=cells, first=first, study=study, plans=tuple(kept), times=times
    )


def _times(study: Study, search: Search, plan: Plan) -> tuple[dict[str, float], list[DroppedCell]]:
    baseline, work = plan.arm(plan.baseline).config, LLAMA_8B
    if search.shapes == "study":
        if not baseline.model.describes(baseline.trainer):
            what = "search.shapes: step times are modelled at a study's own shapes for built-in models alone"
            raise UserError(study.problem(("search", "shapes"), what, "set shapes: llama-8b"))
        work = workload_of(baseline)
    work = replace(work, total_tokens=search.budgets[-1])
    found = {arm.name: token_time(work, arm.config.recipe, search.hardware) for arm in plan.arms}
    against = found[plan.baseline]
    if against is None:
        what = f"search.hardware: {search.hardware} has no unit for a format of the baseline"
        hint = f"'{plan.baseline}' is {plan.arm(plan.baseline).recipe}"
        raise UserError(study.problem(("search", "hardware"), what, hint))
    reason = f"{search.hardware} has no unit for one of its formats"
    dropped = [DroppedCell(name=name, reason=reason) for name, time in found.items() if time is None]
    return {name: time.total / against.total for name, time in found.items() if time is not None}, dropped


def search_recipes(
    found: SearchPlan, storage: BaseStorage, runs: TrialRuns, say: Callable[[str], None]
) -> None:
    """Start or resume a search; ``say`` is told of each round and of runs that failed.

    Raises:
        StoppedError: an interruption, a run without a result, or a baseline that failed.
        UserError: the baseline diverged, or never reached the target.
    """

    def run(asked: Sequence[Asked]) -> list[TrialResult]:
        runs.store.write_plan(tried_plan(found, chain.from_iterable(found.read(storage))))
        first, last = asked[0].trial, asked[-1].trial
        budget = first.user_attrs["tokens"]
        say(
            f"Round {first.user_attrs['round'] + 1} at {short_tokens(budget)} tokens: trials "
            f"{first.number + 1}–{last.number + 1} of {asked[0].group.num_trials}"
        )
        runs.train(asked, tried_plan(found, (one.trial for one in asked)))
        if runs.outcome.interrupted:
            raise StoppedError("Stopped. Trials that have ended are kept")
        states = [runs.states(one)[0] for one in asked]
        if runs.outcome.problem or not {*END_STATES, "failed"}.issuperset(states):
            raise StoppedError(runs.outcome.problem or "A run has no result")
        names = [candidate_of(one.trial) for one in asked]
        results = [result_of(found, runs.store, budget, name) for name in names]
        for name, result in zip(names, results, strict=True):
            if result.failed is not None:
                say(f"Failed: {name}: {result.failed}")
                if name == found.baseline:
                    raise StoppedError("Without the baseline there is nothing to hold recipes against")
        return results

    search_grid(found, storage, run)


def tried_plan(found: SearchPlan, trials: Iterable[FrozenTrial]) -> Plan:
    """Plan some trials, in their order; without any, the baseline at the first budget.

    If the search has several budgets, arms have theirs in their names.
    """
    budgets = found.search.budgets

    def name_at(budget: int, name: str) -> str:
        return name if len(budgets) == 1 else f"{name} @ {short_tokens(budget)}"

    first = (budgets[0], found.baseline)
    tried = [(trial.user_attrs["tokens"], candidate_of(trial)) for trial in trials] or [first]
    arms = tuple(replace(found.arm(*one), name=name_at(*one)) for one in tried)
    return replace(found.plans[0], baseline=name_at(*first), arms=arms, folded={})


def check_same(found: SearchPlan, store: StudyStore) -> None:
    """Refuse to resume a search that began with other settings; only trials and keep may change.

    Raises:
        UserError: another search, or a study, of this name is in the storage.
    """
    keys = ("objective", "hardware", "shapes", "budgets", "at_once", "sampler", "seed", "factors")
    settings = {key: getattr(found.search, key) for key in keys}
    recipes = {
        arm.name: [plan.arm(arm.name).runs[0].id for plan in found.plans] for arm in found.plans[0].arms
    }
    content = {"format": _FORMAT, **settings, "first": found.first, "recipes": recipes}
    path = store.path / LOCK
    try:
        there = read_record(path)
    except FileNotFoundError:
        if (store.path / "runs").exists():
            raise UserError(f"{store.path} holds a study of this name (give the search another)") from None
        write_record(path, content)
        return
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error} (remove it to go on with the search as the file is now)") from None
    plain = json.loads(json.dumps(content))
    if others := [key for key in plain if there.get(key) != plain[key]]:
        raise UserError(
            f"{store.path} holds a search of this name with other {', '.join(others)} (give this one another "
            "name; only trials and keep may change)"
        )


def result_of(found: SearchPlan, store: StudyStore, budget: int, name: str) -> TrialResult:
    """Return the result of a run that ended or failed: loss or token cost, and step time over the baseline's.

    Raises:
        UserError: the baseline diverged, or misses the target in a search by token cost.
    """
    run = store.run(found.arm(budget, name).runs[0].id)
    status = run.status()
    if status.state == "failed":
        return TrialResult(failed=status.message or "failed")
    time, curve = found.times[name], losses_of(run)
    missed = DIVERGED if status.state == "diverged" else None
    if missed and name == found.baseline:
        raise UserError(f"the baseline '{name}' diverged, so that there is nothing to hold recipes against")
    if found.search.objective == "loss":
        return TrialResult(values=(end_loss(run), time), violation=missed)
    target = found.plans[0].target
    assert target is not None  # a search without one is refused

    def tokens_to_target(curve: Curve) -> float | None:
        crossing = find_crossing(list(curve), list(curve.values()), target.val_loss, target.crossing)
        return None if crossing is None else crossing[1]

    against = tokens_to_target(losses_of(store.run(found.arm(budget, found.baseline).runs[0].id)))
    if against is None:
        raise UserError(
            f"the baseline '{found.baseline}' does not reach the target within {budget:,} tokens, so that no "
            "token cost has a meaning (raise search.budgets or the target, or search for objective: loss)"
        )
    own = None if missed else tokens_to_target(curve)
    if own is None:
        missed = missed or max(curve[max(curve)] - target.val_loss, 1e-9)
    return TrialResult(values=((own or budget) / against - 1, time), violation=missed)


def confirm_study(found: SearchPlan, names: Sequence[str], source: str) -> str:
    """Return the text of a study file: the baseline and these arms at the last budget, with new seeds.

    The winner of a search looks better than it is: the best of many single runs is partly luck. ``source``:
    the file of the search, named in the text.
    """
    arms = {arm.name: arm for arm in found.study.arms}
    baseline = found.plans[-1].arm(found.baseline)
    config, target, first = baseline.config, found.plans[0].target, found.search.seed + 1
    assert target is not None
    parts = {name: getattr(config, name) for name in ("model", "data", "training", "backend", "trainer")}
    parts |= {"resources": baseline.resources}
    head = {
        "name": f"{found.name[:_LONGEST_NAME]}-confirm",
        "description": f"The front of the search '{found.name}', run again with seeds that it has not seen: "
        "the best of many single runs is partly the luckiest.",
        "baseline": found.baseline,
        "target": {target.kind: target.value, "crossing": target.crossing},
        "seeds": list(range(first, first + SEEDS)),
    }
    said = f"Written by `ablate search {source}`; `ablate run` of this file confirms what it found."
    recipes = {name: written_short(arms[name].recipe_spec) for name in (found.baseline, *names)}
    return study_text(said, head, parts, {name: {"recipe": one or "bf16"} for name, one in recipes.items()})
