"""Which factors of a search mattered: shares of the variance of an objective, by fANOVA (Hutter et al. 2014).

Optuna fits a random forest to the trials and splits its variance. A factor without effect on a recipe gets a
separate level. The shares are a guide and not a test: trials are few, and the search favours levels that did
well.

How it fails: too few trials, or an objective that does not vary, give no importances (None).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ablate.search.front import is_feasible
from ablate.search.grid import IRRELEVANT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna.distributions import BaseDistribution

    from ablate.search.grid import Grid
    from ablate.search.ledger import Trial

FEWEST_TRIALS = 8
_SEED = 0


def importances(grid: Grid, trials: Sequence[Trial], objective: int) -> dict[str, float] | None:
    """Return each factor's share of the variance of an objective, over trials with a level and a result."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor of which one level alone was tried
        found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=_SEED))
    return {factor: float(found.get(factor, 0.0)) for factor in grid.factors}


def with_levels(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that tell factors apart: feasible ones of the grid's cells."""
    return [trial for trial in trials if is_feasible(trial) and trial.params]
