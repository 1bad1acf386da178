"""A search over a grid of recipes at rising budgets: the better share of one budget's trials at the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.search.engine import Group, search
from ablate.search.front import promoted
from ablate.search.grid import candidate_of
from ablate.search.ledger import LOSS, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optuna.storages import BaseStorage

    from ablate.search.engine import Proposal, Run
    from ablate.search.grid import Grid
    from ablate.search.ledger import Trial

COST = "token cost (share of the baseline's tokens)"
STEP_TIME = "modelled step time (over the baseline's)"
DIVERGED = 1e6
"""The violation of a diverged run: worse than any miss of a target, which is in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """What is searched. ``budgets`` in tokens, rising. ``objectives``: how Optuna's pages name them."""

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
        return min(self.trials, len(self.grid.candidates))

    @property
    def most_trials(self) -> tuple[int, ...]:
        """The largest number of trials of each budget, if no front is larger than its share."""
        counts = [self.num_trials]
        for _ in self.budgets[1:]:
            counts.append(min(math.ceil(self.keep * counts[-1]) + 1, counts[-1]))  # and the baseline
        return tuple(counts)

    def ledgers(self, storage: BaseStorage) -> list[Ledger]:
        """Return the ledger of each budget."""
        return [
            Ledger(storage, f"{self.name} @ {short_tokens(budget)} tokens", self.objectives)
            for budget in self.budgets
        ]

    def read(self, storage: BaseStorage) -> tuple[tuple[Trial, ...], ...]:
        """Return the trials of each budget as they stand."""
        return tuple(tuple(ledger.trials()) for ledger in self.ledgers(storage))

    def is_done(self, budgets: Sequence[Sequence[Trial]]) -> bool:
        """Whether nothing is left to run; a search that was given more trials is not done."""
        told = all(trial.state != "open" for trials in budgets for trial in trials)
        return told and len(budgets[0]) >= self.num_trials and all(budgets)


def short_tokens(tokens: int) -> str:
    """Return a token count that is exact, with k, M or B where that is shorter: 300_000 → 300k."""
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

    ``describe(budget, candidate)``: further attributes of a trial for the ledger, such as its runs.
    """
    chosen: list[str] = []
    for budget, ledger in zip(plan.budgets, plan.ledgers(storage), strict=True):
        grid, total = plan.grid, plan.num_trials
        is_first = budget == plan.budgets[0]
        if not is_first:
            # If more trials or a larger share were asked for later, new trials follow the old ones.
            chosen = list(dict.fromkeys([*map(candidate_of, ledger.trials()), *chosen]))
            grid, total = replace(grid, first=tuple(chosen)), len(chosen)

        def more(found: Proposal, budget: int = budget, *, is_first: bool = is_first) -> dict[str, Any]:
            name = found.attrs["candidate"]
            started = {"started_from": True} if is_first and name in plan.grid.first else {}
            return {**describe(budget, name), "tokens": budget, **started}

        group = Group(name=ledger.name, ledger=ledger, space=grid, num_trials=total, describe=more)
        if not search([group], plan.at_once, run):
            return False
        better = promoted(ledger.trials(), plan.keep, DIVERGED)
        chosen = [plan.grid.first[0], *map(candidate_of, better)]  # the baseline goes on in any case
    return True
