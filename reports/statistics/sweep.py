"""Token cost at other targets than the study's, because one target can mislead.

Each is read as the study's own is, with its interval; neighbouring targets share their noise. Where the loss
curve gets flatter, the same lag in loss is more tokens: ``cost_growth`` compares the cost at the target with
that half-way to it.

How it fails: it does not raise. Where a run diverged, or the ranges do not overlap, there is no sweep; where
not every run of both arms crosses both losses at a known place, there is no growth, and the reason says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.cost import Cost, mean_tokens, token_cost
from ablate.reports.statistics.intervals import ALPHA
from ablate.reports.statistics.losses import common_grid
from ablate.run.outcome import Outcome, outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.statistics.losses import Curve
    from ablate.run.outcome import Rule

MOST_TARGETS = 40


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Token cost at each target (validation loss in nats per token, falling), without bounds."""

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    n: int
    n_baseline: int


def target_sweep(
    arm: Sequence[Curve],
    baseline: Sequence[Curve],
    *,
    rule: Rule = "confirmed",
    paired: bool = False,
    alpha: float = ALPHA,
) -> Sweep | None:
    """Return the token cost at each target that all runs of both arms pass; None where there is none.

    From the lowest loss that all of them reach up to the lowest first evaluation.
    """
    left, right = ([curve for curve in curves if curve.end != "missing"] for curves in (arm, baseline))
    if not left or not right or any(curve.end == "diverged" for curve in (*left, *right)):
        return None
    targets = _targets(left, right)
    if len(targets) < 2:
        return None
    costs = [
        token_cost(
            outcomes_at(left, target, rule), outcomes_at(right, target, rule), paired=paired, alpha=alpha
        )
        for target in targets
    ]

    # A bound is no estimate, and has no place in a band of intervals.
    exact = tuple(cost if cost.kind in ("interval", "point") else Cost(kind="none") for cost in costs)
    if all(cost.estimate is None for cost in exact):
        return None
    return Sweep(targets=tuple(targets.tolist()), costs=exact, n=len(left), n_baseline=len(right))


def _targets(left: Sequence[Curve], right: Sequence[Curve]) -> np.ndarray:
    """Return the losses of the baseline's mean curve within the common range: even in training."""
    curves = [curve for curve in (*left, *right) if len(curve.loss)]
    if len(curves) < len(left) + len(right):
        return np.empty(0)
    lowest = max(float(curve.loss.min()) for curve in curves)
    highest = min(float(curve.loss[0]) for curve in curves)
    along = np.minimum.accumulate(common_grid(right).mean)
    within = np.unique(along[(along >= lowest) & (along < highest)])[::-1]
    if len(within) > MOST_TARGETS:
        within = within[np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)]
    if len(within) and within[-1] > lowest:
        within = np.append(within, lowest)
    return within


def outcomes_at(curves: Sequence[Curve], target: float, rule: Rule) -> list[Outcome]:
    """Return how the runs, all of which have finished, stand to another target (nats per token)."""
    return [
        outcome(
            seed=curve.seed, state="finished", tokens=curve.tokens, loss=curve.loss, target=float(target),
            rule=rule, budget_tokens=float(curve.tokens[-1]),
        ).after(curve.origin)
        for curve in curves
    ]  # fmt: skip


def cost_growth(
    arm: Sequence[Curve],
    baseline: Sequence[Curve],
    target: float,
    *,
    rule: Rule = "confirmed",
    paired: bool = False,
    alpha: float = ALPHA,
    decay_begins: int | None = None,
) -> Cost:
    """Return by what share (1 + token cost) grows from half-way to the target (nats per token) on.

    Half-way is the loss that the baseline reaches, in the mean over its runs, after half of its tokens to
    target; the interval leaves out that this place comes from the baseline's runs. What each run's tokens
    grow by from there to the target is compared as tokens to target are.

    ``decay_begins``: the tokens after which the learning rate of either falls at the end.
    """
    left, right = ([curve for curve in curves if curve.end != "missing"] for curves in (arm, baseline))
    if any(curve.end == "diverged" for curve in (*left, *right)):
        return Cost(kind="none", reason="runs diverged")
    ends = [outcomes_at(curves, target, rule) for curves in (left, right)]
    origin = right[0].origin if right else 0
    if not all(ends) or not all(run.exact for side in ends for run in side):
        return Cost(kind="none", reason="not every run has reached the target")
    if decay_begins is not None and any(run.high + origin > decay_begins for side in ends for run in side):
        return Cost(kind="none", reason="the target was crossed while the learning rate fell")
    half = origin + 0.5 * (mean_tokens(ends[1]).estimate or 0.0)
    grid = common_grid(right)
    if not len(grid.tokens) or half < grid.tokens[0]:
        return Cost(kind="none", reason="no evaluation before half of the way")
    between = float(np.interp(half, grid.tokens, grid.mean))
    before = [outcomes_at(curves, between, rule) for curves in (left, right)]
    if not all(run.exact for side in before for run in side):
        return Cost(kind="none", reason="a run has no evaluation before half of the way")
    ratios = [
        [_grown(*pair) for pair in zip(earlier, later, strict=True)]
        for earlier, later in zip(before, ends, strict=True)
    ]
    return token_cost(ratios[0], ratios[1], paired=paired, alpha=alpha)


def _grown(earlier: Outcome, later: Outcome) -> Outcome:
    """Return an outcome whose "tokens" are those to the target over those half-way."""
    ratio = later.high / earlier.high
    return Outcome(seed=later.seed, end="hit", low=ratio, high=ratio)
