"""The search over a study's recipes: its candidates, its runs, and what a run's result means to it.

A run that diverged, or that misses the target where the token cost is searched for, is a result too: its
values are a bound, with a violation beside them, because Optuna would take an infinity for a success.

How it fails: ``UserError`` where the baseline itself diverges or misses the target, for nothing can then be
held against it; a search that was begun with other recipes or budgets is refused by ``check_same``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.base.files import read_json, write_json_atomic
from ablate.search.candidates import Candidate, Space
from ablate.search.ledger import LOSS
from ablate.search.search import COST, DIVERGED, STEP_TIME, Plan, Result, candidate_of, short_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.plan import Plan as StudyPlan
    from ablate.plan import PlannedArm
    from ablate.search.ledger import Trial
    from ablate.search.plan import SearchPlan
    from ablate.store import RunDir, StudyStore

LOCK = "search.lock.json"
_FORMAT = 1


def candidates_of(found: SearchPlan) -> Plan:
    """Return what is searched, as the engine takes it."""
    search = found.search
    cells: dict[str, list[dict[str, str]]] = {name: [] for name in found.times}
    for cell in search.cells:
        if cell.arm in cells:
            cells[cell.arm].append(cell.levels)
    space = Space(
        factors=search.factors,
        candidates=tuple(Candidate(name=name, cells=tuple(own)) for name, own in cells.items()),
    )
    return Plan(
        name=found.name,
        space=space,
        first=found.first,
        trials=search.trials,
        budgets=search.budgets,
        keep=search.keep,
        at_once=search.at_once,
        sampler=search.sampler,
        seed=search.seed,
        objectives=(LOSS if search.objective == "loss" else COST, STEP_TIME),
    )


def arm_name(found: SearchPlan, budget: int, name: str) -> str:
    """Return the name of an arm's run at a budget; with several budgets they must be told apart."""
    return name if len(found.search.budgets) == 1 else f"{name} @ {short_tokens(budget)}"


def tried_plan(found: SearchPlan, tried: Sequence[tuple[int, str]]) -> StudyPlan:
    """Return the plan of what was tried, (budget, arm) by (budget, arm): it grows as the search goes on."""
    arms = []
    for budget, name in tried:
        shown = arm_name(found, budget, name)
        arm = found.arm(budget, name)
        arms.append(replace(arm, name=shown, runs=tuple(replace(run, arm=shown) for run in arm.runs)))
    baseline = arm_name(found, found.search.budgets[0], found.baseline)
    return replace(found.plans[0], baseline=baseline, arms=tuple(arms), folded=())


def tried_in(found: SearchPlan, budgets: Sequence[Sequence[Trial]]) -> list[tuple[int, str]]:
    """Return what the ledger says was tried; the baseline at least."""
    pairs = [
        (budget, candidate_of(trial))
        for budget, trials in zip(found.search.budgets, budgets, strict=True)
        for trial in trials
    ]
    return list(dict.fromkeys([(found.search.budgets[0], found.baseline), *pairs]))


def check_same(found: SearchPlan, store: StudyStore) -> None:
    """Refuse to go on with a search that was begun as another one; only its trials may become more.

    Raises:
        UserError: another search, or a study, of this name is in the storage.
    """
    search = found.search
    content = {
        "format": _FORMAT,
        "objective": search.objective,
        "hardware": [search.hardware, search.shapes],
        "budgets": list(search.budgets),
        "at_once": search.at_once,
        "sampler": search.sampler,
        "seed": search.seed,
        "baseline": [found.baseline, *found.first],
        "factors": {factor: list(labels) for factor, labels in search.factors.items()},
        "recipes": {
            arm.name: [other.runs[0].id for other in (plan.arm(arm.name) for plan in found.plans)]
            for arm in found.plans[0].arms
        },
    }
    path = store.path / LOCK
    try:
        there = read_json(path)
    except (OSError, ValueError):
        if (store.path / "runs").exists():
            raise UserError(f"{store.path} holds a study of this name (give the search another)") from None
        write_json_atomic(path, content)
        return
    if there != content:
        keys = [key for key in content if not isinstance(there, dict) or there.get(key) != content[key]]
        raise UserError(
            f"{store.path} holds a search of this name with other {', '.join(keys)} (give this one another "
            "name; only trials and keep may change)"
        )


def result_of(found: SearchPlan, store: StudyStore, budget: int, name: str) -> Result:
    """Return what a run that has ended, or failed, came to.

    Raises:
        UserError: the baseline diverged, or misses the target where a token cost is searched for.
    """
    arm = found.arm(budget, name)
    run = store.run(arm.runs[0].id)
    status = run.status()
    if status.state == "failed":
        return Result(failed=status.message or "failed")
    if status.state == "diverged" and name == found.baseline:
        raise UserError(f"the baseline '{name}' diverged, so that there is nothing to hold recipes against")
    time = found.times[name]
    if found.search.objective == "loss":
        if status.state == "diverged":
            return Result(values=(divergence_bound(arm), time), violation=DIVERGED)
        return Result(values=(_final_loss(run), time))
    return _token_cost(found, store, budget, arm, time)


def divergence_bound(arm: PlannedArm) -> float:
    """Return the loss above which a run counts as diverged, in nats per token."""
    return arm.config.training.divergence_loss or 1.5 * math.log(arm.config.vocab_size)


def _final_loss(run: RunDir) -> float:
    return float(_evaluations(run)[-1]["val_loss"])


def _evaluations(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["kind"] == "eval"]


def _token_cost(found: SearchPlan, store: StudyStore, budget: int, arm: PlannedArm, time: float) -> Result:
    """Return tokens to target over the baseline's, minus one; of a run that misses it, that of its budget."""
    baseline = store.run(found.arm(budget, found.baseline).runs[0].id)
    against = _tokens_to_target(found, baseline)
    if against is None:
        raise UserError(
            f"the baseline '{found.baseline}' does not reach the target within {budget:,} tokens, so that no "
            "token cost has a meaning (raise search.budgets or the target, or search for objective: loss)"
        )
    run = store.run(arm.runs[0].id)
    own = None if run.status().state == "diverged" else _tokens_to_target(found, run)
    if own is not None:
        return Result(values=(own / against - 1, time))
    missed = DIVERGED if run.status().state == "diverged" else max(_final_loss(run) - _target(found), 1e-9)
    return Result(values=(budget / against - 1, time), violation=missed)


def _target(found: SearchPlan) -> float:
    from ablate.run.outcome import target_loss

    target = found.plans[0].target
    return target_loss(target.kind, target.value)


def _tokens_to_target(found: SearchPlan, run: RunDir) -> float | None:
    from ablate.run.outcome import find_crossing

    rows = _evaluations(run)
    crossing = find_crossing(
        [row["tokens"] for row in rows],
        [row["val_loss"] for row in rows],
        _target(found),
        found.plans[0].target.crossing,
    )
    return None if crossing is None else crossing.tokens
