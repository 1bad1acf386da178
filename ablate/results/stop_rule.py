"""Which arms may stop, decided so that the report's intervals stay right.

With seeds until settled, stopping at the first favourable interval errs far more often than one time in
twenty. So the 5 % are spent evenly over the looks, one after each seed (Lan and DeMets 1983): each look has a
nominal level, and all looks together err in 5 % of all studies. The intervals at these levels are repeated
confidence intervals (Jennison and Turnbull 1989), which hold whether, when and why an arm was stopped. The
levels are those of the normal theory (Armitage, McPherson and Rowe 1969), used with Student's t (the
significance-level approach: Pocock 1977; Jennison and Turnbull 2000, chapter 11).

A look at n seeds takes the first n seeds of the arms not yet stopped, and of the baseline. It is due when
each of these runs has a result or can no longer get one, so that its outcome does not depend on which run
ended first. ``decide`` is a pure function of results: the driver and the report get the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import ndtr, stdtr

from ablate.results.cost import is_settled, standing, token_costs
from ablate.results.intervals import ALPHA
from ablate.run.outcome import Outcome
from ablate.store.plan_file import StopRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.results.intervals import Estimate
    from ablate.store.plan_file import Margin, Settled

_NODES = 256
_PATHS = 100_000
_REPEATS = 200
_LARGEST_Z = 37.0
"""Beyond it a tail of the normal distribution underflows double precision."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """An arm that was stopped.

    ``seeds``: of the look that found it settled; only its first so many runs count, at the look's level
    ``alpha``. None for a diverged arm: all its results count, and give only a bound. The baseline is
    ``settled`` when no arm needs more of its runs.
    """

    kind: Literal["settled", "diverged"]
    reason: str
    seeds: int | None = None
    alpha: float = ALPHA


@dataclass(frozen=True, kw_only=True)
class Decision:
    """``stopped``: by arm. ``seeds``: how many runs of each arm may begin by now; None for all."""

    stopped: Mapping[str, Stopped]
    seeds: int | None = None


@cache
def levels_of(rule: Settled) -> tuple[float, ...]:
    """Compute the nominal two-sided significance level of each look.

    They are those of the normal theory, made stricter by one factor: intervals of few seeds differ more from
    look to look than the theory assumes, and would together err in up to 7 % of studies. The factor that
    keeps the 5 % for one arm's paired t intervals is found by simulation.
    """
    alphas = nominal_alphas([n / rule.looks[-1] for n in rule.looks])
    rng, paths = np.random.default_rng(0), _PATHS
    mean, squares, n = np.zeros(paths), np.zeros(paths), 0
    # The lowest p value over the look's level on each path.
    worst = np.full(paths, np.inf)
    for look, alpha in zip(rule.looks, alphas, strict=True):
        new = look - n
        own = rng.normal(0, 1 / math.sqrt(new), paths)
        squares += rng.chisquare(new - 1, paths) if new > 1 else 0.0
        squares += (own - mean) ** 2 * n * new / look
        mean += (own - mean) * new / look
        n = look
        t = np.abs(mean) / np.sqrt(squares / (n - 1) / n)
        worst = np.minimum(worst, 2 * stdtr(n - 1, -t) / alpha)
    factor = min(1.0, float(np.quantile(worst, ALPHA)))
    return tuple(factor * alpha for alpha in alphas)


def decide(
    outcomes: Mapping[str, Sequence[Outcome]],
    rule: StopRule,
    *,
    baseline: str,
    never: frozenset[str] = frozenset(),
    paired: bool = False,
    moderated: bool = True,
    margin: Margin | None = None,
    differences: Callable[[int, Sequence[str]], Mapping[str, Estimate]] | None = None,
) -> Decision:
    """Choose the arms that stop, with the reason; an arm that has all its results is not among them.

    ``outcomes``: of every run of each arm, in the order of the study's seeds, ``missing`` where there is no
    result (yet). The baseline and the arms in ``never`` continue as long as any other arm does.
    ``differences``: the loss differences of some arms over their first n seeds, for a margin in loss.
    """
    stopped: dict[str, Stopped] = {}
    going = [arm for arm in outcomes if arm != baseline]
    allowed = None
    if (settled := rule.settled) is not None:
        for (n, more), alpha in zip(pairwise(settled.looks), levels_of(settled), strict=False):
            allowed = n
            first = {arm: outcomes[arm][:n] for arm in (baseline, *going)}
            if any(len(own) < n or not _is_complete(own, lost=True) for own in first.values()):
                break  # one of these runs may still give a result
            sides = {arm: (first[arm], first[baseline]) for arm in going if _is_complete(first[arm])}
            costs = token_costs(sides, paired=paired, alpha=alpha, moderated=moderated)
            losses = {} if differences is None else differences(n, list(sides))
            for arm, cost in costs.items():
                if arm in never or _is_complete(outcomes[arm]):
                    continue
                reason = _settled(cost, losses.get(arm), settled, margin, alpha, n)
                if reason is not None:
                    stopped[arm] = Stopped(kind="settled", seeds=n, alpha=alpha, reason=reason)
            going = [arm for arm in going if arm not in stopped]
            if not set(going) - never:
                reason = f"every arm is settled after {n} of at most {settled.looks[-1]} seeds"
                last = Stopped(kind="settled", seeds=n, alpha=alpha, reason=reason)
                # The baseline has no interval of its own that a look could make stricter.
                stopped |= dict.fromkeys(going, last) | {baseline: replace(last, alpha=ALPHA)}
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


def alpha_of(
    arm: Sequence[Outcome], baseline: Sequence[Outcome], rule: StopRule | None, *, ended: bool
) -> float:
    """Return the nominal level of an arm that was not stopped: that of its latest look.

    ``ended``: no run of either side can still give a result. The level is then the last look's, even if runs
    have failed: with fewer results it is on the safe side. Before the first look it is the first look's.
    """
    if rule is None or rule.settled is None:
        return ALPHA
    alphas = levels_of(rule.settled)
    if ended:
        return alphas[-1]
    in_front = min([*(run.end for run in runs), "missing"].index("missing") for runs in (arm, baseline))
    return alphas[max(0, sum(n <= in_front for n in rule.settled.looks) - 1)]


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


def expected_seeds(rule: Settled, cost: float, spread: float, *, arms: int, margin: Margin | None) -> float:
    """Simulate, with a fixed seed, how many seeds an arm needs on average until it is settled.

    ``cost``: of every arm, a fraction; ``spread``: standard deviation of the log ratio of tokens to target of
    an arm's run over the baseline's run of the same seed; ``arms``: without the baseline, at most 12 are
    simulated. A ``margin`` in loss is ignored: the seeds that it takes depend on the curve.
    """
    rng, most, count, total = np.random.default_rng(0), rule.looks[-1], min(arms, 12), 0
    # ``decide`` stops no arm that has all its results, so one run is missing.
    last = Outcome(seed=most, end="missing")
    for _ in range(_REPEATS):
        drawn = np.exp(math.log1p(cost) + rng.normal(0, spread, (count, most)))
        runs = {
            str(arm): [*(Outcome(seed=i, end="hit", low=t, high=t) for i, t in enumerate(own)), last]
            for arm, own in enumerate([*drawn.tolist(), [1.0] * most])
        }
        found = decide(
            runs, StopRule(settled=rule), baseline=str(count), paired=True,
            margin=margin if margin is not None and margin.kind == "cost" else None,
        ).stopped  # fmt: skip
        seeds = (found[arm].seeds if arm in found else None for arm in map(str, range(count)))
        total += sum(most if each is None else each for each in seeds)
    return total / (_REPEATS * count)


def nominal_alphas(fractions: Sequence[float]) -> list[float]:
    """Compute the nominal two-sided significance level of each look by the normal theory.

    ``fractions``: the share of the information at each look, rising to 1. The score B(t), a Brownian motion
    at these times, must first leave the boundary at look k with the probability spent there: in total
    ALPHA · ln(1 + (e − 1) t) up to time t (Lan and DeMets' function for Pocock's boundary). The density
    within the boundary is carried from look to look by Gauss–Legendre quadrature.
    """
    at, weights = np.polynomial.legendre.leggauss(_NODES)
    alphas: list[float] = []
    mass, places, before, spent = np.ones(1), np.zeros(1), 0.0, 0.0
    for time in fractions:
        allowed = ALPHA * math.log(1 + (math.e - 1) * time)
        sigma = math.sqrt(time - before)
        low, high = 0.0, _LARGEST_Z * math.sqrt(time)
        for _ in range(100):
            middle = (low + high) / 2
            crossed = 2 * float(mass @ ndtr((places - middle) / sigma))
            low, high = (middle, high) if crossed > allowed - spent else (low, middle)
        bound = (low + high) / 2
        alphas.append(2 * float(ndtr(-bound / math.sqrt(time))))
        new = bound * at
        kernel = np.exp(-(((new[:, None] - places) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
        mass, places, before, spent = bound * weights * (kernel @ mass), new, time, allowed
    return alphas
