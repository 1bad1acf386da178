"""What to try next, and what is hopeless: pure functions of a search's earlier trials.

Optuna decides, in a study that lives in memory for one question and is filled with the trials that count:
those of earlier rounds as they ended, those of the same round as if they ran still (its constant liar). So an
answer depends on the settings, the round and the position in it alone, and not on when a process was killed.

How it fails: it does not; a space smaller than the number of trials is refused by ``spec.tuning``.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ablate.search.ledger import Trial, to_frozen
from ablate.study.space import combinations, spread_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.study.space import Space

_TRIES = 20
_POINTS = 100_000
_FEWEST_COMPLETE = 3
_WATCHED_FROM = 1 / 3
"""Share of a trial's budget before which nothing is hopeless: a high rate often falls behind at first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a group is searched. ``tokens``: the budget of a trial; ``at_once``: the trials of a round."""

    space: Space
    sampler: Literal["tpe", "grid"]
    trials: int
    at_once: int
    prune: bool
    tokens: int
    seed: int

    @property
    def first_points(self) -> int:
        """How many trials are spread over the space before Optuna picks any: the first is the shared one."""
        return 2 * (1 + len(self.space))


def pick(
    settings: Settings, shared: Mapping[str, Any], trials: Sequence[Trial], round_: int, position: int
) -> dict[str, Any]:
    """Return the values to try at a position of a round. The first of all are the study's own."""
    index = round_ * settings.at_once + position
    if index == 0:
        return dict(shared)
    if settings.sampler == "grid":
        others = [values for values in combinations(settings.space) if values != dict(shared)]
        return others[index - 1]
    tried = [trial.params for trial in trials]
    points = (spread_point(settings.space, at) for at in range(index, index + _POINTS))
    proposals: Iterator[dict[str, Any]] = points
    if index >= settings.first_points:
        seeds = (_seed(settings.seed, round_, position, n) for n in range(_TRIES))
        proposals = itertools.chain((_ask(settings, trials, round_, seed) for seed in seeds), points)
    return next(values for values in proposals if values not in tried)


def hopeless_at(settings: Settings, earlier: Sequence[Trial], curve: Mapping[int, float]) -> int | None:
    """Return the first number of tokens at which a trial is worse than the median of earlier ones.

    ``earlier``: the trials of earlier rounds. ``curve``: the trial's losses by tokens. None: it goes on.
    """
    complete = [trial for trial in earlier if trial.state == "complete"]
    if not settings.prune or len(complete) < _FEWEST_COMPLETE:
        return None
    import optuna

    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=_FEWEST_COMPLETE, n_warmup_steps=round(settings.tokens * _WATCHED_FROM)
    )
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    distributions = {name: field.distribution() for name, field in settings.space.items()}
    study.add_trials([to_frozen(trial, distributions) for trial in complete])
    asked = study.ask()
    for tokens, loss in sorted(curve.items()):
        asked.report(loss, tokens)
        if asked.should_prune():
            return tokens
    return None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the lowest loss, none of whose runs diverged; None if there is none."""
    good = [trial for trial in trials if trial.values is not None and not trial.violation]
    return min(good, key=lambda trial: (trial.values, trial.number), default=None)


def _ask(settings: Settings, trials: Sequence[Trial], round_: int, seed: int) -> dict[str, Any]:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=1, multivariate=len(settings.space) > 1, constant_liar=True
        )
        study = optuna.create_study(sampler=sampler)
        distributions = {name: field.distribution() for name, field in settings.space.items()}
        for trial in trials:
            told = trial.attrs["round"] < round_
            known = (
                trial if told else replace(trial, state="open", values=None, violation=None, intermediate={})
            )
            study.add_trial(to_frozen(known, distributions))
        asked = study.ask(distributions)
    return {name: settings.space[name].tidy(value) for name, value in asked.params.items()}


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])
