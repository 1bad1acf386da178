"""Each arm against the baseline: token cost, loss difference, and how the cost goes with the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.reports.findings.arm_runs import costs_over, differences_over
from ablate.reports.findings.evaluation import evaluate_in_bf16
from ablate.reports.statistics.sweep import Moved, cost_growths, move_target
from ablate.results.cost import Cost
from ablate.results.ends import is_paired
from ablate.results.losses import LossDifference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.findings.arm_runs import ArmRuns
    from ablate.reports.findings.results import InBf16
    from ablate.results.losses import Curve
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan


@dataclass(frozen=True, kw_only=True)
class Against:
    """An arm against the baseline: what takes the other arms' runs, too."""

    cost: Cost
    difference: LossDifference
    moved: Moved | None
    growth: Cost
    in_bf16: InBf16 | None = None


BASELINE = Against(
    cost=Cost(kind="baseline"),
    difference=LossDifference(note="baseline"),
    moved=None,
    growth=Cost(kind="baseline"),
)


def compare_arms(
    runs: Mapping[str, ArmRuns],
    second: Mapping[str, tuple[Outcome, Curve]],
    plan: LockedPlan,
    origin: int,
) -> dict[str, Against]:
    """Compare arms counted from one place with the baseline.

    ``second``: how the runs have ended by their evaluations in bf16, where they have those.
    """
    base = runs[plan.baseline]
    others = {name: own for name, own in runs.items() if own is not base}
    alphas = {name: own.alpha for name, own in others.items()}
    how = {"paired": is_paired(plan, origin), "moderated": plan.is_moderated}
    costs = costs_over(plan.baseline, runs, plan, origin)
    differences = differences_over(plan.baseline, runs, plan, origin)
    in_bf16 = evaluate_in_bf16(runs, second, costs, plan, origin)
    sides = {name: (own.curves, base.first(own.seeds).curves) for name, own in others.items()}
    moved: dict[str, Moved] = {}
    growths: dict[str, Cost] = {}
    if (target := plan.target) is not None:
        lost = {name: [run for run in own.outcomes if run.end == "diverged"] for name, own in others.items()}
        moved = move_target(sides, alphas, target.val_loss, lost=lost, rule=target.crossing, **how)
        complete = {name: side for name, side in sides.items() if not others[name].is_selected}
        falls = {
            name: min((at for one in (own, base) if (at := one.decay_begins) is not None), default=None)
            for name, own in others.items()
        }
        growths = cost_growths(
            complete, alphas, target.val_loss, decay_begins=falls, rule=target.crossing, **how
        )
    return {
        name: Against(
            cost=costs[name],
            difference=differences[name],
            moved=moved.get(name),
            growth=growths.get(name, Cost(kind="none")),
            in_bf16=in_bf16.get(name),
        )
        for name in others
    }
