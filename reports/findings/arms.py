"""Each arm's runs, and what the arm costs over the baseline: in tokens, in loss, and when evaluated in bf16.

An arm's own evaluation includes both what it learnt worse and what its forward pass infers worse. The second
is the difference of the two evaluations within each run, which is free of the noise of the seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.findings.results import ArmResult, InBf16
from ablate.reports.findings.speed import read_configs
from ablate.reports.findings.targets import move_target
from ablate.results.claims import claims_together, p_values
from ablate.results.cost import is_settled, token_costs
from ablate.results.ends import origins, run_ends
from ablate.results.frames import BF16_LOSS
from ablate.results.intervals import Interval, change_interval, contrast
from ablate.results.losses import final_differences, final_loss, with_result
from ablate.results.stop_rule import level_of, method_of
from ablate.results.stops import decide_stops, is_unused
from ablate.run.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Method
    from ablate.store.plan_file import LockedPlan


def arm_runs(
    frames: StudyFrames, apart: Collection[str], origin: int
) -> dict[str, ArmResult]:
    """Collect the runs of every arm, counted from ``origin``, in the order of the plan.

    ``apart``: the runs that do not count as results. The arms have no figures yet.
    """
    plan = frames.plan
    runs: dict[str, list[RunResult]] = {arm.name: [] for arm in plan.arms}
    for run in run_ends(frames, apart, origin):
        runs[run.arm].append(run)
    counted_here = {
        name: runs[name]
        for name in runs
        if name in origins(plan)[origin] | {plan.baseline}
    }
    stops = decide_stops(plan, counted_here, origin).stopped
    configs = read_configs(frames.configs)
    arms = {}
    for arm in plan.arms:
        stop = stops.get(arm.name)
        for place, run in enumerate(runs[arm.name]):
            if is_unused(place, run, stop):
                unused = Outcome(seed=run.seed, end="unused")
                runs[arm.name][place] = replace(run, **vars(unused))
        arms[arm.name] = ArmResult(
            planned=arm,
            runs=tuple(runs[arm.name]),
            config=configs.get(arm.name),
            alpha=level_of(plan.stop),
            stopped=stop,
            counted_from=origin,
        )
    return arms


def against(
    base: ArmResult, arms: Mapping[str, ArmResult], plan: LockedPlan
) -> dict[str, ArmResult]:
    """Add to the other arms their token cost and loss difference over ``base``.

    Over as many seeds as count on both sides. An arm that was stopped
    at a look has the interval of that look: from the first runs of all arms that reached the look, which
    moderate each other.
    """
    method = method_of(plan, base.counted_from)
    # None: all of them.
    seeds: dict[str, int | None] = {}
    for name, arm in arms.items():
        if arm is not base:
            seeds[name] = min(filter(None, (arm.seeds, base.seeds)), default=None)
    compared = {}
    for look in dict.fromkeys(seeds.values()):
        sides = {}
        for name, count in seeds.items():
            arm = arms[name]
            if look is None or look == count:
                sides[name] = (arm.used[:count], base.used[:count])
            # It was not stopped before this look, and each of its runs at it has a result.
            elif (arm.seeds or look) >= look == len(with_result(arm.used[:look])):
                sides[name] = (arm.used[:look], base.used[:look])
        costs = token_costs(sides, method)
        differences = final_differences(sides, method)
        for name, count in seeds.items():
            if count != look:
                continue
            arm = arms[name]
            cost = replace(costs[name], counted_from=base.counted_from)
            # The runs that ended before a divergence stopped the arm are a selection.
            if arm.stopped_by_divergence or base.stopped_by_divergence:
                cost = replace(cost, restricted=None, cut_figure=None)
            compared[name] = replace(arm, token_cost=cost, difference=differences[name])
    return compared


def compare_arms(
    arms: Mapping[str, ArmResult], by_bf16: Mapping[str, RunResult], plan: LockedPlan
) -> dict[str, ArmResult]:
    """Add to arms counted from one place their comparison with the baseline, which is left out.

    ``by_bf16``: from ``bf16_ends``.
    """
    base = arms[plan.baseline]
    compared = against(base, arms, plan)
    in_bf16 = _evaluate_in_bf16(base, compared, by_bf16, plan)
    moved = {}
    if plan.target is not None:
        sides = {}
        for name, arm in compared.items():
            sides[name] = (arm.used, base.used[: arm.seeds])
        method = method_of(plan, base.counted_from)
        moved = move_target(sides, plan.target.val_loss, method, plan.target.crossing)
    for name, arm in compared.items():
        compared[name] = replace(arm, moved=moved.get(name), in_bf16=in_bf16.get(name))
    return compared


def add_claims(arms: Mapping[str, ArmResult], plan: LockedPlan) -> dict[str, ArmResult]:
    """Add what can be stated of each arm beside the same statements on all others.

    Without a target it is on the final loss. The baseline itself and once more are left as they are.
    """
    p_of_arms = {}
    for name, arm in arms.items():
        if name != plan.baseline and not arm.planned.again:
            cost = arm.token_cost
            loss = arm.difference.figure
            if plan.target is None:
                cost = replace(cost, figure=loss)
            p_of_arms[name] = p_values(cost, loss, plan.margin)
    claims_of_arms = claims_together(p_of_arms, partial(level_of, plan.stop))
    with_claims = dict(arms)
    for name, claims in claims_of_arms.items():
        standing = next(iter(claims - {"differs"}), "open") if plan.margin else None
        with_claims[name] = replace(arms[name], claims=claims, standing=standing)
    return with_claims


def bf16_ends(
    frames: StudyFrames, apart: Collection[str], origin: int
) -> dict[str, RunResult]:
    """Map run ids to how each run has ended by its evaluations in bf16; empty without any."""
    if BF16_LOSS not in frames.evals:
        return {}
    evals = frames.evals.dropna(subset=[BF16_LOSS])
    by_bf16 = replace(frames, evals=evals.assign(val_loss=evals[BF16_LOSS]))
    return {
        run.run_id: run for run in run_ends(by_bf16, apart, origin) if len(run.tokens)
    }


def _evaluate_in_bf16(
    base: ArmResult,
    arms: Mapping[str, ArmResult],
    by_bf16: Mapping[str, RunResult],
    plan: LockedPlan,
) -> dict[str, InBf16]:
    """Compare arms with the baseline by their evaluations in bf16; arms without any are left out.

    ``arms``: compared by their own evaluation.
    """
    with_bf16 = {}
    for arm in (base, *arms.values()):
        ends = tuple(by_bf16[run.run_id] for run in arm.used if run.run_id in by_bf16)
        if ends:
            with_bf16[arm.name] = replace(arm, runs=ends)
    if base.name not in with_bf16:
        return {}
    compared = against(with_bf16[base.name], with_bf16, plan)
    method = method_of(plan, base.counted_from)
    sides = {}
    gaps = {}
    for name in compared:
        runs = arms[name].used
        base_runs = base.used[: arms[name].seeds]
        sides[name] = (runs, base_runs)
        gaps[name] = (_gaps(runs, by_bf16), _gaps(base_runs, by_bf16))
    differences = final_differences(gaps, replace(method, moderated=False))
    results = {}
    for name, both in sides.items():
        tokens = _tokens_alone(both, by_bf16, method)
        cost = arms[name].token_cost
        share = None
        if cost.figure is not None and tokens.estimate is not None and is_settled(cost):
            share = math.log1p(tokens.estimate) / cost.figure.value
        results[name] = InBf16(
            token_cost=compared[name].token_cost,
            tokens_alone=tokens,
            share=share,
            final_loss=final_loss(compared[name].used, method.alpha),
            difference=compared[name].difference,
            loss_alone=differences[name],
        )
    return results


def _gaps(
    runs: Sequence[RunResult], by_bf16: Mapping[str, RunResult]
) -> list[RunResult]:
    """Return each run's loss by its own evaluation minus the loss in bf16, as curves."""
    gaps = []
    for run in runs:
        if run.run_id in by_bf16:
            in_bf16 = by_bf16[run.run_id]
            places = np.searchsorted(run.tokens, in_bf16.tokens)
            gaps.append(replace(in_bf16, loss=run.loss[places] - in_bf16.loss))
    return gaps


def _tokens_alone(
    sides: Sequence[Sequence[RunResult]],
    by_bf16: Mapping[str, RunResult],
    method: Method,
) -> Interval:
    """Compute (1 + cost by the arm's own evaluation) / (1 + cost by bf16) − 1."""
    logs = []
    for runs in sides:
        gaps = []
        for run in with_result(runs):
            in_bf16 = by_bf16.get(run.run_id)
            if in_bf16 is None:
                continue
            if not (run.exact and in_bf16.exact):
                return Interval(
                    note="not every run reached the target by both evaluations"
                )
            gaps.append((run.seed, math.log(run.high) - math.log(in_bf16.high)))
        if not gaps:
            return Interval(note="no results")
        logs.append(gaps)
    return change_interval(contrast(*logs, paired=method.paired).estimate, method.alpha)
