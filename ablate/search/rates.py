"""Values of an arm's training as a space of a search: the study's own first, then spread points, then TPE."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ablate.search.ledger import Proposal, study_of, tpe, violation
from ablate.study.search_space import combinations, spread_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from ablate.search.ledger import Curve
    from ablate.study.search_space import Space

_TRIES = 20
_POINTS = 100_000
_FEWEST_COMPLETE = 3
_WATCHED_FROM = 1 / 3
"""No trial is hopeless before this share of its budget: a high rate often falls behind at first."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Fields of training. ``shared``: the study's own values of them; ``tokens``: the budget of a trial."""

    fields: Space
    shared: dict[str, Any]
    sampler: Literal["tpe", "grid"]
    prune: bool
    tokens: int
    seed: int

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Each field as Optuna has it."""
        return {name: field.distribution() for name, field in self.fields.items()}

    def propose(self, seen: Sequence[FrozenTrial], round_: int, position: int) -> Proposal:
        """Return untried values; the first are the study's own."""
        index = len(seen)
        if index == 0:
            return Proposal(params=dict(self.shared))
        if self.sampler == "grid":
            others = [values for values in combinations(self.fields) if values != self.shared]
            return Proposal(params=others[index - 1])
        tried = [trial.params for trial in seen]
        points = (spread_point(self.fields, at) for at in range(index, index + _POINTS))
        proposals: Iterator[dict[str, Any]] = points
        if index >= 2 * (1 + len(self.fields)):  # the first points are spread over the space
            seeds = (_seed(self.seed, round_, position, n) for n in range(_TRIES))
            proposals = itertools.chain((self._suggest(seen, seed) for seed in seeds), points)
        return Proposal(params=next(values for values in proposals if values not in tried))

    def _suggest(self, seen: Sequence[FrozenTrial], seed: int) -> dict[str, Any]:
        sampler = tpe(seed, n_startup_trials=1, multivariate=len(self.fields) > 1)
        asked = study_of(seen, sampler=sampler).ask(self.distributions)
        return {name: self.fields[name].tidy(value) for name, value in asked.params.items()}

    def hopeless_at(self, earlier: Sequence[FrozenTrial], curve: Curve) -> int | None:
        """Return the first number of tokens at which a trial is worse than the median of earlier ones."""
        complete = [trial for trial in earlier if trial.state.name == "COMPLETE"]
        if not self.prune or len(complete) < _FEWEST_COMPLETE:
            return None
        import optuna

        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=_FEWEST_COMPLETE, n_warmup_steps=round(self.tokens * _WATCHED_FROM)
        )
        sampler = optuna.samplers.RandomSampler(seed=0)
        asked = study_of(complete, sampler=sampler, pruner=pruner).ask()
        for tokens, loss in sorted(curve.items()):
            asked.report(loss, tokens)
            if asked.should_prune():
                return tokens
        return None


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the lowest loss, none of whose runs diverged; None without one."""
    good = [trial for trial in trials if trial.state.name == "COMPLETE" and not violation(trial)]
    return min(good, key=lambda trial: (trial.values, trial.number), default=None)


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])
