"""Which arms need not go on, decided so that the report's intervals stay right: a group-sequential rule.

Stopping at the first favourable interval, with a look after every seed, errs far more often than one time in
twenty. So the 5 % are spent over the looks that the study declares (Lan and DeMets 1983): each look has a
nominal level, and all looks together err in 5 % of all studies. The intervals at these levels are repeated
confidence intervals (Jennison and Turnbull 1989), which hold whether, when and why an arm was stopped. The
levels are those of the normal theory (Armitage, McPherson and Rowe 1969), used with Student's t (the
significance-level approach: Pocock 1977; Jennison and Turnbull 2000, chapter 11).

A look at n seeds takes the first n seeds of the arm and of the baseline, and is due when all of these have
results. ``decide`` is a pure function of results: the driver and the report get the same answer.

How it fails: it does not raise. Where a comparison gives no interval, no arm is stopped for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import ndtr, ndtri

from ablate.reports.statistics.cost import token_cost
from ablate.reports.statistics.intervals import ALPHA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.run.outcome import Outcome
    from ablate.store.lock import Hopeless, StopRule

Spending = Literal["obrien-fleming", "pocock"]

_NODES = 256
_LARGEST_Z = 37.0
"""Beyond it a tail of the normal distribution is no number of double precision any more."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """An arm that need not go on.

    ``look`` (from 1) and ``seeds``: where it was found hopeless; only its first ``seeds`` runs count then, at
    the look's level ``alpha``. None of a diverged arm, all results of which count, and give a bound only.
    """

    kind: Literal["hopeless", "diverged"]
    reason: str
    look: int | None = None
    seeds: int | None = None
    alpha: float = ALPHA


def levels_of(rule: Hopeless) -> tuple[float, ...]:
    """Return the nominal significance level of each look, two-sided."""
    return nominal_alphas(tuple(n / rule.looks[-1] for n in rule.looks), rule.spending)


def decide(
    outcomes: Mapping[str, Sequence[Outcome]],
    rule: StopRule,
    *,
    baseline: str,
    never: frozenset[str] = frozenset(),
    paired: bool = False,
) -> dict[str, Stopped]:
    """Return the arms that need not go on, with the reason; one with all its results is at its end anyway.

    ``outcomes``: of every run of each arm, in the order of the study's seeds, ``missing`` where there is no
    result (yet). The baseline and the arms in ``never`` always go on.
    """
    found = {}
    for arm, runs in outcomes.items():
        if arm == baseline or arm in never or all(run.end != "missing" for run in runs):
            continue
        stop = None
        if rule.hopeless is not None:
            stop = _hopeless(runs, outcomes.get(baseline, ()), rule.hopeless, paired=paired)
        if rule.diverged is not None:
            # Of a hopeless arm only the runs of its look count, here as well.
            count = sum(run.end == "diverged" for run in runs[: stop.seeds if stop else None])
            if count >= rule.diverged:
                stop = Stopped(kind="diverged", reason=f"{count} of its runs have diverged")
        if stop is not None:
            found[arm] = stop
    return found


def alpha_of(
    arm: Sequence[Outcome], baseline: Sequence[Outcome], rule: StopRule | None, *, ended: bool
) -> float:
    """Return the nominal level at which an arm that goes on is compared: that of the look it stands at.

    ``ended``: no run of either side is still to come. The level is then the last look's, also where runs have
    failed: with fewer results it is on the safe side. Before the first look it is the first look's.
    """
    if rule is None or rule.hopeless is None:
        return ALPHA
    alphas = levels_of(rule.hopeless)
    if ended:
        return alphas[-1]
    passed = sum(_has_results(arm, n) and _has_results(baseline, n) for n in rule.hopeless.looks)
    return alphas[max(0, passed - 1)]


def _hopeless(
    arm: Sequence[Outcome], baseline: Sequence[Outcome], rule: Hopeless, *, paired: bool
) -> Stopped | None:
    for look, (n, alpha) in enumerate(zip(rule.looks[:-1], levels_of(rule), strict=False), 1):
        if not (_has_results(arm, n) and _has_results(baseline, n)):
            return None
        cost = token_cost(arm[:n], baseline[:n], paired=paired, alpha=alpha)
        # A bound is of these runs alone. With all runs cut at the budget the cost is too low, with its error.
        shown = cost if cost.kind == "interval" else cost.restricted
        if shown is not None and shown.low is not None and shown.low > rule.cost_above:
            reason = (
                f"its token cost is shown to be above {100 * rule.cost_above:g} % "
                f"after {n} of {rule.looks[-1]} seeds"
            )
            return Stopped(kind="hopeless", look=look, seeds=n, alpha=alpha, reason=reason)
    return None


def _has_results(runs: Sequence[Outcome], n: int) -> bool:
    return len(runs) >= n and all(run.end != "missing" for run in runs[:n])


def spent(fraction: float, spending: Spending) -> float:
    """Return how much of the 5 % may be spent when ``fraction`` of the information is there, both sides."""
    side = ALPHA / 2
    if spending == "pocock":
        return 2 * side * math.log(1 + (math.e - 1) * fraction)
    return 4 * float(ndtr(ndtri(side / 2) / math.sqrt(fraction)))


@cache
def nominal_alphas(fractions: tuple[float, ...], spending: Spending) -> tuple[float, ...]:
    """Return the nominal two-sided significance level of each look.

    ``fractions``: the share of the information at each look, rising to 1. The score B(t), a Brownian motion
    at these times, must leave the boundary for the first time at look k with the probability that is spent
    there. Its density within the boundary is carried from look to look by Gauss and Legendre's quadrature.
    """
    at, weights = np.polynomial.legendre.leggauss(_NODES)
    alphas: list[float] = []
    mass, places, before = np.ones(1), np.zeros(1), 0.0
    for k, time in enumerate(fractions):
        increment = spent(time, spending) - (spent(fractions[k - 1], spending) if k else 0.0)
        sigma = math.sqrt(time - before)
        low, high = 0.0, _LARGEST_Z * math.sqrt(time)
        for _ in range(100):
            middle = (low + high) / 2
            crossed = 2 * float(mass @ ndtr((places - middle) / sigma))
            low, high = (middle, high) if crossed > increment else (low, middle)
        bound = (low + high) / 2
        alphas.append(2 * float(ndtr(-bound / math.sqrt(time))))
        new = bound * at
        kernel = np.exp(-(((new[:, None] - places) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
        mass, places, before = bound * weights * (kernel @ mass), new, time
    return tuple(alphas)
