"""Runs against targets: the share that has reached the study's own target, and token cost at other targets.

*Reached* is Kaplan and Meier's estimate. Its band uses Greenwood's variance on the log-log scale (Kalbfleisch
and Prentice), so that it stays between 0 and 1. A censored run leaves at its last evaluation. A diverged run
never reaches the target: it stays at risk to the end.

*Other targets*, because a single one can mislead: each is read like the study's own, with its interval;
neighbouring targets share their noise. If a run of the baseline diverged there are none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from scipy.special import ndtri

from ablate.results.cost import Cost, token_costs
from ablate.results.intervals import ALPHA
from ablate.results.losses import common_grid
from ablate.run.outcome import outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.losses import Curve, Sides
    from ablate.run.outcome import Outcome, Rule

Arm = TypeVar("Arm")
MOST_TARGETS = 40


@dataclass(frozen=True, kw_only=True)
class Reached:
    """The share of runs that has reached the target: from ``tokens[i]`` on it is ``share[i]``.

    ``low`` and ``high`` bound it, None without a variance. ``end``: the tokens of the last observation.
    """

    tokens: tuple[float, ...]
    share: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    end: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Token cost at each target (validation loss in nats per token, falling), without bounds."""

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    n: int
    n_baseline: int


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One arm if another loss were the target: ``targets`` in nats per token, falling, the same for all arms.

    At each target: ``costs`` has the token cost, ``ends`` how the arm's runs ended, ``base_ends`` how those
    of the baseline did.
    """

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    ends: tuple[tuple[Outcome, ...], ...]
    base_ends: tuple[tuple[Outcome, ...], ...]

    @property
    def sweep(self) -> Sweep | None:
        """From the first to the last target with an estimate; None without two of them."""
        exact = [i for i, cost in enumerate(self.costs) if cost.estimate is not None]
        if len(exact) < 2:
            return None
        inside = slice(exact[0], exact[-1] + 1)
        return Sweep(
            targets=self.targets[inside],
            # A bound is no estimate and does not belong in a band of intervals.
            costs=tuple(
                cost if cost.estimate is not None else Cost(kind="none") for cost in self.costs[inside]
            ),
            n=len(self.ends[exact[0]]),
            n_baseline=len(self.base_ends[exact[0]]),
        )


def reached(results: Sequence[Outcome], alpha: float = ALPHA) -> Reached | None:
    """Compute the Kaplan–Meier curve of an arm's results; None without any."""
    runs = [run for run in results if run.end != "missing"]
    if not runs:
        return None
    # The tokens at which a run reached the target or was last observed.
    last = [math.inf if run.end == "diverged" else run.high if run.end == "hit" else run.low for run in runs]
    end = max([at for at in last if at < math.inf] or [run.low for run in runs])
    survival, variance = 1.0, 0.0
    steps: list[tuple[float, float, float | None, float | None]] = [(0.0, 0.0, None, None)]
    for time in sorted({run.high for run in runs if run.end == "hit"}):
        at_risk = sum(at >= time for at in last)
        events = sum(run.end == "hit" and run.high == time for run in runs)
        survival *= 1 - events / at_risk
        low = high = None
        if at_risk > events:
            variance += events / (at_risk * (at_risk - events))
            width = -float(ndtri(alpha / 2)) * math.sqrt(variance) / abs(math.log(survival))
            low, high = 1 - survival ** math.exp(-width), 1 - survival ** math.exp(width)
        steps.append((time, 1 - survival, low, high))
    tokens, share, lows, highs = zip(*steps, strict=True)
    return Reached(tokens=tokens, share=share, low=lows, high=highs, end=end, n=len(runs))


def move_target(
    sides: Mapping[Arm, Sides],
    alphas: Mapping[Arm, float],
    own: float | None = None,
    *,
    lost: Mapping[Arm, Sequence[Outcome]] | None = None,
    rule: Rule = "confirmed",
    paired: bool = False,
    moderated: bool = True,
) -> dict[Arm, Moved]:
    """Compute each arm's token cost at losses of the baseline's mean curve and at the study's ``own`` target.

    ``lost``: the outcomes of diverged runs, which hit no target. An arm is left out if the baseline has no
    result beside it, or a diverged one.
    """
    whole = {arm: (_with_loss(left), _with_loss(right)) for arm, (left, right) in sides.items()}
    whole = {
        arm: (left, right)
        for arm, (left, right) in whole.items()
        if right and all(curve.end != "diverged" for curve in right)
    }
    # An arm is compared with all runs of the baseline, or with the first of them.
    most = max((right for _, right in whole.values()), key=len, default=[])
    targets = _targets(most, [curve for left, _ in whole.values() for curve in left], own) if most else []
    if not targets:
        return {}

    def ends(curve: Curve) -> list[Outcome]:
        found = outcomes(
            seed=curve.seed, tokens=curve.tokens, loss=curve.loss, targets=targets, rule=rule, fit=curve.fit
        )
        return [run.after(curve.origin) for run in found]

    base_ends = [ends(curve) for curve in most]
    # By target, then by run.
    both = {}
    for arm, (left, right) in whole.items():
        mine = [ends(curve) for curve in left if curve.end != "diverged"]
        mine += [[run] * len(targets) for run in (lost or {}).get(arm, ())]
        if mine:
            both[arm] = tuple(tuple(zip(*one, strict=True)) for one in (mine, base_ends[: len(right)]))
    costs = [
        token_costs(
            {arm: (mine[i], theirs[i]) for arm, (mine, theirs) in both.items()},
            paired=paired,
            alpha=alphas,
            moderated=moderated,
        )
        for i in range(len(targets))
    ]
    return {
        arm: Moved(
            targets=tuple(targets), costs=tuple(cost[arm] for cost in costs), ends=mine, base_ends=theirs
        )
        for arm, (mine, theirs) in both.items()
    }


def _with_loss(curves: Sequence[Curve]) -> list[Curve]:
    return [
        curve for curve in curves if curve.end == "diverged" or (curve.end != "missing" and len(curve.loss))
    ]


def _targets(base: Sequence[Curve], others: Sequence[Curve], own: float | None) -> list[float]:
    """Choose losses of the baseline's mean curve, falling, evenly spaced over its evaluations.

    They range from the lowest first evaluation of all runs to the lowest loss that all runs of the baseline
    reach.
    """
    along = np.unique(np.minimum.accumulate(common_grid(base).mean))
    low = max(float(curve.loss.min()) for curve in base)
    high = min(float(curve.loss[0]) for curve in (*base, *others) if len(curve.loss))
    within = along[(along >= low) & (along < high)]
    if len(within) > MOST_TARGETS:
        within = within[np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)]
    if own is not None and low <= own < high:
        within = np.union1d(within, [own])
    return [float(target) for target in within[::-1]]
