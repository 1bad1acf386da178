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
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import stdtr

from ablate.results.cost import is_settled, standing, token_costs
from ablate.results.intervals import ALPHA, Method
from ablate.results.losses import final_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.results.intervals import Estimate
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


def level_of(rule: StopRule | None) -> float:
    """Return the nominal two-sided significance level of a study's intervals: ``ALPHA`` without looks."""
    return ALPHA if rule is None or rule.settled is None else _level_of_looks(rule.settled.looks)


def method_of(plan: LockedPlan, origin: int = 0) -> Method:
    """Return how arms counted from ``origin`` are compared: always by seeds if runs share their beginning."""
    return Method(
        paired=plan.paired_seeds or origin > 0, moderated=plan.is_moderated, alpha=level_of(plan.stop)
    )


@cache
def _level_of_looks(looks: tuple[int, ...]) -> float:
    """Simulate paired t intervals of an arm without a cost: 5 % of such arms are found to have one."""
    rng, paths = np.random.default_rng(0), _PATHS
    mean, squares, n = np.zeros(paths), np.zeros(paths), 0
    # The lowest p value on each path.
    least = np.full(paths, np.inf)
    for look in looks:
        new = look - n
        own = rng.normal(0, 1 / math.sqrt(new), paths)
        squares += rng.chisquare(new - 1, paths) if new > 1 else 0.0
        squares += (own - mean) ** 2 * n * new / look
        mean += (own - mean) * new / look
        n = look
        t = np.abs(mean) / np.sqrt(squares / (n - 1) / n)
        least = np.minimum(least, 2 * stdtr(n - 1, -t))
    return float(np.quantile(least, ALPHA))


def decide(
    outcomes: Mapping[str, Sequence[Curve]],
    rule: StopRule,
    how: Method,
    *,
    baseline: str,
    never: frozenset[str] = frozenset(),
    margin: Margin | None = None,
) -> Decision:
    """Choose the arms that stop, with the reason; an arm that has all its results is not among them.

    ``outcomes``: of every run of each arm, in the order of the study's seeds, ``missing`` where there is no
    result (yet). The baseline and the arms in ``never`` continue as long as any other arm does.
    """
    stopped: dict[str, Stopped] = {}
    going = [arm for arm in outcomes if arm != baseline]
    allowed = None
    if (settled := rule.settled) is not None:
        for n, more in pairwise(settled.looks):
            allowed = n
            first = {arm: outcomes[arm][:n] for arm in (baseline, *going)}
            if any(len(own) < n or not _is_complete(own, lost=True) for own in first.values()):
                break  # one of these runs may still give a result
            sides = {arm: (first[arm], first[baseline]) for arm in going if _is_complete(first[arm])}
            of_loss = margin is not None and margin.kind == "loss"
            losses = final_differences(sides, how) if of_loss else {}
            for arm, cost in token_costs(sides, how).items():
                if arm in never or _is_complete(outcomes[arm]):
                    continue
                loss = losses[arm].figure if of_loss else None
                reason = _settled(cost, loss, settled, margin, how.alpha, n)
                if reason is not None:
                    stopped[arm] = Stopped(kind="settled", seeds=n, reason=reason)
            going = [arm for arm in going if arm not in stopped]
            if not set(going) - never:
                reason = f"every arm is settled after {n} of at most {settled.looks[-1]} seeds"
                last = Stopped(kind="settled", seeds=n, reason=reason)
                stopped |= dict.fromkeys((*going, baseline), last)
                break
            allowed = more
    if rule.diverged is not None:
        for arm, runs in outcomes.items():
            # Of a settled arm only the runs of its look count here too.
            seeds = stopped[arm].seeds if arm in stopped else None
            count = sum(run.end == "diverged" for run in runs[:seeds])
            if arm == baseline or arm in never or _is_complete(runs):
                continue
            if count >= rule.diverged:
                stopped[arm] = Stopped(kind="diverged", reason=f"{count} of its runs have diverged")
    return Decision(stopped=stopped, seeds=allowed)


def _is_complete(runs: Sequence[Outcome], *, lost: bool = False) -> bool:
    """Whether every run has a result; with ``lost``, or can no longer get one."""
    return all(run.end != "missing" or (lost and run.lost) for run in runs)


def _settled(
    cost: Cost, loss: Estimate | None, rule: Settled, margin: Margin | None, alpha: float, n: int
) -> str | None:
    """Say in words what is settled of an arm after ``n`` seeds; None if nothing is."""
    after = f"after {n} of at most {rule.looks[-1]} seeds"
    shown = cost if cost.kind == "interval" else cost.restricted
    if margin is not None:
        place = standing(cost, loss, margin, alpha)
        if place != "open":
            return f"it is shown to be {'inside' if place == 'within' else 'outside'} of the margin {after}"
    # Runs cut at the budget can show a cost, but no saving.
    elif is_settled(cost) or (shown is not None and (shown.low or 0.0) > 0):
        return f"its token cost is settled {after}"
    if rule.narrower_than is None or cost.low is None or cost.high is None or cost.kind != "interval":
        return None
    narrow = cost.high - cost.low < rule.narrower_than
    return f"its interval is narrower than {100 * rule.narrower_than:g} % {after}" if narrow else None
