"""The spaces of a search: a grid of recipes, and values of an arm's training.

``Rates``: the study's own values first, then spread points, then TPE.

``Grid``: each distinct recipe once, with the factors that matter for it. Cells with the same recipe are one
candidate (without an FP4 GEMM no stabiliser acts). A factor is relevant for a candidate only if all of its
cells share the level. TPE suggests levels of all factors. A converged TPE suggests candidates that were tried
already; after some tries, the search takes the untried candidate that is closest to the last suggestion
(shares most levels).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ablate.search.engine import open_trial, seed_of, suggestions, violation
from ablate.study.search_space import combinations, spread_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import FrozenTrial

    from ablate.study.search_space import Space

IRRELEVANT = "–"
"""Replaces the level of a factor without effect, in tables and in the importances."""
RANDOM_FIRST = 10
"""Number of results that TPE needs; before that, candidates are drawn at random."""
_TRIES = 12
_POINTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The labels of each factor in the order of the file, and the candidates tried first.

    ``cells``: for each candidate, the cells of the grid with this recipe, each as its levels by factor;
    empty for a recipe outside the grid.
    """

    factors: Mapping[str, tuple[str, ...]]
    cells: Mapping[str, Sequence[Mapping[str, str]]]
    first: tuple[str, ...]
    sampler: Literal["tpe", "random"]
    seed: int

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Optuna's distribution of each factor: the same labels for every trial."""
        from optuna.distributions import CategoricalDistribution

        return {factor: CategoricalDistribution(labels) for factor, labels in self.factors.items()}

    def levels(self, name: str) -> dict[str, str]:
        """Return a candidate's levels by factor, of its relevant factors alone."""
        cells = self.cells[name] or [{}]
        return dict(set.intersection(*(set(cell.items()) for cell in cells)))

    def propose(self, seen: Sequence[FrozenTrial], seed: int) -> FrozenTrial:
        """Make an open trial of an untried candidate; those of ``first`` come before all others."""
        name = self.first[len(seen)] if len(seen) < len(self.first) else self._pick(seen, seed)
        return open_trial(self.levels(name), self.distributions, {"candidate": name})

    def _pick(self, seen: Sequence[FrozenTrial], seed: int) -> str:
        taken = set(map(candidate_of, seen))
        untried = [name for name in self.cells if name not in taken]
        random.Random(seed_of(self.seed, seed)).shuffle(untried)  # noqa: S311  no secret; the order of the file must not decide
        known = [trial for trial in seen if trial.state.name in ("COMPLETE", "RUNNING")]
        if self.sampler == "random" or sum(trial.state.name == "COMPLETE" for trial in known) < RANDOM_FIRST:
            return untried[0]
        options = {"n_startup_trials": RANDOM_FIRST, "multivariate": True, "group": True}
        wishes = suggestions(known, self.distributions, seed_of(self.seed, seed), **options)
        for wished in itertools.islice(wishes, _TRIES):

            def shared(name: str, wished: dict[str, str] = wished) -> int:
                return max((len(wished.items() & cell.items()) for cell in self.cells[name]), default=0)

            found = max(untried, key=shared)
            if shared(found) == len(self.factors):
                break
        return found


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Values of fields of training. ``shared``: the study's own values."""

    fields: Space
    shared: dict[str, Any]
    sampler: Literal["tpe", "grid"]
    seed: int

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of each field."""
        return {name: field.distribution() for name, field in self.fields.items()}

    def propose(self, seen: Sequence[FrozenTrial], seed: int) -> FrozenTrial:
        """Make an open trial of untried values; the first are the study's own."""
        tried = [trial.params for trial in seen]

        def proposals() -> Iterator[dict[str, Any]]:
            yield dict(self.shared)
            if self.sampler == "grid":
                yield from combinations(self.fields)
            elif len(seen) >= 2 * (1 + len(self.fields)):  # the first points are spread over the space
                options = {"n_startup_trials": 1, "multivariate": len(self.fields) > 1}
                found = suggestions(seen, self.distributions, seed_of(self.seed, seed), **options)
                for one in itertools.islice(found, _TRIES):
                    yield {name: self.fields[name].tidy(value) for name, value in one.items()}
            for at in range(len(seen), len(seen) + _POINTS):
                yield spread_point(self.fields, at)

        values = next(values for values in proposals() if values not in tried)
        return open_trial(values, self.distributions, {})


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the lowest loss and without diverged runs, or None."""
    good = [trial for trial in trials if trial.state.name == "COMPLETE" and not violation(trial)]
    return min(good, key=lambda trial: (trial.values, trial.number), default=None)


def candidate_of(trial: FrozenTrial) -> str:
    """Return the name of a trial's candidate."""
    return str(trial.user_attrs["candidate"])
