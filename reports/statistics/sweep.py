"""Token cost as a function of the target, because one target can mislead.

Over the losses that every run of both arms passes on its way: from the lowest that all reach down to, up to
the lowest first evaluation. Each target is read as the study's own is, with its interval; the band is
pointwise and neighbouring targets share their noise.

How it fails: it does not raise. Where a run diverged, or the ranges do not overlap, there is no sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.cost import Cost, token_cost
from ablate.reports.statistics.intervals import ALPHA
from ablate.reports.statistics.losses import common_grid
from ablate.run.outcome import outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.statistics.losses import Curve
    from ablate.run.outcome import Outcome, Rule

MOST_TARGETS = 40


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Token cost at each target (validation loss in nats per token, falling); None where there is none."""

    targets: tuple[float, ...]
    cost: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
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
    """Return the token cost over the range of targets that both arms cover; None where there is none."""
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
    exact = [cost if cost.kind in ("interval", "point") else Cost(kind="none") for cost in costs]
    if all(cost.estimate is None for cost in exact):
        return None
    return Sweep(
        targets=tuple(targets.tolist()),
        cost=tuple(cost.estimate for cost in exact),
        low=tuple(cost.low for cost in exact),
        high=tuple(cost.high for cost in exact),
        n=len(left),
        n_baseline=len(right),
    )


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
        )
        for curve in curves
    ]  # fmt: skip
