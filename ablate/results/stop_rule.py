"""Which arms may stop, decided so that the report's intervals stay right.

With seeds until settled, stopping at the first favourable interval errs far more often than one time in
twenty. So all looks, one after each seed, have one stricter nominal level, at which they together err in 5 %
of all studies (Pocock 1977, here for Student's t). Intervals at this level are repeated confidence intervals
(Jennison and Turnbull 1989), which hold whether, when and why an arm was stopped.

A look at n seeds takes the first n seeds of the arms not yet stopped, and of the baseline. It is due when
each of these runs has a result or can no longer get one, so that its outcome does not depend on which run
ended first. ``decide`` is a pure function of results: the driver and the report get the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import stdtr

from ablate.results.cost import is_settled, standing, token_costs
from ablate.results.intervals import ALPHA, Method
from ablate.results.losses import final_differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.results.cost import Standing
    from ablate.results.losses import Curve, Sides
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


def level_of(rule: StopRule | None) -> float:
    """Return the nominal two-sided significance level of a study's intervals: ``ALPHA`` without looks."""
    return (
        ALPHA
        if rule is None or rule.settled is None
        else level_of_looks(rule.settled.looks)
    )


def method_of(plan: LockedPlan, origin: int = 0) -> Method:
    """Return how arms counted from ``origin`` are compared: always by seeds if runs share their beginning."""
    return Method(
        paired=plan.paired_seeds or origin > 0,
        moderated=plan.is_moderated,
        alpha=level_of(plan.stop),
    )


@cache
def level_of_looks(looks: tuple[int, ...], *, one_sided: bool = False) -> float:
    """Simulate paired t intervals of an arm without a cost: 5 % of such arms are found to have one.

    ``one_sided``: 5 % are found to save tokens, and 5 % to cost some.
    """
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
    return float(np.quantile(lowest_p, ALPHA))


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
    for n in looks[:-1]:
        first = {arm: outcomes[arm][:n] for arm in (baseline, *going)}
        if any(
            len(runs) < n or not _is_complete(runs, or_lost=True)
            for runs in first.values()
        ):
            seeds = n  # one of these runs may still give a result
            break
        after = f"after {n} of at most {looks[-1]} seeds"
        sides = {
            arm: (first[arm], first[baseline])
            for arm in going
            if _is_complete(first[arm])
        }
        for arm, reason in _settled_arms(sides, rule.settled, method, margin):
            if arm in may_stop:
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
    for arm in outcomes:
        # Of a settled arm only the runs of its look count here too.
        counted = (
            outcomes[arm][: stopped[arm].seeds] if arm in stopped else outcomes[arm]
        )
        diverged = sum(run.end == "diverged" for run in counted)
        if (
            arm in may_stop - {baseline}
            and rule.diverged is not None
            and diverged >= rule.diverged
        ):
            stopped[arm] = Stopped(
                kind="diverged", reason=f"{diverged} of its runs have diverged"
            )
    return Decision(stopped=stopped, seeds=seeds)


def _is_complete(runs: Sequence[Outcome], *, or_lost: bool = False) -> bool:
    """Whether every run has a result; with ``or_lost``, or can no longer get one."""
    return all(run.end != "missing" or (or_lost and run.lost) for run in runs)


def _settled_arms(
    sides: Mapping[str, Sides],
    rule: Settled | None,
    method: Method,
    margin: Margin | None,
) -> Iterator[tuple[str, str]]:
    """Yield each arm of which something is settled, and in words what."""
    losses = {}
    if margin is not None and margin.kind == "loss":
        losses = final_differences(sides, method)
    for arm, cost in token_costs(sides, method).items():
        is_positive = cost.restricted is not None and (cost.restricted.low or 0.0) > 0
        width = math.inf
        if cost.kind == "interval" and cost.low is not None and cost.high is not None:
            width = cost.high - cost.low
        place: Standing = "open"
        if margin is not None:
            loss = losses[arm].figure if arm in losses else None
            place = standing(cost, loss, margin, method.alpha)
        if place != "open":
            side = "inside" if place == "within" else "outside"
            yield arm, f"it is shown to be {side} of the margin"
        # Runs cut at the budget can show a cost, but no saving.
        elif margin is None and (is_settled(cost) or is_positive):
            yield arm, "its token cost is settled"
        elif (
            rule is not None
            and rule.narrower_than is not None
            and width < rule.narrower_than
        ):
            yield arm, f"its interval is narrower than {100 * rule.narrower_than:g} %"
