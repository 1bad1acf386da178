"""Each arm's runs, and what the arm costs over the baseline: in tokens, in loss, and when evaluated in bf16.

An arm's own evaluation includes both what it learnt worse and what its forward pass infers worse. The second
is the difference of the two evaluations within each run, which is free of the noise of the seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.findings.results import ArmResult, InBf16
from ablate.reports.findings.speed import read_configs
from ablate.reports.findings.targets import move_target
from ablate.results.cost import is_settled, token_costs
from ablate.results.ends import origins, run_ends
from ablate.results.intervals import Interval, contrast, exponential, t_interval
from ablate.results.losses import final_differences, final_loss
from ablate.results.stop_rule import method_of
from ablate.results.stops import decide_stops, is_unused
from ablate.run.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Method
    from ablate.store.plan_file import LockedPlan

SECOND = "val_loss_bf16"
"""The column of the evaluations in bf16."""


def arm_runs(frames: StudyFrames, apart: Collection[str], origin: int) -> dict[str, ArmResult]:
    """Collect the runs of every arm, counted from ``origin``, in the order of the plan.

    ``apart``: the runs that do not count as results. The arms have no figures yet.
    """
    plan = frames.plan
    runs: dict[str, list[RunResult]] = {arm.name: [] for arm in plan.arms}
    for run in run_ends(frames, apart, origin):
        runs[run.arm].append(run)
    here = {plan.baseline, *origins(plan)[origin]}
    stops = decide_stops(plan, {arm: own for arm, own in runs.items() if arm in here}, origin).stopped
    configs = read_configs(frames.configs)
    arms = {}
    for entry in plan.arms:
        stop, own = stops.get(entry.name), runs[entry.name]
        arms[entry.name] = ArmResult(
            planned=entry,
            runs=tuple(
                replace(run, **vars(Outcome(seed=run.seed, end="unused"))) if is_unused(i, run, stop) else run
                for i, run in enumerate(own)
            ),
            config=configs.get(entry.name),
            alpha=method_of(plan).alpha,
            stopped=stop,
            counted_from=origin,
        )
    return arms


def against(base: ArmResult, arms: Mapping[str, ArmResult], plan: LockedPlan) -> dict[str, ArmResult]:
    """Add to the other arms their token cost and loss difference over ``base``.

    Over as many seeds as count on both sides. An arm that was stopped
    at a look has the interval of that look: from the first runs of all arms that reached the look, which
    moderate each other.
    """
    how = method_of(plan, base.counted_from)
    counts = {
        name: min((one.seeds for one in (arm, base) if one.seeds is not None), default=None)
        for name, arm in arms.items()
        if arm is not base
    }

    def went_on(arm: ArmResult, n: int) -> bool:
        ends = [run.end for run in arm.used[:n]]
        return (arm.seeds or n) >= n == len(ends) and "missing" not in ends

    found = {}
    for n in dict.fromkeys(counts.values()):
        pool = {
            name: count if n is None else n
            for name, count in counts.items()
            if n in (None, count) or went_on(arms[name], n)
        }
        sides = {name: (arms[name].used[:m], base.used[:m]) for name, m in pool.items()}
        costs, differences = token_costs(sides, how), final_differences(sides, how)
        for name in (name for name, count in counts.items() if count == n):
            cost = replace(costs[name], counted_from=base.counted_from)
            # The runs that ended before a divergence stopped the arm are a selection.
            if any(one.stopped and one.stopped.kind == "diverged" for one in (arms[name], base)):
                cost = replace(cost, restricted=None)
            found[name] = replace(arms[name], token_cost=cost, difference=differences[name])
    return found


def compare_arms(
    arms: Mapping[str, ArmResult], second: Mapping[str, RunResult], plan: LockedPlan
) -> dict[str, ArmResult]:
    """Add to arms counted from one place their comparison with the baseline, which is left out.

    ``second``: from ``second_ends``.
    """
    base = arms[plan.baseline]
    found = against(base, arms, plan)
    in_bf16 = _evaluate_in_bf16(base, found, second, plan)
    moved = {}
    if plan.target is not None:
        moved = move_target(
            {name: (arm.used, base.used[: arm.seeds]) for name, arm in found.items()},
            plan.target.val_loss,
            method_of(plan, base.counted_from),
            plan.target.crossing,
        )
    return {
        name: replace(arm, moved=moved.get(name), in_bf16=in_bf16.get(name)) for name, arm in found.items()
    }


def second_ends(frames: StudyFrames, apart: Collection[str], origin: int) -> dict[str, RunResult]:
    """Map run ids to how each run has ended by its evaluations in bf16; empty without any."""
    if SECOND not in frames.evals:
        return {}
    evals = frames.evals.dropna(subset=[SECOND])
    found = run_ends(replace(frames, evals=evals.assign(val_loss=evals[SECOND])), apart, origin)
    return {run.run_id: run for run in found if len(run.tokens)}


def _evaluate_in_bf16(
    base: ArmResult, arms: Mapping[str, ArmResult], second: Mapping[str, RunResult], plan: LockedPlan
) -> dict[str, InBf16]:
    """Compare arms with the baseline by their evaluations in bf16; arms without any are left out.

    ``arms``: compared by their own evaluation.
    """
    by_bf16 = {
        name: replace(arm, runs=tuple(second[run.run_id] for run in arm.used if run.run_id in second))
        for name, arm in {base.name: base, **arms}.items()
    }
    by_bf16 = {name: arm for name, arm in by_bf16.items() if arm.runs}
    if base.name not in by_bf16:
        return {}
    by_bf16 = against(by_bf16[base.name], by_bf16, plan)
    how = method_of(plan, base.counted_from)
    sides = {name: (arms[name].used, base.used[: arms[name].seeds]) for name in by_bf16}
    alone = final_differences(
        {name: (_gaps(own, second), _gaps(other, second)) for name, (own, other) in sides.items()},
        replace(how, moderated=False),
    )
    found = {}
    for name, both in sides.items():
        tokens = _tokens_alone(both, second, how)
        cost, share = arms[name].token_cost, None
        if cost.figure is not None and tokens.estimate is not None and is_settled(cost):
            share = math.log1p(tokens.estimate) / cost.figure.value
        found[name] = InBf16(
            token_cost=by_bf16[name].token_cost,
            tokens_alone=tokens,
            share=share,
            final_loss=final_loss(by_bf16[name].used, how.alpha),
            difference=by_bf16[name].difference,
            loss_alone=alone[name],
        )
    return found


def _gaps(runs: Sequence[RunResult], second: Mapping[str, RunResult]) -> list[RunResult]:
    """Return each run's loss by its own evaluation minus the loss in bf16, as curves."""
    found = []
    for run in runs:
        if (other := second.get(run.run_id)) is not None:
            there = np.searchsorted(run.tokens, other.tokens)
            found.append(replace(other, loss=run.loss[there] - other.loss))
    return found


def _tokens_alone(
    sides: Sequence[Sequence[RunResult]], second: Mapping[str, RunResult], how: Method
) -> Interval:
    """Compute (1 + cost by the arm's own evaluation) / (1 + cost by bf16) − 1."""
    logs = []
    for runs in sides:
        pairs = [(run, second[run.run_id]) for run in runs if run.run_id in second and run.end != "missing"]
        if not pairs:
            return Interval(note="no results")
        if not all(own.exact and other.exact for own, other in pairs):
            return Interval(note="not every run reached the target by both evaluations")
        logs.append([(own.seed, math.log(own.high) - math.log(other.high)) for own, other in pairs])
    return exponential(t_interval(contrast(*logs, paired=how.paired).estimate, how.alpha), minus=1.0)
