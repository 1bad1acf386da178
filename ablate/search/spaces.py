"""The spaces of a search: a grid of recipes, and values of an arm's training.

``Rates``: the study's own values first, then spread points, then TPE.

``Grid``: each distinct recipe once, with the factors that matter for it.

Cells with the same recipe are one candidate (without an FP4 GEMM no stabiliser acts). A factor is relevant
for a candidate only if all of its cells share the level. ``walk`` goes through the factors one by one and
asks for a level only if it tells some of the remaining candidates apart, alone or together with others:
Optuna's TPE suggests over this conditional space.

How it fails: a walk that ends at an excluded or dropped cell gives None. A converged TPE suggests candidates
that were tried already; after some tries the untried candidate that shares most levels with its suggestions
is taken.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ablate.search.ledger import Proposal, study_of, tpe, violation
from ablate.study.search_space import combinations, spread_point

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import FrozenTrial

    from ablate.search.ledger import Curve
    from ablate.study.search_space import Space

IRRELEVANT = "–"
"""Replaces the level in tables and in the importances if the factor has no effect."""
RANDOM_FIRST = 10
"""Number of results that TPE needs; before that, candidates are drawn at random."""
_TRIES = 12
_TRIES_OF_RATES = 20
_POINTS = 100_000
_FEWEST_COMPLETE = 3
_WATCHED_FROM = 1 / 3
"""No trial is hopeless before this share of its budget: a high rate often falls behind at first."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe. ``cells``: its levels by factor, for each of the grid's cells with this recipe."""

    name: str
    cells: tuple[Mapping[str, str], ...] = ()

    @cached_property
    def levels(self) -> dict[str, str]:
        """The levels of the factors that are relevant for it."""
        if not self.cells:
            return {}
        return {
            factor: label
            for factor, label in self.cells[0].items()
            if all(cell[factor] == label for cell in self.cells)
        }


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All candidates, the labels of each factor in the order of the file, and the candidates tried first."""

    factors: Mapping[str, tuple[str, ...]]
    candidates: tuple[Candidate, ...]
    first: tuple[str, ...]
    sampler: Literal["tpe", "random"]
    seed: int

    prune: ClassVar[bool] = False
    """A single run of a recipe is too weak a reason to end another early."""

    @cached_property
    def by_name(self) -> dict[str, Candidate]:
        """The candidates by name."""
        return {candidate.name: candidate for candidate in self.candidates}

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Each factor as Optuna has it: the same labels for every trial."""
        from optuna.distributions import CategoricalDistribution

        return {factor: CategoricalDistribution(labels) for factor, labels in self.factors.items()}

    def hopeless_at(self, _earlier: Sequence[FrozenTrial], _curve: Curve) -> None:
        """Never end a trial early."""

    def propose(self, seen: Sequence[FrozenTrial], round_: int, position: int) -> Proposal:
        """Return an untried candidate, those of ``first`` before all others."""
        if len(seen) < len(self.first):
            found = self.by_name[self.first[len(seen)]]
        else:
            found = self._pick(seen, seed_of(self.seed, round_, position))
        return Proposal(params=found.levels, attrs={"candidate": found.name})

    def _pick(self, seen: Sequence[FrozenTrial], seed: int) -> Candidate:
        taken = set(map(candidate_of, seen))
        untried = [candidate for candidate in self.candidates if candidate.name not in taken]
        known = [trial for trial in seen if trial.state.name in ("COMPLETE", "RUNNING")]
        if self.sampler == "random" or sum(trial.state.name == "COMPLETE" for trial in known) < RANDOM_FIRST:
            return random.Random(seed).choice(untried)  # noqa: S311  no secret
        return self._suggest(known, taken, untried, seed)

    def _suggest(
        self, known: Sequence[FrozenTrial], taken: Collection[str], untried: Sequence[Candidate], seed: int
    ) -> Candidate:
        import optuna

        sampler = tpe(seed, n_startup_trials=RANDOM_FIRST, multivariate=True, group=True)
        study = study_of(known, sampler=sampler)
        wished: Counter[tuple[str, str]] = Counter()
        for _ in range(_TRIES):
            trial = study.ask()
            found = self.walk(
                lambda factor, labels, trial=trial: str(trial.suggest_categorical(factor, labels))  # type: ignore[misc]
            )
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            if found is not None and found.name not in taken:
                return found
            wished.update(trial.params.items())
        # At random among the nearest: the order of the file must not decide.
        order = random.Random(seed).sample(untried, len(untried))  # noqa: S311  no secret
        return max(order, key=lambda candidate: sum(wished[level] for level in candidate.levels.items()))

    def walk(self, choose: Callable[[str, Sequence[str]], str]) -> Candidate | None:
        """Return the candidate that ``choose(factor, labels)`` leads to, None without one.

        ``choose`` is called for a factor only if its level, alone or with others, tells candidates apart.
        """
        left = [(candidate, cell) for candidate in self.candidates for cell in candidate.cells]
        for factor, labels in self.factors.items():
            behind: dict[str, set[str]] = {}
            for candidate, cell in left:
                behind.setdefault(cell[factor], set()).add(candidate.name)
            if len(set(map(frozenset, behind.values()))) > 1:
                label = choose(factor, labels)
                left = [(candidate, cell) for candidate, cell in left if cell[factor] == label]
        for factor, labels in self.factors.items():  # then those that only together tell candidates apart
            if len({cell[factor] for _, cell in left}) > 1 and len({one.name for one, _ in left}) > 1:
                label = choose(factor, labels)
                left = [(candidate, cell) for candidate, cell in left if cell[factor] == label]
        found = {candidate.name: candidate for candidate, _ in left}
        assert len(found) <= 1  # a cell belongs to one candidate
        return next(iter(found.values()), None)


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
            places = (repr((self.seed, round_, position, n)).encode() for n in range(_TRIES_OF_RATES))
            seeds = (int.from_bytes(hashlib.sha256(place).digest()[:4]) for place in places)
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


def candidate_of(trial: FrozenTrial) -> str:
    """Return the name of a trial's candidate."""
    return str(trial.user_attrs["candidate"])


def seed_of(*parts: object) -> int:
    """Return a seed of 32 bits that is a hash of the parts."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
