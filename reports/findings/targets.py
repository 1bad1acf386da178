"""Token cost at other targets, because a single one can mislead.

Each target is read like the study's own, with its interval; neighbouring targets share their noise. If a run
of the baseline diverged there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ablate.results.cost import Cost, token_costs
from ablate.results.losses import common_grids
from ablate.run.outcome import outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.intervals import Method
    from ablate.results.losses import Curve, Sides
    from ablate.run.outcome import Outcome, Rule

Arm = TypeVar("Arm")
MOST_TARGETS = 40


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One arm if another loss were the target: ``targets``: losses, falling, the same for all arms.

    At each target: ``costs`` has the token cost, ``ends`` how the arm's runs ended, ``base_ends`` how those
    of the baseline did.
    """

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    ends: tuple[tuple[Outcome, ...], ...]
    base_ends: tuple[tuple[Outcome, ...], ...]

    @property
    def sweep(self) -> tuple[tuple[float, Cost], ...] | None:
        """Targets with costs, from the first to the last that has an estimate; None without two of them."""
        pairs = tuple(zip(self.targets, self.costs, strict=True))
        exact = [i for i, (_, cost) in enumerate(pairs) if cost.estimate is not None]
        return pairs[exact[0] : exact[-1] + 1] if len(exact) > 1 else None


def move_target(
    sides: Mapping[Arm, Sides], own: float, how: Method, rule: Rule = "confirmed"
) -> dict[Arm, Moved]:
    """Compute each arm's token cost at losses of the baseline's mean curve and at the study's ``own`` target.

    A diverged run hits no target. An arm is left out if the baseline has no result beside it, or a diverged
    one.
    """
    whole = {}
    for arm, both in sides.items():
        left, right = (
            [one for one in side if one.end == "diverged" or (one.end != "missing" and len(one.loss))]
            for side in both
        )
        if right and all(curve.end != "diverged" for curve in right):
            whole[arm] = left, right
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
    ended = {}
    for arm, (left, right) in whole.items():
        mine = [ends(curve) for curve in left if curve.end != "diverged"]
        mine += [[curve] * len(targets) for curve in left if curve.end == "diverged"]
        if mine:
            ended[arm] = tuple(tuple(zip(*one, strict=True)) for one in (mine, base_ends[: len(right)]))
    costs = [
        token_costs({arm: (mine[i], theirs[i]) for arm, (mine, theirs) in ended.items()}, how)
        for i in range(len(targets))
    ]
    return {
        arm: Moved(
            targets=tuple(targets), costs=tuple(cost[arm] for cost in costs), ends=mine, base_ends=theirs
        )
        for arm, (mine, theirs) in ended.items()
    }


def _targets(base: Sequence[Curve], others: Sequence[Curve], own: float) -> list[float]:
    """Choose losses of the baseline's mean curve, falling, evenly spaced over its evaluations.

    They range from the lowest first evaluation of all runs to the lowest loss that all runs of the baseline
    reach.
    """
    along = np.unique(np.minimum.accumulate(common_grids(base)[0].mean))
    low = max(float(curve.loss.min()) for curve in base)
    high = min(float(curve.loss[0]) for curve in (*base, *others) if len(curve.loss))
    within = along[(along >= low) & (along < high)]
    if len(within) > MOST_TARGETS:
        within = within[np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)]
    if low <= own < high:
        within = np.union1d(within, [own])
    return [float(target) for target in within[::-1]]
