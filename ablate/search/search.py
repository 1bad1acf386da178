"""The search itself: rounds of trials at the first budget, then the better share of them at the next.

A trial is a candidate at a budget. It is written to the ledger before it is run, with its round and position,
and told when its round is over. What a round tries depends on the rounds before it alone (``propose``), so a
search that was killed is gone on with as if it had not been: open trials are run, a round that was being
filled is filled up, what was told is not asked again.

Nothing here knows of Ray, files or recipes: ``run`` is a callable that runs a batch.

How it fails: a trial without a result is told as failed and its candidate not tried again. What ``run``
raises leaves the trials of the round open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.search.front import promoted
from ablate.search.ledger import LOSS, Ledger
from ablate.search.propose import Sampler, propose, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.storages import BaseStorage

    from ablate.search.candidates import Space
    from ablate.search.ledger import Trial

COST = "token cost (share of the baseline's tokens)"
STEP_TIME = "modelled step time (over the baseline's)"
DIVERGED = 1e6
"""The violation of a diverged run: worse than any miss of a target, which is in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is searched. ``first``: the candidates to start from. ``budgets`` in tokens, rising.

    ``objectives``: how Optuna's pages name them.
    """

    name: str
    space: Space
    first: tuple[str, ...]
    trials: int
    budgets: tuple[int, ...]
    keep: float
    at_once: int
    sampler: Sampler
    seed: int
    objectives: tuple[str, ...] = (LOSS, STEP_TIME)

    @property
    def num_trials(self) -> int:
        """Return how many candidates are tried at the first budget."""
        return min(self.trials, len(self.space.candidates))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a trial came to: values, with a violation where they stand for a miss; or why there are none."""

    values: tuple[float, ...] = ()
    violation: float | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Candidates to run side by side at a budget. ``of``: how many trials this budget has in all."""

    budget: int
    round: int
    numbers: tuple[int, ...]
    of: int
    candidates: tuple[str, ...]


def budget_name(name: str, budget: int) -> str:
    """Return the name of Optuna's study for a budget."""
    return f"{name} @ {short_tokens(budget)} tokens"


def short_tokens(tokens: int) -> str:
    """Return a token count that is exact, with k, M or B where that is shorter: 300_000 → 300k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def search(
    plan: Plan,
    storage: BaseStorage,
    run: Callable[[Batch], Mapping[str, Result]],
    attrs: Callable[[int, str], dict[str, Any]] = lambda _budget, _candidate: {},
) -> tuple[tuple[Trial, ...], ...]:
    """Search to the end, or go on with a search; return the trials of each budget.

    ``attrs(budget, candidate)``: what else the ledger shall say of a trial, such as its runs.
    """
    ledgers = [Ledger(storage, budget_name(plan.name, budget), plan.objectives) for budget in plan.budgets]
    chosen: list[str] = []
    for index, (budget, ledger) in enumerate(zip(plan.budgets, ledgers, strict=True)):
        # Where more trials or a larger share were asked for later, what is new follows what was there.
        chosen = list(dict.fromkeys([*map(candidate_of, ledger.trials()), *chosen]))
        total = len(chosen) if index else plan.num_trials
        for number in range(-(-total // plan.at_once)):
            size = min(plan.at_once, total - number * plan.at_once)
            _fill(plan, ledger, index, number, size, chosen, attrs)
            _run_round(ledger, budget, number, total, run)
        chosen = _chosen(plan, ledger)
    return tuple(tuple(ledger.trials()) for ledger in ledgers)


def read(plan: Plan, storage: BaseStorage) -> tuple[tuple[Trial, ...], ...]:
    """Return the trials of each budget as they stand."""
    return tuple(
        tuple(Ledger(storage, budget_name(plan.name, budget), plan.objectives).trials())
        for budget in plan.budgets
    )


def most_trials(plan: Plan) -> tuple[int, ...]:
    """Return how many trials each budget has at most, if no front is larger than its share."""
    counts = [plan.num_trials]
    for _ in plan.budgets[1:]:
        counts.append(min(math.ceil(plan.keep * counts[-1]) + 1, counts[-1]))  # and the baseline
    return tuple(counts)


def _chosen(plan: Plan, ledger: Ledger) -> list[str]:
    """Return the candidates of the next budget: the baseline, and those promoted."""
    better = [candidate_of(trial) for trial in promoted(ledger.trials(), plan.keep, DIVERGED)]
    return list(dict.fromkeys([plan.first[0], *better]))


def candidate_of(trial: Trial) -> str:
    """Return the name of a trial's candidate."""
    return str(trial.attrs["candidate"])


def _fill(
    plan: Plan,
    ledger: Ledger,
    index: int,
    number: int,
    size: int,
    chosen: Sequence[str],
    attrs: Callable[[int, str], dict[str, Any]],
) -> None:
    """Write the trials of a round that are not there yet."""
    there = ledger.trials()
    filled = {trial.attrs["position"] for trial in there if trial.attrs["round"] == number}
    for position in range(size):
        if position in filled:
            continue
        place = number * plan.at_once + position
        if index:
            candidate = plan.space.by_name[chosen[place]]
        elif place < len(plan.first):
            candidate = plan.space.by_name[plan.first[place]]
        else:
            before = [trial for trial in there if trial.attrs["round"] < number and trial.state == "complete"]
            beside = [_as_open(trial) for trial in there if trial.attrs["round"] == number]
            beside = [trial for trial in beside if trial.attrs["position"] < position]
            found = propose(
                plan.space,
                [*before, *beside],
                {candidate_of(trial) for trial in there},
                sampler=plan.sampler,
                seed=seed_of(plan.seed, number, position),
            )
            assert found is not None  # there are no more trials than candidates
            candidate = found
        where = {"round": number, "position": position, "candidate": candidate.name}
        if not index and place < len(plan.first):
            where["started_from"] = True
        own = attrs(plan.budgets[index], candidate.name)
        ledger.add(candidate.levels, _only(plan.space, candidate.levels), {**own, **where})
        there = ledger.trials()


def _as_open(trial: Trial) -> Trial:
    """Return a trial of this round as it was when the round was picked: without a result."""
    return replace(trial, state="open", values=None, violation=None)


def _only(space: Space, levels: Mapping[str, str]) -> dict[str, Any]:
    return {factor: space.distributions[factor] for factor in levels}


def _run_round(
    ledger: Ledger, budget: int, number: int, total: int, run: Callable[[Batch], Mapping[str, Result]]
) -> None:
    """Run what is open of a round, and tell what came of it."""
    still = [t for t in ledger.trials() if t.attrs["round"] == number and t.state == "open"]
    if not still:
        return
    batch = Batch(
        budget=budget,
        round=number,
        numbers=tuple(trial.number for trial in still),
        of=total,
        candidates=tuple(map(candidate_of, still)),
    )
    results = run(batch)
    for trial in still:
        result = results[candidate_of(trial)]
        if result.failed is not None:
            ledger.fail(trial.number, result.failed)
        else:
            ledger.complete(trial.number, result.values, violation=result.violation)
