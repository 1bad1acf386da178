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
        exact = [
            place for place, cost in enumerate(self.costs) if cost.estimate is not None
        ]
        if len(exact) < 2:
            return None
        pairs = tuple(zip(self.targets, self.costs, strict=True))
        return pairs[exact[0] : exact[-1] + 1]


def move_target(
    sides: Mapping[str, Sides], own: float, method: Method, rule: Rule = "confirmed"
) -> dict[str, Moved]:
    """Compute each arm's token cost at losses of the baseline's mean curve and at the study's ``own`` target.

    A diverged run hits no target. An arm is left out if the baseline has no result beside it, or a diverged
    one.
    """
    compared = {}
    for arm, (curves, base_curves) in sides.items():
        base_ended = _ended(base_curves)
        if base_ended and all(curve.end != "diverged" for curve in base_ended):
            compared[arm] = (_ended(curves), base_ended)
    # An arm is compared with all runs of the baseline, or with the first of them.
    base = max((base_ended for _, base_ended in compared.values()), key=len, default=[])
    targets = _targets(
        base, [curve for curves, _ in compared.values() for curve in curves], own
    )
    if not targets:
        return {}
    base_outcomes = [_outcomes_at(curve, targets, rule) for curve in base]
    by_target = {}
    for arm, (curves, base_ended) in compared.items():
        # The runs that diverged come last.
        in_order = sorted(curves, key=lambda curve: curve.end == "diverged")
        if in_order:
            outcomes_of_runs = [
                _outcomes_at(curve, targets, rule) for curve in in_order
            ]
            by_target[arm] = (
                tuple(zip(*outcomes_of_runs, strict=True)),
                tuple(zip(*base_outcomes[: len(base_ended)], strict=True)),
            )
    costs: dict[str, list[Cost]] = {arm: [] for arm in by_target}
    for place in range(len(targets)):
        at_target = {
            arm: (ends[place], base_ends[place])
            for arm, (ends, base_ends) in by_target.items()
        }
        for arm, cost in token_costs(at_target, method).items():
            costs[arm].append(cost)
    return {
        arm: Moved(
            targets=tuple(targets),
            costs=tuple(costs[arm]),
            ends=ends,
            base_ends=base_ends,
        )
        for arm, (ends, base_ends) in by_target.items()
    }


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
    return [float(target) for target in within[::-1]]
