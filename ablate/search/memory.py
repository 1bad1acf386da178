"""Questions to Optuna: a study in memory, filled with the relevant trials and discarded after one answer.

An answer therefore depends only on these trials and a seed, even after a kill, and an unused suggestion
leaves no trace in the storage.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler
    from optuna.trial import FrozenTrial

    from ablate.search.ledger import Trial


def study_of(trials: Sequence[Trial], distributions: Mapping[str, BaseDistribution], **options: Any) -> Study:
    """Return a study in memory that holds these trials; ``options``: its sampler, its pruner."""
    import optuna

    values = next((trial.values for trial in trials if trial.values is not None), (0.0,))
    study = optuna.create_study(directions=["minimize"] * len(values), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # constraints
        study.add_trials([to_frozen(trial, distributions) for trial in trials])
    return study


def tpe(seed: int, **options: Any) -> TPESampler:
    """Return Optuna's TPE, which takes open trials for poor (the constant liar)."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # group, multivariate
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, **options)


def to_frozen(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    """Return a trial as Optuna's own."""
    from optuna.trial import TrialState as State
    from optuna.trial import create_trial

    from ablate.search.ledger import VIOLATION

    states = {"open": State.RUNNING, "complete": State.COMPLETE, "pruned": State.PRUNED, "failed": State.FAIL}
    values = list(trial.values) if trial.values is not None else None
    if trial.state == "pruned" and trial.intermediate:
        values = [trial.intermediate[max(trial.intermediate)]]
    return create_trial(
        state=states[trial.state],
        values=values,
        params=trial.params,
        distributions={name: distributions[name] for name in trial.params},
        intermediate_values=trial.intermediate,
        constraints=None if trial.violation is None else {VIOLATION: trial.violation},
    )
