"""Token cost at other targets, because a single one can mislead.

Each target is read like the study's own, with its interval; neighbouring targets share their noise. If a run
of the baseline diverged there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablate.results.cost import Cost, token_costs
from ablate.results.losses import common_grids, with_result
from ablate.run.outcome import outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.intervals import Method
    from ablate.results.losses import Curve, Sides
    from ablate.run.outcome import Outcome, Rule

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
    sides: Mapping[str, Sides], own: float, method: Method, rule: Rule = "confirmed"
) -> dict[str, Moved]:
    """Compute each arm's token cost at losses of the baseline's mean curve and at the study's ``own`` target.

    A diverged run hits no target. An arm is left out if the baseline has no result beside it, or a diverged
    one.
    """
    compared = {}
    base: list[Curve] = []
    others: list[Curve] = []
    for arm, (curves, base_curves) in sides.items():
        base_ended = _ended(base_curves)
        if base_ended and all(curve.end != "diverged" for curve in base_ended):
            # The runs that diverged come last.
            ended = sorted(_ended(curves), key=lambda curve: curve.end == "diverged")
            compared[arm] = (ended, len(base_ended))
            others += ended
            # An arm is compared with all runs of the baseline, or with the first of them.
            base = max(base, base_ended, key=len)
    targets = _targets(base, others, own)
    if not targets:
        return {}
    base_ends = [_outcomes_at(curve, targets, rule) for curve in base]
    ends = {}
    for arm, (curves, count) in compared.items():
        if curves:
            runs = [_outcomes_at(curve, targets, rule) for curve in curves]
            sides_of_runs = (runs, base_ends[:count])
            ends[arm] = [tuple(zip(*side, strict=True)) for side in sides_of_runs]
    costs: dict[str, tuple[Cost, ...]] = dict.fromkeys(ends, ())
    for place in range(len(targets)):
        at_target = {}
        for arm, (runs_at, base_runs_at) in ends.items():
            at_target[arm] = (runs_at[place], base_runs_at[place])
        for arm, cost in token_costs(at_target, method).items():
            costs[arm] += (cost,)
    moved = {}
    for arm, (runs_at, base_runs_at) in ends.items():
        moved[arm] = Moved(
            targets=tuple(targets),
            costs=costs[arm],
            ends=runs_at,
            base_ends=base_runs_at,
        )
    return moved


def _ended(curves: Sequence[Curve]) -> list[Curve]:
    """Return the runs that diverged, or that have a result and evaluations."""
    return [
        curve
        for curve in with_result(curves)
        if curve.end == "diverged" or len(curve.loss)
    ]


def _outcomes_at(curve: Curve, targets: Sequence[float], rule: Rule) -> list[Outcome]:
    """Return how the run ends at each target."""
    if curve.end == "diverged":
        return [curve] * len(targets)
    ends = outcomes(
        seed=curve.seed,
        tokens=curve.tokens,
        loss=curve.loss,
        targets=targets,
        rule=rule,
        fit=curve.fit,
    )
    return [end.after(curve.origin) for end in ends]


def _targets(base: Sequence[Curve], others: Sequence[Curve], own: float) -> list[float]:
    """Choose losses of the baseline's mean curve, falling, evenly spaced over its evaluations.

    They range from the lowest first evaluation of all runs to the lowest loss that all runs of the baseline
    reach. Without a run of the baseline there are none.
    """
    if not base:
        return []
    along = np.unique(np.minimum.accumulate(common_grids(base)[0].mean))
    low = max(float(curve.loss.min()) for curve in base)
    high = min(float(curve.loss[0]) for curve in (*base, *others) if len(curve.loss))
    within = along[(along >= low) & (along < high)]
    if len(within) > MOST_TARGETS:
        within = within[
            np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)
        ]
    if low <= own < high:
        within = np.union1d(within, [own])
    targets: list[float] = within[::-1].tolist()
    return targets
