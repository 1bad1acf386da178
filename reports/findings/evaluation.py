"""What an arm costs when it is evaluated in bf16, and what of its cost is evaluation alone.

By its own evaluation an arm pays for what it learnt worse and for what its forward pass infers worse. The
second is the difference of the two evaluations within each run, so that the noise of its seed is not in it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.findings.arm_runs import costs_over, differences_over
from ablate.reports.findings.results import InBf16
from ablate.results.contrasts import contrasts
from ablate.results.cost import is_settled
from ablate.results.ends import is_paired, run_ends
from ablate.results.intervals import Interval, exponential, t_interval
from ablate.results.losses import final_differences, final_loss

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ablate.reports.findings.arm_runs import ArmRuns
    from ablate.results.cost import Cost
    from ablate.results.frames import StudyFrames
    from ablate.results.losses import Curve
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan

SECOND = "val_loss_bf16"
"""The column of the evaluations in bf16."""


def second_ends(frames: StudyFrames, apart: Collection[str], origin: int) -> dict[str, tuple[Outcome, Curve]]:
    """Return by run id how each run has ended by its evaluations in bf16; empty where there are none."""
    if SECOND not in frames.evals:
        return {}
    evals = frames.evals.dropna(subset=[SECOND])
    evals = evals.assign(val_loss=evals[SECOND])
    found = run_ends(replace(frames, evals=evals), apart, origin)
    return {curve.run_id: (end, curve) for _, curve, end in found if len(curve.tokens)}


def evaluate_in_bf16(
    runs: Mapping[str, ArmRuns],
    ends: Mapping[str, tuple[Outcome, Curve]],
    own_costs: Mapping[str, Cost],
    plan: LockedPlan,
    origin: int,
) -> dict[str, InBf16]:
    """Compare arms counted from one place with the baseline by their evaluations in bf16.

    ``ends``: of ``second_ends``; ``own_costs``: by the arms' own evaluation. Arms without evaluations in bf16
    are left out, and all are where the baseline has none.
    """
    second = {name: _in_bf16(own, ends) for name, own in runs.items()}
    second = {name: own for name, own in second.items() if own.curves}
    if plan.baseline not in second:
        return {}
    own_base = runs[plan.baseline]
    others = [name for name in second if name != plan.baseline]
    costs = costs_over(plan.baseline, second, plan, origin)
    alphas = {name: second[name].alpha for name in others}
    paired = is_paired(plan, origin)
    differences = differences_over(plan.baseline, second, plan, origin)
    gaps = {name: (_gaps(runs[name], ends), _gaps(own_base.first(runs[name].seeds), ends)) for name in others}
    alone = final_differences(gaps, alphas, paired=paired, moderated=False)
    return {
        name: InBf16(
            token_cost=costs[name],
            tokens_alone=(tokens := _tokens_alone(runs[name], own_base, ends, paired=paired)),
            share=_share(own_costs[name], tokens),
            final_loss=final_loss(second[name].curves, alphas[name]),
            difference=differences[name],
            loss_alone=alone[name],
        )
        for name in others
    }


def _in_bf16(own: ArmRuns, ends: Mapping[str, tuple[Outcome, Curve]]) -> ArmRuns:
    """Return the runs of an arm that count, with their ends by the evaluations in bf16."""
    found = [ends[run_id] for run_id in own.used_ids if run_id in ends]
    return replace(own, outcomes=[end for end, _ in found], curves=[curve for _, curve in found])


def _gaps(own: ArmRuns, ends: Mapping[str, tuple[Outcome, Curve]]) -> list[Curve]:
    """Return by how much each run's loss is higher by its own evaluation than by the one in bf16."""
    found = []
    for curve in own.curves:
        if curve.run_id in ends:
            second = ends[curve.run_id][1]
            there = np.searchsorted(curve.tokens, second.tokens)
            found.append(replace(second, loss=curve.loss[there] - second.loss, fit=None))
    return found


def _tokens_alone(
    own: ArmRuns, base: ArmRuns, ends: Mapping[str, tuple[Outcome, Curve]], *, paired: bool
) -> Interval:
    """Return how many more tokens the target takes by the arm's own evaluation, over the baseline's."""
    sides = []
    for runs in (own, base.first(own.seeds)):
        pairs = [
            (outcome, ends[run_id][0])
            for run_id, outcome in zip(runs.used_ids, runs.outcomes, strict=True)
            if run_id in ends and outcome.end != "missing"
        ]
        if not pairs:
            return Interval(note="no results")
        if not all(one.exact and other.exact for one, other in pairs):
            return Interval(note="not every run reached the target by both evaluations")
        sides.append([(one.seed, math.log(one.high) - math.log(other.high)) for one, other in pairs])
    compared = contrasts({"": (sides[0], sides[1])}, paired=paired, moderated=False)[""]
    return exponential(t_interval(compared.estimate, own.alpha), minus=1.0)


def _share(cost: Cost, alone: Interval) -> float | None:
    if cost.log_ratio is None or alone.estimate is None or not is_settled(cost):
        return None
    return math.log1p(alone.estimate) / cost.log_ratio.value
