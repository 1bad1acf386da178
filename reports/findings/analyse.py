"""Frames → every number of the report, as plain frozen data. Pure: no files, no pictures, no clock.

Runs of an arm that was stopped early are left out here, before anything is compared; see ``stopping``.

How it fails: it does not raise on a study that is only half there. Runs that are no results are counted as
missing, figures that cannot be had are None with a note, and what a reader must know is in ``warnings``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.findings import speed
from ablate.reports.findings.arm_runs import ArmRuns, arm_runs, costs_over
from ablate.reports.findings.evaluation import second_ends
from ablate.reports.findings.matrix import find_matrices
from ablate.reports.findings.published import published_for
from ablate.reports.findings.results import Analysis, ArmResult, Measured, Resolution, RunResult
from ablate.reports.findings.timing import judge_throughput, timing_of_runs
from ablate.reports.findings.tuning import pending, rate_curves, tuned
from ablate.reports.findings.versus_baseline import BASELINE, Against, compare_arms
from ablate.reports.statistics.effects import Effects, factor_effects
from ablate.reports.statistics.power import power_of
from ablate.reports.statistics.steps import find_steps
from ablate.reports.statistics.survival import common_horizon, reached, restricted_mean
from ablate.results.cost import NEAR_BUDGET, Cost, asked, log_tokens, mean_tokens, standing
from ablate.results.ends import is_paired, number_in, origins, split_frames
from ablate.results.intervals import ALPHA, Interval
from ablate.results.losses import (
    Curve,
    final_loss,
    tokens_behind,
)
from ablate.results.pooling import find_set_apart
from ablate.results.stop_rule import alpha_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ablate.reports.findings.timing import RunTiming, Throughput
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedArm, LockedPlan, Margin
    from ablate.store.records import Environment


NO_TARGET = "no target was given"
_OF_THE_RUN = (
    "backend", "backend_mode", "backend_detail", "backend_choices", "self_tests", "timing_valid",
    "timing_why_not", "gpu_uuid",
)  # fmt: skip


def analyse(frames: StudyFrames, *, waive: Collection[str] = ()) -> Analysis:
    """Compute every number of the report.

    ``waive`` names settings (``comparable.SETTINGS``) in which runs may differ and are pooled all the same,
    besides those that the study waives. Of a study whose arms were tuned: at the values found for them.
    """
    if (parts := split_frames(frames)) is not None:
        at_shared, at_tuned = (_analyse(part, waive) for part in parts)
        return replace(at_tuned, tuning=tuned(frames.plan, at_shared, at_tuned))
    return replace(_analyse(frames, waive), tuning=pending(frames.plan))


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What all arms of one comparison are judged by. ``horizon``: tokens, None without a result."""

    plan: LockedPlan
    timing: RunTiming
    throughput: Throughput | None
    horizon: float | None


def _analyse(frames: StudyFrames, waive: Collection[str]) -> Analysis:
    """Compute every number of one comparison."""
    plan = frames.plan
    waived = tuple(sorted({*waive, *plan.waive}))
    set_apart = find_set_apart(frames, waived)
    apart = {found.run for found in set_apart}
    by_origin = {origin: arm_runs(frames, apart, origin) for origin in origins(plan)}
    runs, bases = {}, {}
    for arm in plan.arms:
        found = by_origin[plan.counted_from(arm.name)]
        own, bases[arm.name] = found[arm.name], found[plan.baseline]
        if arm.name == plan.baseline:
            bases[arm.name] = own
        runs[arm.name] = replace(own, alpha=_alpha(own, bases[arm.name], plan))
    base = runs[plan.baseline]
    setting = _Setting(
        plan=plan,
        timing=timing_of_runs(frames.environments, frames.attempts, plan),
        throughput=judge_throughput(frames, left_out=apart, waived=waived),
        horizon=None if plan.target is None else common_horizon(own.whole for own in runs.values()),
    )
    bases[plan.baseline] = base
    # Arms that fork are compared with the baseline from there on, and with each other where they share it.
    groups: dict[int, dict[str, ArmRuns]] = {}
    for name, own in runs.items():
        groups.setdefault(own.origin, {plan.baseline: bases[name]})[name] = own
    against: dict[str, Against] = {}
    second = {origin: second_ends(frames, apart, origin) for origin in {0, *groups}}
    for origin, group in groups.items():
        against |= compare_arms(group, second[origin], plan, origin)
    between = cache(lambda first, origin: costs_over(first, groups[origin], plan, origin))
    arms = tuple(
        _arm_result(entry, runs[entry.name], bases[entry.name], setting, against.get(entry.name))
        for entry in plan.arms
    )
    curves = tuple(curve for own in by_origin[0].values() for curve in own.curves)
    ended = [value for row in frames.runs["ended_unix"] if (value := number_in(row)) is not None]
    token_effects, loss_effects = _effects(plan, runs)
    once = {
        # The baseline's second arm would make each of its cells and steps once more.
        arm.name: frames.configs[arm.name]
        for arm in plan.arms
        if arm.name in frames.configs and not arm.again
    }
    return Analysis(
        plan=plan,
        arms=arms,
        matrices=find_matrices(once, free=plan.tuning.fields if plan.tuning else ()),
        steps=find_steps(
            once,
            # Of one configuration but for a GEMM, so also of one fork.
            lambda first, second: between(first, runs[second].origin)[second],
        ),
        rate_curves=rate_curves(arms, frames.configs, plan.baseline),
        resolution=_resolution(runs.values(), base.outcomes),
        timing=setting.timing,
        throughput=setting.throughput,
        environments=_distinct(frames.environments),
        backends=_backends(frames.environments),
        token_effects=token_effects,
        loss_effects=loss_effects,
        failed_self_tests=sum(
            any(test.get("passed") is False for test in environment.self_tests or ())
            for environment in frames.environments.values()
        ),
        set_apart=set_apart,
        waived=waived,
        horizon_tokens=setting.horizon,
        last_ended_unix=max(ended) if ended else None,
        curves=curves,
        curves_in_bf16=tuple(curve for _, curve in second[0].values()),
    )


def _alpha(own: ArmRuns, base: ArmRuns, plan: LockedPlan) -> float:
    """Return the nominal level of an arm's intervals."""
    if own.stopped is not None:
        return own.stopped.alpha
    if own is base:
        return ALPHA
    return alpha_of(own.outcomes, base.outcomes, plan.stop, ended=own.have_ended and base.have_ended)


def _effects(plan: LockedPlan, runs: Mapping[str, ArmRuns]) -> tuple[Effects, Effects]:
    """Return the factors' effects on log tokens to target and on the final loss.

    There are none where arms were stopped, because the remaining arms were selected by their results.
    """
    in_grid = [(entry.factors, runs[entry.name]) for entry in plan.arms if entry.factors]
    stopped = ", ".join(name for name, own in runs.items() if own.stopped is not None)
    places = {runs[entry.name].origin for entry in plan.arms if entry.factors}
    tokens = [
        (factors, run.seed, math.log(run.high) if run.exact else None)
        for factors, own in in_grid
        for run in own.outcomes
        if run.end != "missing"
    ]
    losses = [
        (factors, curve.seed, None if curve.end == "diverged" else float(curve.loss[-1]))
        for factors, own in in_grid
        for curve in own.curves
        if curve.end != "missing"
    ]
    why = f"arms were stopped early ({stopped}): no effects" if stopped else ""
    if len(places) > 1:
        why = "the arms' tokens are not counted from one place: no effects"
    on_tokens, on_loss = (
        Effects(reason=why, runs=len(rows))
        if why and rows
        else factor_effects(rows, paired=all(is_paired(plan, place) for place in places))
        for rows in (tokens, losses)
    )
    return on_tokens, on_loss


def _arm_result(
    entry: LockedArm, own: ArmRuns, baseline: ArmRuns, setting: _Setting, against: Against | None
) -> ArmResult:
    """Return one arm ``against`` the baseline; of the baseline as many seeds as the arm was stopped at."""
    base = baseline.first(own.seeds)
    is_baseline = against is None
    against = against or BASELINE
    alpha, target = own.alpha, setting.plan.target
    cost, difference = against.cost, against.difference
    mean = mean_tokens(own.outcomes, alpha)
    margin = setting.plan.margin
    # Logs do not tell the budget of a run that ended once it had hit.
    if cost.kind == "interval" and setting.timing.kind != "logged":
        late = [run for run in (*own.results, *base.results) if _is_late(run, own.origin)]
        cost = replace(cost, near_budget=bool(late))
    if target is None:
        mean = Interval(note=NO_TARGET)
        cost = (
            cost if is_baseline else Cost(kind="none", reason=NO_TARGET, n=cost.n, n_baseline=cost.n_baseline)
        )
    return ArmResult(
        planned=entry,
        alpha=alpha,
        stopped=own.stopped,
        tokens_to_target=mean,
        token_cost=cost,
        final_loss=final_loss(own.curves, alpha),
        difference=difference,
        standing=None if is_baseline or margin is None else standing(cost, difference.figure, margin, alpha),
        behind=tokens_behind(difference, base.curves)
        if cost.kind == "bound" and not own.origin and not _is_falling(own, base, difference.tokens)
        else Interval(),
        moved=against.moved,
        cost_growth=against.growth,
        reached=None if own.is_selected or target is None else reached(own.whole, alpha),
        restricted_mean=Interval(
            note="stopped early" if own.is_selected else NO_TARGET if target is None else "no results"
        )
        if own.is_selected or setting.horizon is None
        else restricted_mean(own.whole, setting.horizon, alpha),
        power=None
        if is_baseline or own.stopped is not None
        else power_of(cost, own.outcomes, base.outcomes, _of_margin(cost, difference.figure, margin), alpha),
        measured=_measured(entry.name, own, base, setting, cost),
        fp4_share=None if own.config is None else speed.share_in_fp4(own.config),
        modelled=()
        if own.config is None or base.config is None
        else speed.modelled_speed(own.config, base.config, tokens_to_target=mean.estimate, cost=cost),
        published=() if own.config is None else published_for(own.config.recipe),
        decay_begins=own.decay_begins,
        counted_from=own.origin,
        in_bf16=against.in_bf16,
        runs=tuple(own.results),
    )


def _is_late(run: RunResult, origin: int) -> bool:
    """Tell whether a run hit near the end of its budget; both are counted from ``origin``."""
    at = run.tokens_to_target  # of a budget that is not known, 0, nothing is said
    return at is not None and 0 < (1 - NEAR_BUDGET) * (run.budget - origin) < at


def _of_margin(cost: Cost, loss: Estimate | None, margin: Margin | None) -> tuple[Estimate, float] | None:
    """Return the figure that a margin is of and how far it reaches; None without a margin or the figure."""
    if margin is None:
        return None
    figure, limit = asked(cost, loss, margin)
    return None if figure is None or not figure.variance else (figure, limit)


def _is_falling(own: ArmRuns, base: ArmRuns, tokens: int | None) -> bool:
    """Tell whether the learning rate of either falls there, so that the curve's slope is not its own."""
    for one in (own, base):
        if one.config is not None and one.config.training.schedule == "cosine":
            return True
        if one.decay_begins is not None and (tokens or 0) > one.decay_begins:
            return True
    return False


def _measured(name: str, own: ArmRuns, base: ArmRuns, setting: _Setting, cost: Cost) -> Measured | None:
    """Return an arm's speed, timed alone where it was, else in its runs; None where no timing counts."""
    timed = setting.throughput
    if timed is not None and name in timed.tokens_per_sec:
        rates, base_rates = timed.tokens_per_sec[name], timed.tokens_per_sec[setting.plan.baseline]
        return speed.alone_speed(
            rates, base_rates, cost=cost, tokens=log_tokens(own.outcomes), alpha=own.alpha
        )
    if setting.timing.kind != "native" and (setting.timing.kind != "logged" or name in setting.timing.untold):
        return None
    found = speed.measured_speed(
        own.results,
        base.results,
        timed="in its runs" if setting.timing.kind == "native" else "as logged",
        paired=is_paired(setting.plan, own.origin),
        alpha=own.alpha,
    )
    # Logs need not tell the time.
    return None if found.timed == "as logged" and found.throughput.estimate is None else found


def _resolution(runs: Iterable[ArmRuns], baseline: Sequence[Outcome]) -> Resolution:
    """Take the widest of the runs' intervals at the crossing: the coarsest reading limits the comparison."""
    steps = [
        float(np.diff(curve.tokens)[_place(end, curve)])
        for own in runs
        for end, curve in zip(own.outcomes, own.curves, strict=False)
        if len(curve.tokens) > 1
    ]
    interval = max(steps, default=None)
    reached = mean_tokens(baseline).estimate
    share = interval / reached if interval is not None and reached else math.inf
    return Resolution(tokens=interval, share_of_tokens_to_target=share if math.isfinite(share) else None)


def _place(end: Outcome, curve: Curve) -> int:
    """Return which interval between evaluations a run crossed the target in; the last where it did not."""
    last = len(curve.tokens) - 2
    if end.interpolated is None:
        return 0 if end.end == "hit" else last
    at = end.interpolated + curve.origin
    return min(max(int(np.searchsorted(curve.tokens, at, side="left")) - 1, 0), last)


def _distinct(environments: dict[str, Environment]) -> tuple[tuple[dict[str, Any], int], ...]:
    """Return the different machines and versions, with the number of runs on each, in the order of the plan.

    Who did which GEMM belongs to an arm's recipe, and on which of equal GPUs to the run; neither makes
    another environment of the same machine.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for one in environments.values():
        environment = {key: value for key, value in one.whole.items() if key not in _OF_THE_RUN}
        alike.setdefault(json.dumps(environment, sort_keys=True), []).append(environment)
    return tuple((same[0], len(same)) for same in alike.values())


def _backends(environments: dict[str, Environment]) -> tuple[tuple[str, int], ...]:
    """Return who did which kind of GEMM and how, with the number of runs, in the order of the plan."""
    counts: Counter[str] = Counter()
    for environment in environments.values():
        counts.update(
            {
                f"{choice.operands} by {choice.backend}, {choice.mode}: {choice.detail}": 1
                for choice in environment.backend_choices or ()
            }
        )
    return tuple(counts.items())
