"""A search over a grid of recipes at rising budgets, and what its trials show: fronts, factors that mattered.

The better share of one budget's trials is run at the next. All objectives are minimised. A trial with a
violation is never on a front: its values stand for a miss.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.search.engine import TrialGroup, search
from ablate.search.ledger import LOSS, Ledger, violation
from ablate.search.spaces import IRRELEVANT, candidate_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.search.engine import Run
    from ablate.search.ledger import Proposal
    from ablate.search.spaces import Grid

FEWEST_TRIALS = 8
"""Fewer give no importances."""
COST = "token cost (share of the baseline's tokens)"
STEP_TIME = "modelled step time (over the baseline's)"
DIVERGED = 1e6
"""The violation of a diverged run: worse than any miss of a target, which is in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """What is searched. ``budgets`` in tokens, rising. ``objectives``: how Optuna's pages name them."""

    name: str
    grid: Grid
    trials: int
    budgets: tuple[int, ...]
    keep: float
    at_once: int
    objectives: tuple[str, ...] = (LOSS, STEP_TIME)

    @property
    def num_trials(self) -> int:
        """How many candidates are tried at the first budget."""
        return min(self.trials, len(self.grid.candidates))

    @property
    def most_trials(self) -> tuple[int, ...]:
        """The largest number of trials of each budget, if no front is larger than its share."""
        counts = [self.num_trials]
        for _ in self.budgets[1:]:
            counts.append(min(math.ceil(self.keep * counts[-1]) + 1, counts[-1]))  # and the baseline
        return tuple(counts)

    def ledgers(self, storage: BaseStorage) -> list[Ledger]:
        """Return the ledger of each budget."""
        return [
            Ledger(storage, f"{self.name} @ {short_tokens(budget)} tokens", self.objectives)
            for budget in self.budgets
        ]

    def read(self, storage: BaseStorage) -> tuple[tuple[FrozenTrial, ...], ...]:
        """Return the trials of each budget as they stand."""
        return tuple(tuple(ledger.trials()) for ledger in self.ledgers(storage))

    def is_done(self, budgets: Sequence[Sequence[FrozenTrial]]) -> bool:
        """Whether nothing is left to run; a search that was given more trials is not done."""
        told = all(trial.state.is_finished() for trials in budgets for trial in trials)
        return told and len(budgets[0]) >= self.num_trials and all(budgets)


def short_tokens(tokens: int) -> str:
    """Return a token count that is exact, with k, M or B where that is shorter: 300_000 → 300k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def search_grid(
    plan: Halving,
    storage: BaseStorage,
    run: Run,
    describe: Callable[[int, str], dict[str, Any]] = lambda _budget, _candidate: {},
) -> bool:
    """Start or resume a search; return whether it is done.

    ``describe(budget, candidate)``: further attributes of a trial for the ledger, such as its runs.
    """
    chosen: list[str] = []
    for budget, ledger in zip(plan.budgets, plan.ledgers(storage), strict=True):
        grid, total = plan.grid, plan.num_trials
        is_first = budget == plan.budgets[0]
        if not is_first:
            # If more trials or a larger share were asked for later, new trials follow the old ones.
            chosen = list(dict.fromkeys([*map(candidate_of, ledger.trials()), *chosen]))
            grid, total = replace(grid, first=tuple(chosen)), len(chosen)

        def more(found: Proposal, budget: int = budget, *, is_first: bool = is_first) -> dict[str, Any]:
            name = found.attrs["candidate"]
            started = {"started_from": True} if is_first and name in plan.grid.first else {}
            return {**describe(budget, name), "tokens": budget, **started}

        group = TrialGroup(name=ledger.name, ledger=ledger, space=grid, num_trials=total, describe=more)
        if not search([group], plan.at_once, run):
            return False
        better = promoted(ledger.trials(), plan.keep)
        chosen = [plan.grid.first[0], *map(candidate_of, better)]  # the baseline goes on in any case
    return True


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is worse in no objective, and better in at least one."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial is complete, with values that do not stand for a miss."""
    return trial.state.name == "COMPLETE" and not violation(trial) > 0


def layers(trials: Sequence[FrozenTrial]) -> list[list[FrozenTrial]]:
    """Return the feasible trials in layers: those that none dominates, then those that only these do, etc."""
    left, found = [trial for trial in trials if is_feasible(trial)], []
    while left:
        values = [trial.values or () for trial in left]
        is_best = [not any(dominates(other, own) for other in values) for own in values]
        found.append([trial for trial, best in zip(left, is_best, strict=True) if best])
        left = [trial for trial, best in zip(left, is_best, strict=True) if not best]
    return found


def crowding(points: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return each point's distance to its neighbours, each objective over its range; infinite at the ends."""
    distance = dict.fromkeys(points, 0.0)
    for axis in range(len(next(iter(points.values()), ()))):
        order = sorted(points, key=lambda key, axis=axis: (points[key][axis], key))  # type: ignore[misc]
        low, high = points[order[0]][axis], points[order[-1]][axis]
        distance[order[0]] = distance[order[-1]] = math.inf
        for before, key, after in zip(order, order[1:], order[2:], strict=False):
            distance[key] += (points[after][axis] - points[before][axis]) / (high - low or 1.0)
    return distance


def front(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that none dominates, in the order of their last objective."""
    best = next(iter(layers(trials)), [])
    return sorted(best, key=lambda trial: (*reversed(trial.values or ()), trial.number))


def promoted(trials: Sequence[FrozenTrial], keep: float) -> list[FrozenTrial]:
    """Return the trials that go on to a larger budget: a share of them, but always the whole first front.

    By layer, within a layer by crowding distance, ties by number; then those that missed, the nearest first.
    A run that diverged is never promoted.
    """
    order: list[FrozenTrial] = []
    found = layers(trials)
    for layer in found:
        distance = crowding({trial.number: trial.values or () for trial in layer})
        order += sorted(layer, key=lambda trial: (-distance[trial.number], trial.number))
    missed = [trial for trial in trials if trial.state.name == "COMPLETE" and not is_feasible(trial)]
    nearest = sorted(missed, key=lambda trial: (violation(trial), trial.number))
    order += [trial for trial in nearest if violation(trial) < DIVERGED]
    return order[: max(math.ceil(keep * len(trials)), len(found[0]) if found else 0)]


def importances(grid: Grid, trials: Sequence[FrozenTrial], objective: int) -> dict[str, float] | None:
    """Return each factor's share of the variance of an objective, by fANOVA (Hutter et al. 2014).

    Optuna fits a random forest to the trials with a level and a result, and splits its variance. A factor
    without effect on a recipe gets a separate level. The shares are a guide and not a test: trials are few,
    and the search favours levels that did well. Without enough trials, or with one value alone, it is None.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances
    from optuna.trial import create_trial

    known = [(trial.params, trial.values[objective]) for trial in with_levels(trials) if trial.values]
    if len(known) < FEWEST_TRIALS or len({value for _, value in known}) < 2 or len(grid.factors) < 2:
        return None
    distributions: dict[str, BaseDistribution] = {
        factor: CategoricalDistribution([*labels, IRRELEVANT]) for factor, labels in grid.factors.items()
    }
    study = optuna.create_study()
    for params, value in known:
        filled = {factor: params.get(factor, IRRELEVANT) for factor in grid.factors}
        study.add_trial(create_trial(params=filled, distributions=distributions, value=value))
    with warnings.catch_warnings(action="ignore"):  # a factor of which one level alone was tried
        found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    return {factor: float(found.get(factor, 0.0)) for factor in grid.factors}


def with_levels(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that tell factors apart: feasible ones of the grid's cells."""
    return [trial for trial in trials if is_feasible(trial) and trial.params]
