"""The recipes that a search may try: each distinct one once, and the factors that mean something for it.

Cells of a grid that come to the same recipe are one candidate (no FP4 GEMM has no stabiliser), so a factor is
relevant for a candidate only where all of its cells share the level. ``walk`` goes through the factors one by
one and asks for a level only where what is left still differs in it: that is the conditional space.

How it fails: a walk may end where the grid has no cell (it was excluded or dropped), which gives None.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.distributions import CategoricalDistribution

IRRELEVANT = "–"
"""What stands for a level in tables and in the importances where the factor means nothing."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe. ``cells``: its levels by factor, in each of the grid's cells that come to it."""

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
class Space:
    """All candidates, and the labels of each factor in the order of the file."""

    factors: Mapping[str, tuple[str, ...]]
    candidates: tuple[Candidate, ...]

    @cached_property
    def by_name(self) -> dict[str, Candidate]:
        """The candidates by name."""
        return {candidate.name: candidate for candidate in self.candidates}

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Each factor as Optuna has it: the same labels for every trial."""
        from optuna.distributions import CategoricalDistribution

        return {factor: CategoricalDistribution(labels) for factor, labels in self.factors.items()}

    def walk(self, choose: Callable[[str, Sequence[str]], str]) -> Candidate | None:
        """Return the candidate that ``choose(factor, labels)`` leads to; None where there is none.

        ``choose`` is asked for a factor only where its level makes a difference to what is left.
        """
        left = [(candidate, cell) for candidate in self.candidates for cell in candidate.cells]
        for factor, labels in self.factors.items():
            behind: dict[str, set[str]] = {}
            for candidate, cell in left:
                behind.setdefault(cell[factor], set()).add(candidate.name)
            if len(set(map(frozenset, behind.values()))) > 1:
                label = choose(factor, labels)
                left = [(candidate, cell) for candidate, cell in left if cell[factor] == label]
        found = {candidate.name: candidate for candidate, _ in left}
        assert len(found) <= 1  # distinct candidates differ in the level of some factor
        return next(iter(found.values()), None)
