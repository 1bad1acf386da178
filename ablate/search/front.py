"""What trials show: the best under two objectives, the order of promotion, and which factors mattered.

All objectives are minimised. A trial with a violation is never on a front: its values stand for a miss.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from ablate.search.grid import IRRELEVANT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optuna.distributions import BaseDistribution

    from ablate.search.grid import Grid
    from ablate.search.ledger import Trial

FEWEST_TRIALS = 8


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is worse in no objective, and better in at least one."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def is_feasible(trial: Trial) -> bool:
    """Whether a trial is complete, with values that do not stand for a miss."""
    return trial.state == "complete" and not (trial.violation or 0.0) > 0


def layers(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return the feasible trials in layers: those that none dominates, then those that only these do, etc."""
    left = [trial for trial in trials if is_feasible(trial)]
    found = []
    while left:
        best = {
            trial.number
            for trial in left
            if not any(dominates(other.values or (), trial.values or ()) for other in left)
        }
        found.append([trial for trial in left if trial.number in best])
        left = [trial for trial in left if trial.number not in best]
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


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that none dominates, in the order of their last objective."""
    best = next(iter(layers(trials)), [])
    return sorted(best, key=lambda trial: (*reversed(trial.values or ()), trial.number))


def promoted(trials: Sequence[Trial], keep: float, diverged: float) -> list[Trial]:
    """Return the trials that go on to a larger budget: a share of them, but always the whole first front.

    By layer, within a layer by crowding distance, ties by number; then those that missed, the nearest first.
    A violation from ``diverged`` up is never promoted.
    """
    order: list[Trial] = []
    found = layers(trials)
    for layer in found:
        distance = crowding({trial.number: trial.values or () for trial in layer})
        order += sorted(layer, key=lambda trial: (-distance[trial.number], trial.number))
    missed = [trial for trial in trials if trial.state == "complete" and not is_feasible(trial)]
    nearest = sorted(missed, key=lambda trial: (trial.violation or 0.0, trial.number))
    order += [trial for trial in nearest if (trial.violation or 0.0) < diverged]
    return order[: max(math.ceil(keep * len(trials)), len(found[0]) if found else 0)]


def importances(grid: Grid, trials: Sequence[Trial], objective: int) -> dict[str, float] | None:
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


def with_levels(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that tell factors apart: feasible ones of the grid's cells."""
    return [trial for trial in trials if is_feasible(trial) and trial.params]
