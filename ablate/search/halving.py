"""A search over a grid of recipes at rising budgets, and what its trials show: fronts, factors that mattered.

Each distinct recipe is tried once, with the factors that matter for it. Cells with the same recipe are one
candidate (without an FP4 GEMM no stabiliser acts). A factor is relevant for a candidate only if all of its
cells share the level. TPE suggests levels of all factors. A converged TPE suggests candidates that were tried
already; after some tries, the search takes the untried candidate that is closest to the last suggestion
(shares most levels).

The better share of one budget's trials is run at the next. All objectives are minimised. A trial with a
violation missed, and is never on a front.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.search.engine import (
    LOSS,
    TrialGroup,
    is_feasible,
    open_study,
    open_trial,
    quiet_optuna,
    search,
    seed_of,
    study_of,
    suggestions,
    violation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.plan import Plan
    from ablate.plan.plan import PlannedArm
    from ablate.search.engine import Run
    from ablate.study import Study
    from ablate.study.search_space import Search

IRRELEVANT = "–"
"""Replaces the level of a factor without effect, in tables and in the importances."""
RANDOM_FIRST = 10
"""Number of results that TPE needs; before that, candidates are drawn at random."""
FEWEST_TRIALS = 8
"""Fewer give no importances."""
_BEST = 0.25
"""The share of best trials that importances compare with all trials."""
COST = "token cost (share of the baseline's tokens)"
STEP_TIME = "modelled step time (over the baseline's)"
DIVERGED = 1e6
"""The violation of a diverged run: worse than any miss of a target."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Distinct recipes, how they are searched, and what may be run.

    ``name``: also of the search's folder in the storage. ``cells``: for each candidate, the cells of the grid
    with this recipe, each as its levels by factor; empty for a recipe outside the grid. ``first``: what is
    tried first, the baseline and the named arms. ``plans``: one for each budget, with the same arms.
    ``times``: modelled step time over the baseline's, by arm.
    """

    name: str
    search: Search
    cells: Mapping[str, Sequence[Mapping[str, str]]]
    first: tuple[str, ...]
    study: Study
    plans: tuple[Plan, ...]
    times: Mapping[str, float]

    @property
    def baseline(self) -> str:
        """The arm that all others are compared with."""
        return self.first[0]

    def arm(self, budget: int, name: str) -> PlannedArm:
        """Look up an arm as it is run at a budget."""
        return self.plans[self.search.budgets.index(budget)].arm(name)

    @property
    def num_trials(self) -> int:
        """How many candidates are tried at the first budget."""
        return min(self.search.trials, len(self.cells))

    @property
    def most_trials(self) -> tuple[int, ...]:
        """The largest number of trials of each budget, if no front is larger than its share."""
        counts = [self.num_trials]
        for _ in self.search.budgets[1:]:
            # and the baseline
            promoted_trials = math.ceil(self.search.keep * counts[-1]) + 1
            counts.append(min(promoted_trials, counts[-1]))
        return tuple(counts)

    def studies(self, storage: BaseStorage) -> list[optuna.Study]:
        """Open or create Optuna's study of each budget."""
        objectives = (LOSS if self.search.objective == "loss" else COST, STEP_TIME)
        studies = []
        for budget in self.search.budgets:
            name = f"{self.name} @ {short_tokens(budget)} tokens"
            studies.append(open_study(storage, name, objectives))
        return studies

    def read(self, storage: BaseStorage) -> list[list[FrozenTrial]]:
        """Read the present trials of each budget."""
        return [study.get_trials() for study in self.studies(storage)]

    def is_done(self, budgets: Sequence[Sequence[FrozenTrial]]) -> bool:
        """Whether nothing is left to run; a search that was given more trials is not done."""
        trials = [trial for trials in budgets for trial in trials]
        is_finished = all(trial.state.is_finished() for trial in trials)
        return is_finished and len(budgets[0]) >= self.num_trials and all(budgets)

    def levels(self, name: str) -> dict[str, str]:
        """Return a candidate's levels by factor, of its relevant factors alone."""
        cells = self.cells[name] or [{}]
        return dict(set.intersection(*(set(cell.items()) for cell in cells)))

    def propose(self, seen: Sequence[FrozenTrial], seed: int) -> FrozenTrial:
        """Make an open trial of an untried candidate; those of ``first`` come before all others."""
        from optuna.distributions import CategoricalDistribution

        # The same labels for every trial.
        distributions = {
            factor: CategoricalDistribution(labels)
            for factor, labels in self.search.factors.items()
        }
        if len(seen) < len(self.first):
            name = self.first[len(seen)]
        else:
            name = self._pick(seen, seed_of(self.search.seed, seed), distributions)
        return open_trial(self.levels(name), distributions, candidate=name)

    def _pick(
        self,
        seen: Sequence[FrozenTrial],
        seed: int,
        distributions: dict[str, CategoricalDistribution],
    ) -> str:
        tried = set(map(candidate_of, seen))
        untried = [name for name in self.cells if name not in tried]
        random.Random(seed).shuffle(untried)  # noqa: S311  no secret; the order of the file must not decide
        known = [trial for trial in seen if trial.state.name in ("COMPLETE", "RUNNING")]
        num_complete = sum(trial.state.name == "COMPLETE" for trial in known)
        if self.search.sampler == "random" or num_complete < RANDOM_FIRST:
            return untried[0]
        for levels in suggestions(
            known,
            distributions,
            seed,
            n_startup_trials=RANDOM_FIRST,
            multivariate=True,
            group=True,
        ):
            num_shared = {}
            for name in untried:
                cells = self.cells[name] or [{}]
                num_shared[name] = max(
                    len(levels.items() & cell.items()) for cell in cells
                )
            closest = max(untried, key=num_shared.__getitem__)
            if num_shared[closest] == len(distributions):
                break
        return closest


def short_tokens(tokens: int) -> str:
    """Return a token count as exact text, with k, M or B where no digit is lost: 300_000 → 300k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def search_grid(grid: SearchPlan, storage: BaseStorage, run: Run) -> None:
    """Start or resume a search. ``run`` raises where a trial has no result."""
    num_trials = grid.num_trials
    better = grid.first
    for budget, study in zip(grid.search.budgets, grid.studies(storage), strict=True):
        first = better
        if budget != grid.search.budgets[0]:
            # If more trials or a larger share were asked for later, new trials follow the old ones.
            known = map(candidate_of, study.get_trials())
            first = tuple(dict.fromkeys([*known, *better]))
            num_trials = len(first)

        def arms(trial: FrozenTrial, budget: int = budget) -> list[PlannedArm]:
            return [grid.arm(budget, candidate_of(trial))]

        group = TrialGroup(
            name=study.study_name,
            study=study,
            propose=replace(grid, first=first).propose,
            arms=arms,
            num_trials=num_trials,
        )
        search([group], grid.search.at_once, run)
        # The baseline is run at every budget.
        chosen = promoted(study.get_trials(), grid.search.keep)
        better = (grid.baseline, *map(candidate_of, chosen))


def candidate_of(trial: FrozenTrial) -> str:
    """Return the name of a trial's candidate."""
    return str(trial.user_attrs["candidate"])


def fronts(trials: Sequence[FrozenTrial]) -> Iterator[list[FrozenTrial]]:
    """Yield the fronts of the feasible trials, best first: a front is what nothing left dominates."""
    rest = [*filter(is_feasible, trials)]
    while rest:
        # a study in memory numbers them anew
        best = {trial.number for trial in study_of(rest).best_trials}
        yield [trial for index, trial in enumerate(rest) if index in best]
        rest = [trial for index, trial in enumerate(rest) if index not in best]


def promoted(trials: Sequence[FrozenTrial], keep: float) -> list[FrozenTrial]:
    """Choose the trials to run at the next budget: the share ``keep``, but always the whole first front.

    Sorted by front, then by the first objective; then those that missed, the nearest first. A run that
    diverged is never promoted.
    """
    order: list[FrozenTrial] = []
    count = math.ceil(keep * len(trials))
    for index, front in enumerate(fronts(trials)):
        order += sorted(front, key=lambda trial: (trial.values, trial.number))
        if index == 0:
            count = max(count, len(front))
    missed = [trial for trial in trials if 0 < violation(trial) < DIVERGED]
    order += sorted(missed, key=violation)
    return order[:count]


def importances(
    factors: Mapping[str, Sequence[str]], trials: Sequence[FrozenTrial], objective: int
) -> dict[str, float] | None:
    """Rate by PED-ANOVA how much each factor separates an objective's best trials from all trials.

    Source: 2304.10255. A factor without effect on a recipe gets a separate level. The shares are a guide and
    not a test: trials are few, and the search favours levels that did well. None with too few trials, with
    fewer than two factors, or if all values are equal.
    """
    optuna = quiet_optuna()
    known = with_levels(trials)
    values = {trial.values[objective] for trial in known}
    if len(known) < FEWEST_TRIALS or len(values) < 2 or len(factors) < 2:
        return None
    distributions = {
        factor: optuna.distributions.CategoricalDistribution([*labels, IRRELEVANT])
        for factor, labels in factors.items()
    }
    irrelevant = dict.fromkeys(factors, IRRELEVANT)
    with_all_factors = [
        optuna.trial.create_trial(
            params=irrelevant | trial.params,
            distributions=distributions,
            value=trial.values[objective],
        )
        for trial in known
    ]
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST)
    shares = optuna.importance.get_param_importances(
        study_of(with_all_factors), evaluator=evaluator
    )
    return {factor: float(shares.get(factor, 0.0)) for factor in factors}


def with_levels(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the feasible trials that have levels of factors: those of the grid's cells."""
    return [trial for trial in trials if is_feasible(trial) and trial.params]
