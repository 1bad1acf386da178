"""A search over a grid of recipes at rising budgets, and what its trials show: fronts, factors that mattered.

The better share of one budget's trials is run at the next. All objectives are minimised. A trial with a
violation missed, and is never on a front.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.search.engine import LOSS, TrialGroup, open_study, quiet_optuna, search, study_of, violation
from ablate.search.spaces import IRRELEVANT, candidate_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.search.engine import Run
    from ablate.search.spaces import Grid

FEWEST_TRIALS = 8
"""Fewer give no importances."""
_BEST = 0.25
"""The share of best trials that importances compare with all trials."""
COST = "token cost (share of the baseline's tokens)"
STEP_TIME = "modelled step time (over the baseline's)"
DIVERGED = 1e6
"""The violation of a diverged run: worse than any miss of a target, which is in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """What is searched. ``budgets``: in tokens, rising. ``objectives``: as Optuna's pages show them."""

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
        return min(self.trials, len(self.grid.cells))

    @property
    def most_trials(self) -> tuple[int, ...]:
        """The largest number of trials of each budget, if no front is larger than its share."""
        counts = [self.num_trials]
        for _ in self.budgets[1:]:
            counts.append(min(math.ceil(self.keep * counts[-1]) + 1, counts[-1]))  # and the baseline
        return tuple(counts)

    def studies(self, storage: BaseStorage) -> list[Study]:
        """Open or create Optuna's study of each budget."""
        names = (f"{self.name} @ {short_tokens(budget)} tokens" for budget in self.budgets)
        return [open_study(storage, name, self.objectives) for name in names]

    def read(self, storage: BaseStorage) -> list[list[FrozenTrial]]:
        """Read the present trials of each budget."""
        return [study.get_trials() for study in self.studies(storage)]

    def is_done(self, budgets: Sequence[Sequence[FrozenTrial]]) -> bool:
        """Whether nothing is left to run; a search that was given more trials is not done."""
        told = all(trial.state.is_finished() for trials in budgets for trial in trials)
        return told and len(budgets[0]) >= self.num_trials and all(budgets)


def short_tokens(tokens: int) -> str:
    """Return a token count as exact text, with k, M or B where no digit is lost: 300_000 → 300k."""
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

    ``describe(budget, candidate)``: further attributes of a trial, such as its runs.
    """
    grid, total = plan.grid, plan.num_trials
    better: list[str] = []
    for budget, study in zip(plan.budgets, plan.studies(storage), strict=True):
        if budget != plan.budgets[0]:
            # If more trials or a larger share were asked for later, new trials follow the old ones.
            chosen = dict.fromkeys([*map(candidate_of, study.get_trials()), *better])
            grid, total = replace(grid, first=tuple(chosen)), len(chosen)

        def more(trial: FrozenTrial, budget: int = budget) -> dict[str, Any]:
            return {**describe(budget, candidate_of(trial)), "tokens": budget}

        group = TrialGroup(
            name=study.study_name, study=study, propose=grid.propose, num_trials=total, describe=more
        )
        if not search([group], plan.at_once, run):
            return False
        # The baseline is run at every budget.
        better = [plan.grid.first[0], *map(candidate_of, promoted(study.get_trials(), plan.keep))]
    return True


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial is complete and did not miss."""
    return trial.state.name == "COMPLETE" and not violation(trial) > 0


def fronts(trials: Sequence[FrozenTrial]) -> Iterator[list[FrozenTrial]]:
    """Yield the fronts of the feasible trials, best first: a front is what nothing left dominates."""
    left = [trial for trial in trials if is_feasible(trial)]
    while left:
        best = {trial.number for trial in study_of(left).best_trials}  # a study in memory numbers them anew
        yield [trial for place, trial in enumerate(left) if place in best]
        left = [trial for place, trial in enumerate(left) if place not in best]


def front(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the feasible trials that no other dominates, sorted by their last objective."""
    return sorted(next(fronts(trials), []), key=lambda trial: (*reversed(trial.values), trial.number))


def promoted(trials: Sequence[FrozenTrial], keep: float) -> list[FrozenTrial]:
    """Choose the trials to run at the next budget: the share ``keep``, but always the whole first front.

    Sorted by front, then by the first objective; then those that missed, the nearest first. A run that
    diverged is never promoted.
    """
    found = [sorted(one, key=lambda trial: (trial.values, trial.number)) for one in fronts(trials)]
    missed = [trial for trial in trials if 0 < violation(trial) < DIVERGED]
    order = [*(trial for one in found for trial in one), *sorted(missed, key=violation)]
    return order[: max(math.ceil(keep * len(trials)), len(found[0]) if found else 0)]


def importances(grid: Grid, trials: Sequence[FrozenTrial], objective: int) -> dict[str, float] | None:
    """Rate by PED-ANOVA how much each factor separates an objective's best trials from all trials.

    Source: 2304.10255. A factor without effect on a recipe gets a separate level. The shares are a guide and
    not a test: trials are few, and the search favours levels that did well. None with too few trials, with
    fewer than two factors, or if all values are equal.
    """
    optuna = quiet_optuna()
    known = [(trial.params, trial.values[objective]) for trial in with_levels(trials)]
    if len(known) < FEWEST_TRIALS or len({value for _, value in known}) < 2 or len(grid.factors) < 2:
        return None
    distributions = {
        factor: optuna.distributions.CategoricalDistribution([*labels, IRRELEVANT])
        for factor, labels in grid.factors.items()
    }
    filled = [
        optuna.trial.create_trial(
            params={factor: params.get(factor, IRRELEVANT) for factor in grid.factors},
            distributions=distributions,
            value=value,
        )
        for params, value in known
    ]
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST)
    found = optuna.importance.get_param_importances(study_of(filled), evaluator=evaluator)
    return {factor: float(found.get(factor, 0.0)) for factor in grid.factors}


def with_levels(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the feasible trials that have levels of factors: those of the grid's cells."""
    return [trial for trial in trials if is_feasible(trial) and trial.params]
