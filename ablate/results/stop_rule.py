"""Which arms may stop, decided so that the report's intervals stay right.

With seeds until settled, stopping at the first favourable interval errs far more often than one time in
twenty. So all looks, one after each seed, have one stricter nominal level, at which they together err in 5 %
of all studies (Pocock 1977, here for Student's t). Intervals at this level are repeated confidence intervals
(Jennison and Turnbull 1989), which hold whether, when and why an arm was stopped. Of several arms one stops
only where what is shown of it holds for all arms together (``claims``), each with its newest look.

A look at n seeds takes the first n seeds of the arms not yet stopped, and of the baseline. It is due when
each of these runs has a result or can no longer get one, so that its outcome does not depend on which run
ended first. ``decide`` is a pure function of results: the driver and the report get the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import stdtr

from ablate.results.claims import claims_together, p_values
from ablate.results.cost import token_costs
from ablate.results.intervals import ALPHA, Method
from ablate.results.losses import final_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.claims import Claim
    from ablate.results.cost import Cost
    from ablate.results.losses import Curve
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan, Margin, Settled, StopRule

_PATHS = 100_000


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """An arm that was stopped.

    ``seeds``: of the look that found it settled; only its first so many runs count. None for a diverged arm:
    all its results count, and give only a bound. The baseline is ``settled`` when no arm needs more of its
    runs.
    """

    kind: Literal["settled", "diverged"]
    reason: str
    seeds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """``stopped``: by arm. ``seeds``: how many runs of each arm may begin by now; None for all."""

    stopped: Mapping[str, Stopped]
    seeds: int | None = None


def level_of(rule: StopRule | None, comparisons: int = 1) -> float:
    """Return the nominal two-sided significance level of a study's intervals: ``ALPHA`` without looks.

    ``comparisons``: at the level of so many, any of them errs in 5 % of studies.
    """
    alpha = ALPHA / comparisons
    if rule is None or rule.settled is None:
        return alpha
    return level_of_looks(rule.settled.looks, alpha)


def method_of(plan: LockedPlan, origin: int = 0) -> Method:
    """Return how arms counted from ``origin`` are compared: always by seeds if runs share their beginning."""
    return Method(
        paired=plan.paired_seeds or origin > 0,
        moderated=plan.is_moderated,
        alpha=level_of(plan.stop),
    )


def level_of_looks(
    looks: tuple[int, ...], alpha: float = ALPHA, *, one_sided: bool = False
) -> float:
    """Return the level of each look at which a share ``alpha`` of arms without a cost are found to have one.

    ``one_sided``: are found to save tokens, and as many to cost some.
    """
    return float(np.quantile(_lowest_p(looks, one_sided=one_sided), alpha))


@cache
def _lowest_p(looks: tuple[int, ...], *, one_sided: bool) -> np.ndarray:
    """Simulate the lowest p-value over the looks of paired t tests, of arms without a cost."""
    rng = np.random.default_rng(0)
    n = 0
    mean = np.zeros(_PATHS)
    squares = np.zeros(_PATHS)
    lowest_p = np.full(_PATHS, np.inf)
    for look in looks:
        new = look - n
        new_mean = rng.normal(0, 1 / math.sqrt(new), _PATHS)
        if new > 1:
            squares += rng.chisquare(new - 1, _PATHS)
        squares += (new_mean - mean) ** 2 * n * new / look
        mean += (new_mean - mean) * new / look
        n = look
        t = (mean if one_sided else np.abs(mean)) / np.sqrt(squares / (n - 1) / n)
        lowest_p = np.minimum(lowest_p, 2 * stdtr(n - 1, -t))
    return lowest_p


def decide(
    outcomes: Mapping[str, Sequence[Curve]],
    rule: StopRule,
    method: Method,
    *,
    baseline: str,
    never: frozenset[str] = frozenset(),
    margin: Margin | None = None,
) -> Decision:
    """Choose the arms that stop, with the reason; an arm that has all its results is not among them.

    ``outcomes``: of every run of each arm, in the order of the study's seeds, ``missing`` where there is no
    result (yet). The baseline and the arms in ``never`` continue as long as any other arm does.
    """
    may_stop = {arm for arm, runs in outcomes.items() if not _is_complete(runs)} - never
    going = [arm for arm in outcomes if arm != baseline]
    looks = () if rule.settled is None else rule.settled.looks
    stopped: dict[str, Stopped] = {}
    seeds = looks[-1] if looks else None
    p_of_arms: dict[str, Mapping[Claim, float]] = {}
    for n in looks[:-1]:
        first = {arm: outcomes[arm][:n] for arm in (baseline, *going)}
        runs = [run for side in first.values() for run in side]
        if len(runs) < n * len(first) or not _is_complete(runs, or_lost=True):
            seeds = n  # one of these runs may still give a result
            break
        after = f"after {n} of at most {looks[-1]} seeds"
        sides = {}
        for arm in going:
            if _is_complete(first[arm]):
                sides[arm] = (first[arm], first[baseline])
        costs = token_costs(sides, method)
        losses = {}
        if margin is not None and margin.kind == "loss":
            losses = final_differences(sides, method)
        for arm, cost in costs.items():
            if arm not in never:
                loss = losses[arm].figure if arm in losses else None
                p_of_arms[arm] = p_values(cost, loss, margin)
        claims = claims_together(p_of_arms, partial(level_of, rule))
        for arm, cost in costs.items():
            if arm not in may_stop:
                continue
            reason = _why_settled(cost, claims[arm], rule.settled, margin)
            if reason:
                stopped[arm] = Stopped(
                    kind="settled", seeds=n, reason=f"{reason} {after}"
                )
        going = [arm for arm in going if arm not in stopped]
        if not set(going) - never:
            last = Stopped(
                kind="settled", seeds=n, reason=f"every arm is settled {after}"
            )
            stopped |= dict.fromkeys((*going, baseline), last)
            seeds = n
            break
    for arm in sorted(may_stop - {baseline}):
        counted = outcomes[arm]
        if arm in stopped:
            # Of a settled arm only the runs of its look count here too.
            counted = counted[: stopped[arm].seeds]
        diverged = sum(run.end == "diverged" for run in counted)
        if rule.diverged is not None and diverged >= rule.diverged:
            stopped[arm] = Stopped(
                kind="diverged", reason=f"{diverged} of its runs have diverged"
            )
    return Decision(stopped=stopped, seeds=seeds)


def _is_complete(runs: Sequence[Outcome], *, or_lost: bool = False) -> bool:
    """Whether every run has a result; with ``or_lost``, or can no longer get one."""
    return all(run.end != "missing" or (or_lost and run.lost) for run in runs)


def _why_settled(
    cost: Cost, claims: frozenset[Claim], rule: Settled | None, margin: Margin | None
) -> str:
    """Say what is settled of an arm; empty if nothing is. ``claims``: those that hold for all arms together."""
    if "within" in claims:
        return "it is shown to be inside of the margin"
    if "outside" in claims:
        return "it is shown to be outside of the margin"
    if margin is None and "differs" in claims:
        return "its token cost is settled"
    limit = None if rule is None else rule.narrower_than
    if (
        limit is not None
        and cost.kind == "interval"
        and cost.low is not None
        and cost.high is not None
        and cost.high - cost.low < limit
    ):
        return f"its interval is narrower than {100 * limit:g} %"
    return ""
