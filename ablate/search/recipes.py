"""The search over a study's recipes.

Its runs, its reading of their results, which search may be resumed, and the study that confirms one.

A run that diverged, or that misses the target in a search by token cost, is a result too: its values are a
bound, with a violation, because Optuna would take an infinity for a success.
"""

from __future__ import annotations

import io
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.run.outcome import find_crossing
from ablate.run.schedule import divergence_bound
from ablate.search.engine import TrialResult, losses_of
from ablate.search.halving import DIVERGED, search_grid, short_tokens
from ablate.search.spaces import candidate_of
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.plan import Plan
    from ablate.recipes import RecipeSpec
    from ablate.search.engine import Asked, TrialRuns
    from ablate.search.ledger import Curve
    from ablate.search.plan import SearchPlan
    from ablate.store import StudyStore

LOCK = "search.lock.json"
SEEDS = 5
"""Seeds of the study that confirms a search."""
_LONGEST_NAME = 70
_FORMAT = 1


class StoppedError(Exception):
    """A round is incomplete; its trials stay open."""


def search_recipes(
    found: SearchPlan, storage: BaseStorage, runs: TrialRuns, say: Callable[[str], None]
) -> None:
    """Start or resume a search; ``say`` is told of each round and of runs that failed.

    Raises:
        StoppedError: interrupted, a run that came to no end, or a baseline that failed.
        UserError: the baseline diverged, or never reached the target.
    """

    def describe(budget: int, name: str) -> dict[str, Any]:
        arm = found.arm(budget, name)
        return {"runs": [run.id for run in arm.runs], "recipe": arm.recipe}

    def run(asked: Sequence[Asked]) -> list[TrialResult | None]:
        runs.write(tried_plan(found, found.halving.read(storage)))
        budget, first = asked[0].trial.user_attrs["tokens"], asked[0].trial
        numbers = dict.fromkeys((first.number + 1, asked[-1].trial.number + 1))
        say(
            f"Round {first.user_attrs['round'] + 1} at {short_tokens(budget)} tokens: trials "
            f"{'–'.join(map(str, numbers))} of {asked[0].group.num_trials}"
        )
        names = [candidate_of(one.trial) for one in asked]
        runs.train(asked, plan_of(found, [(budget, name) for name in names]))
        if runs.outcome.interrupted:
            raise StoppedError("Stopped. Trials that have ended are kept")
        states = {name: runs.states(one)[0] for name, one in zip(names, asked, strict=True)}
        if runs.outcome.problem or not {*END_STATES, "failed"}.issuperset(states.values()):
            raise StoppedError(runs.outcome.problem or "A run has no result")
        results = [result_of(found, runs.store, budget, name) for name in names]
        for name, result in zip(names, results, strict=True):
            if result.failed is not None:
                say(f"Failed: {name}: {result.failed}")
        if states.get(found.baseline) == "failed":
            raise StoppedError("Without the baseline there is nothing to hold recipes against")
        return list(results)

    search_grid(found.halving, storage, run, describe)


def arm_name(found: SearchPlan, budget: int, name: str) -> str:
    """Return the name of an arm's run at a budget; with several budgets they must be told apart."""
    return name if len(found.search.budgets) == 1 else f"{name} @ {short_tokens(budget)}"


def tried_plan(found: SearchPlan, budgets: Sequence[Sequence[FrozenTrial]]) -> Plan:
    """Return the plan of these trials of each budget; it holds the baseline at least."""
    first = found.search.budgets[0]
    tried = {(first, found.baseline): None} | {
        (budget, candidate_of(trial)): None
        for budget, trials in zip(found.search.budgets, budgets, strict=False)
        for trial in trials
    }
    return plan_of(found, list(tried))


def plan_of(found: SearchPlan, tried: Sequence[tuple[int, str]]) -> Plan:
    """Return the plan of recipes at budgets, in this order."""
    arms = [replace(found.arm(budget, name), name=arm_name(found, budget, name)) for budget, name in tried]
    baseline = arm_name(found, found.search.budgets[0], found.baseline)
    return replace(found.plans[0], baseline=baseline, arms=tuple(arms), folded=())


def check_same(found: SearchPlan, store: StudyStore) -> None:
    """Refuse to resume a search that began with other settings; only the number of trials may grow.

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
        there = read_record(path)
    except ValueError as error:
        raise UserError(f"{path}: {error} (remove it to go on with the search as the file is now)") from None
    except OSError:
        if (store.path / "runs").exists():
            raise UserError(f"{store.path} holds a study of this name (give the search another)") from None
        write_record(path, content)
        return
    if there != content:
        keys = [key for key in content if there.get(key) != content[key]]
        raise UserError(
            f"{store.path} holds a search of this name with other {', '.join(keys)} (give this one another "
            "name; only trials and keep may change)"
        )


def result_of(found: SearchPlan, store: StudyStore, budget: int, name: str) -> TrialResult:
    """Return the result of a run that has ended or failed.

    Raises:
        UserError: the baseline diverged, or misses the target where a token cost is searched for.
    """
    arm = found.arm(budget, name)
    run = store.run(arm.runs[0].id)
    status = run.status()
    if status.state == "failed":
        return TrialResult(failed=status.message or "failed")
    if status.state == "diverged" and name == found.baseline:
        raise UserError(f"the baseline '{name}' diverged, so that there is nothing to hold recipes against")
    time, is_diverged, curve = found.times[name], status.state == "diverged", losses_of(run)
    if found.search.objective == "loss":
        if is_diverged:
            bound = divergence_bound(arm.config.training.divergence_loss, arm.config.vocab_size)
            return TrialResult(values=(bound, time), violation=DIVERGED)
        return TrialResult(values=(curve[max(curve)], time))
    target = found.target

    def tokens_to_target(curve: Curve) -> float | None:
        crossing = find_crossing(list(curve), list(curve.values()), target.val_loss, target.crossing)
        return None if crossing is None else crossing.tokens

    against = tokens_to_target(losses_of(store.run(found.arm(budget, found.baseline).runs[0].id)))
    if against is None:
        raise UserError(
            f"the baseline '{found.baseline}' does not reach the target within {budget:,} tokens, so that no "
            "token cost has a meaning (raise search.budgets or the target, or search for objective: loss)"
        )
    own = None if is_diverged else tokens_to_target(curve)
    if own is not None:
        return TrialResult(values=(own / against - 1, time))
    missed = DIVERGED if is_diverged else max(curve[max(curve)] - target.val_loss, 1e-9)
    return TrialResult(values=(budget / against - 1, time), violation=missed)


def confirm_study(found: SearchPlan, names: Sequence[str], source: str) -> str:
    """Return a study file that runs the baseline and these arms at the last budget, with fresh seeds.

    The winner of a search looks better than it is: the best of many single runs is partly luck. ``source``:
    the file of the search, named in the study file.
    """
    from ruamel.yaml import YAML

    arms = {arm.name: arm for arm in found.study.arms}
    baseline = found.plans[-1].arm(found.baseline)
    first = found.search.seed + 1
    config = baseline.config
    sections = {
        "model": config.model,
        "data": config.data,
        "training": config.training,
        "resources": baseline.resources,
    }
    base = {name: content for name, section in sections.items() if (content := _written(section))}
    if config.backend != "auto":
        base["backend"] = config.backend
    if config.trainer is not None:
        base["trainer"] = config.trainer
    target = found.target
    content = {
        "name": f"{found.name[:_LONGEST_NAME]}-confirm",
        "description": f"The front of the search '{found.name}', run again with seeds that it has not seen: "
        "the best of many single runs is partly the luckiest.",
        "baseline": found.baseline,
        "target": {target.kind: target.value}
        | ({} if target.crossing == "confirmed" else {"crossing": target.crossing}),
        "seeds": list(range(first, first + SEEDS)),
        "base": base,
        "arms": {
            name: {"recipe": _recipe(arms[name].recipe_spec)}
            for name in dict.fromkeys([found.baseline, *names])
        },
    }
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(content, text)
    written_by = f"# Written by `ablate search {source}`; `ablate run` of this file confirms what it found."
    return f"{written_by}\n{text.getvalue()}"


def _recipe(spec: RecipeSpec) -> Any:
    """Return a recipe in a study file's notation, as one word if that is enough."""
    content = _written(spec)
    if not content:
        return "bf16"
    return content["preset"] if set(content) == {"preset"} else content


def _written(section: Any) -> Any:
    """Return a section in a study file's notation, without default values."""
    if isinstance(section, list):
        return [_written(item) for item in section]
    if not is_dataclass(section) or isinstance(section, type):
        return section
    required = {"recipe": section.recipe} if hasattr(section, "recipe") else {}
    usual = type(section)(**required)
    content = {field.name: getattr(section, field.name) for field in fields(section)}
    return {
        name: _written(value)
        for name, value in content.items()
        if name in required or value != getattr(usual, name)
    }
