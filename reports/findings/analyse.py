"""Frames → every number of the report, as plain frozen data. Pure: no files, no pictures, no clock.

Runs of an arm that was stopped early are left out before anything is compared.

How it fails: an incomplete study raises no error. Runs without a result are counted as missing, and figures
that cannot be computed are None with a note. The warnings (``words.caveats``) tell the reader.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.findings.arms import (
    add_claims,
    against,
    arm_runs,
    bf16_ends,
    compare_arms,
)
from ablate.reports.findings.effects import find_effects
from ablate.reports.findings.gemms import (
    find_cells,
    find_matrices,
    find_steps,
    published_for,
)
from ablate.reports.findings.power import power_of
from ablate.reports.findings.results import (
    Analysis,
    ArmResult,
    Resolution,
    TunedArm,
    TuningResult,
)
from ablate.reports.findings.speed import (
    alone_speed,
    judge_throughput,
    measured_speed,
    modelled_speed,
    share_in_fp4,
    timing_of_runs,
)
from ablate.results.claims import has_interval, limited_figure
from ablate.results.cost import NEAR_BUDGET, Cost, log_tokens, mean_tokens
from ablate.results.ends import comparisons, find_set_apart, origins
from ablate.results.intervals import Interval
from ablate.results.losses import final_loss
from ablate.results.stop_rule import level_of, method_of
from ablate.run.evaluations import notes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.power import Power
    from ablate.reports.findings.speed import Measured, Modelled, RunTiming, Throughput
    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import GroupTuning, LockedPlan, LockedTuning


NO_TARGET = "no target was given"
MOST_RIVALS = 10
"""So many arms, in a larger study, are what all others are compared with."""
# Records of older versions have ``timing_…``.
_OF_THE_RUN = (
    "backend", "backend_mode", "backend_detail", "backend_choices", "self_tests", "timing_valid",
    "timing_why_not", "gpu_uuid", "markers", "resumed_differently", "log_notes",
    "command", "exit_code",
)  # fmt: skip


def analyse(frames: StudyFrames) -> Analysis:
    """Compute every number of the report; in a tuned study at the values found."""
    tuning = frames.plan.tuning
    analyses = [_analyse(comparison) for comparison in comparisons(frames)]
    analysis = analyses[-1]
    if tuning is None:
        return analysis
    if not tuning.done:
        return replace(analysis, tuning=TuningResult(plan=tuning))
    return replace(analysis, tuning=_tuned(tuning, frames.plan.baseline, *analyses))


def _analyse(frames: StudyFrames) -> Analysis:
    plan = frames.plan
    set_apart = find_set_apart(frames)
    apart = {run.run for run in set_apart}
    timing = timing_of_runs(frames.environments, plan)
    throughput = judge_throughput(frames, left_out=apart)
    # Arms that fork are compared from the fork on: with the baseline, and with arms of the same fork.
    by_origin: dict[int, dict[str, ArmResult]] = {}
    groups: dict[int, dict[str, ArmResult]] = {}
    compared: dict[str, ArmResult] = {}
    curves_in_bf16: tuple[RunResult, ...] = ()
    for origin, names in origins(plan).items():
        counted = arm_runs(frames, apart, origin)
        in_bf16 = bf16_ends(frames, apart, origin)
        if origin == 0:
            curves_in_bf16 = tuple(in_bf16.values())
        group = {
            name: counted[name] for name in counted if name in names | {plan.baseline}
        }
        compared |= compare_arms(group, in_bf16, plan)
        by_origin[origin] = counted
        groups[origin] = group
    baseline = by_origin[plan.counted_from(plan.baseline)][plan.baseline]
    compared[plan.baseline] = baseline
    compared = add_claims(compared, plan)
    num_settled = sum(bool(arm.claims) for arm in compared.values())
    level = level_of(plan.stop, max(1, len(compared) - 1 - num_settled))
    arms = []
    configs = {}
    for planned in plan.arms:
        arm = compared[planned.name]
        arm_baseline = by_origin[arm.counted_from][plan.baseline]
        arms.append(_with_figures(arm, arm_baseline, plan, timing, throughput, level))
        # The baseline's second arm would repeat each of its cells and steps.
        if arm.name in frames.configs and not planned.again:
            configs[arm.name] = frames.configs[arm.name]

    @cache
    def over(first: str, origin: int) -> dict[str, ArmResult]:
        return against(groups[origin][first], groups[origin], plan)

    def step_cost(first: str, second: str) -> Cost:
        # Both arms have the same fork, as they differ in one GEMM only.
        return over(first, compared[second].counted_from)[second].token_cost

    cells = find_cells(configs, free=plan.tuning.fields if plan.tuning else ())
    steps = find_steps(configs, step_cost)
    ended = [run.status.ended_unix or 0.0 for run in frames.runs.values()]
    over_rivals = {}
    for arm in _rivals(arms, plan):
        over_rivals[arm.name] = over(arm.name, arm.counted_from)
    curves = []
    for arm in by_origin[0].values():
        curves += [run for run in arm.used if len(run.tokens) or run.end != "missing"]
    return Analysis(
        plan=plan,
        arms=tuple(arms),
        matrices=find_matrices(cells),
        steps=steps,
        effects=find_effects(arms, cells, steps, method_of(plan)),
        over_rivals=over_rivals,
        resolution=_resolution(arms, baseline.used),
        timing=timing,
        throughput=throughput,
        set_apart=set_apart,
        last_ended_unix=max(ended, default=0.0) or None,
        curves=tuple(curves),
        curves_in_bf16=curves_in_bf16,
        **_of_environments(frames),
    )


def _with_figures(
    arm: ArmResult,
    base: ArmResult,
    plan: LockedPlan,
    timing: RunTiming,
    throughput: Throughput | None,
    level: float,
) -> ArmResult:
    """Add an arm's own figures.

    ``base``: the baseline, counted from the same place. ``level``: at which an open arm would be settled.
    """
    mean = mean_tokens(arm.used, arm.alpha)
    if plan.target is None:
        mean = Interval(note=NO_TARGET)
    base_runs = base.used[: arm.seeds]
    cost = _token_cost(arm, base_runs, plan, timing)
    arm = replace(
        arm,
        tokens_to_target=mean,
        token_cost=cost,
        final_loss=final_loss(arm.used, arm.alpha),
        measured=_measured(arm, base_runs, plan, timing, throughput, cost),
        power=_power(arm, base_runs, plan, cost, level),
    )
    if arm.config is None:
        return arm
    modelled: tuple[Modelled, ...] = ()
    if base.config is not None:
        modelled = modelled_speed(
            arm.config, base.config, tokens_to_target=mean.estimate, cost=cost
        )
    return replace(
        arm,
        fp4_share=share_in_fp4(arm.config),
        published=published_for(arm.config.recipe),
        modelled=modelled,
    )


def _token_cost(
    arm: ArmResult, base_runs: Sequence[RunResult], plan: LockedPlan, timing: RunTiming
) -> Cost:
    """Return an arm's cost, with a mark if a run hit the target near the end of its budget."""
    cost = arm.token_cost
    if plan.target is None:
        if arm.name == plan.baseline:
            return cost
        return Cost(kind="none", note=NO_TARGET, n=cost.n, n_baseline=cost.n_baseline)
    # Logs do not say the budget of a run that ended at its hit.
    if cost.kind != "interval" or timing.kind == "logged":
        return cost
    for run in (*arm.used, *base_runs):
        # A budget of 0 is unknown.
        edge = (1 - NEAR_BUDGET) * (run.budget - arm.counted_from)
        if 0 < edge < (run.tokens_to_target or 0):
            return replace(cost, near_budget=True)
    return cost


def _measured(
    arm: ArmResult,
    base_runs: Sequence[RunResult],
    plan: LockedPlan,
    timing: RunTiming,
    throughput: Throughput | None,
    cost: Cost,
) -> Measured | None:
    """Take the speed from steps that were timed alone, else from the times of runs that are comparable."""
    rates = {} if throughput is None else throughput.tokens_per_sec
    if arm.name in rates:
        return alone_speed(
            rates[arm.name],
            rates[plan.baseline],
            cost=cost,
            tokens=log_tokens(arm.used),
            alpha=arm.alpha,
        )
    if timing.kind not in ("logged", "command") or arm.name in timing.untold:
        return None
    method = method_of(plan, arm.counted_from)
    measured = measured_speed(arm.used, base_runs, method)
    # Logs may have no times.
    if measured.throughput.estimate is None:
        return None
    return measured


def _power(
    arm: ArmResult,
    base_runs: Sequence[RunResult],
    plan: LockedPlan,
    cost: Cost,
    level: float,
) -> Power | None:
    if arm.stopped is not None:
        return None
    limited = None
    is_settled = "differs" in arm.claims
    if plan.margin is not None:
        is_settled = arm.standing != "open"
        limited = limited_figure(cost.figure, arm.difference.figure, plan.margin)
    return power_of(cost, arm.used, base_runs, limited, settled=is_settled, level=level)


def _rivals(arms: Sequence[ArmResult], plan: LockedPlan) -> list[ArmResult]:
    """Return the arms of lowest cost, of lowest loss without a target; those with FP4 first."""
    ranked = []
    for arm in arms:
        figure = (arm.difference if plan.target is None else arm.token_cost).figure
        if has_interval(figure) and not arm.planned.again:
            ranked.append((not arm.fp4_share, figure.value, arm))
    ranked.sort(key=itemgetter(0, 1))
    return [arm for _, _, arm in ranked[:MOST_RIVALS]]


def _of_environments(frames: StudyFrames) -> dict[str, Any]:
    """Return the fields of ``Analysis`` that tell what the runs ran on.

    The back end belongs to an arm's recipe, and which of several equal GPUs to the run; neither makes the
    machine another environment.
    """
    machines: dict[str, dict[str, Any]] = {}
    runs_of_machines: Counter[str] = Counter()
    backends: Counter[str] = Counter()
    accumulators: dict[str, dict[str, None]] = {}
    log_notes = {}
    markers: dict[str, None] = {}
    failed_self_tests = 0
    resumed_differently = 0
    for run_id, environment in frames.environments.items():
        run = frames.runs[run_id]
        whole = environment.whole
        machine = {key: whole[key] for key in whole if key not in _OF_THE_RUN}
        text = json.dumps(machine, sort_keys=True)
        machines.setdefault(text, machine)
        runs_of_machines[text] += 1
        choices = environment.backend_choices or ()
        backends.update(
            {
                f"{choice.operands} by {choice.backend}, {choice.mode}: {choice.detail}": 1
                for choice in choices
            }
        )
        tests = environment.self_tests or ()
        failed_self_tests += not all(test.passed for test in tests)
        measured = [test for test in tests if test.figures]
        if measured:
            # Of the back end that keeps the fewest bits.
            narrowest = min(measured, key=lambda test: min(test.figures.values()))
            accumulators.setdefault(narrowest.detail, {})[run.arm] = None
        log_notes[f"{run.arm} seed {run.seed}"] = whole.get("log_notes") or ()
        markers |= dict.fromkeys(whole.get("markers") or ())
        resumed_differently += bool(whole.get("resumed_differently"))
    return {
        "environments": tuple(
            zip(machines.values(), runs_of_machines.values(), strict=True)
        ),
        "backends": tuple(backends.items()),
        "accumulators": {detail: tuple(arms) for detail, arms in accumulators.items()},
        "failed_self_tests": failed_self_tests,
        "log_notes": tuple(notes_of(log_notes)),
        "markers": tuple(markers),
        "resumed_differently": resumed_differently,
    }


def _resolution(arms: Sequence[ArmResult], baseline: Sequence[Outcome]) -> Resolution:
    """Take the widest evaluation interval at a run's crossing: it limits the comparison."""
    widest = None
    for run in (run for arm in arms for run in arm.used):
        if len(run.tokens) < 2:
            continue
        # The interval in which the run crossed the target; the last one if it did not.
        crossing = run.high if run.interpolated is None else run.interpolated
        place = np.searchsorted(run.tokens, crossing + run.origin) - 1
        width = float(np.diff(run.tokens)[np.clip(place, 0, len(run.tokens) - 2)])
        widest = max(widest or 0.0, width)
    mean = mean_tokens(baseline).estimate
    share = None
    if widest is not None and mean and math.isfinite(widest / mean):
        share = widest / mean
    return Resolution(tokens=widest, share_of_tokens_to_target=share)


def _tuned(
    tuning: LockedTuning,
    baseline: str,
    at_own_values: Analysis,
    at_tuned_values: Analysis,
) -> TuningResult:
    """Put both comparisons of a tuned study side by side: at its own values, and at those found."""
    tuned_arms = {arm.name: arm for arm in at_tuned_values.arms}
    arms = []
    others = []
    for arm in at_own_values.arms:
        if not arm.planned.again:
            group = tuning.group_of(arm.name, baseline)
            stand_in = tuned_arms[tuning.tuned[arm.name]]
            arms.append(_tuned_arm(arm, stand_in, group))
        if arm.name not in tuned_arms:
            others.append(arm)
    total_tokens = 0
    for group in tuning.groups:
        total_tokens += sum(trial.tokens for trial in group.trials)
    run_tokens = 0
    for arm in at_tuned_values.arms:
        run_tokens += sum(run.trained for run in arm.runs)
    budget = at_tuned_values.plan.training.get("tokens")
    return TuningResult(
        plan=tuning,
        share=tuning.tokens / budget if budget else None,
        total_tokens=total_tokens,
        run_tokens=run_tokens,
        arms=tuple(arms),
        others=tuple(others),
    )


def _tuned_arm(own: ArmResult, tuned: ArmResult, group: GroupTuning) -> TunedArm:
    """Return what the trials found for an arm: at the study's own values, and at those found."""
    chosen = group.chosen or {}
    outermost = []
    for name, value in chosen.items():
        numbers = set()
        for trial in group.trials:
            if isinstance(trial.values[name], int | float):
                numbers.add(trial.values[name])
        # Beyond the ends of what was tried a value may be better.
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            outermost.append(name)
    loss_shared = loss_chosen = None
    diverged = pruned = num_tokens = 0
    for trial in group.trials:
        if trial.values == group.shared:
            loss_shared = trial.loss
        if trial.values == chosen:
            loss_chosen = trial.loss
        diverged += trial.diverged > 0
        pruned += trial.state == "pruned"
        num_tokens += trial.tokens
    return TunedArm(
        name=own.name,
        tuned=tuned.name,
        group=group.name,
        shared=group.shared,
        chosen=chosen,
        outermost=tuple(outermost),
        trials_complete=len(group.trials) - pruned - diverged,
        trials_pruned=pruned,
        trials_diverged=diverged,
        tokens_of_the_trials=num_tokens,
        loss_shared=loss_shared,
        loss_chosen=loss_chosen,
        token_cost_shared=own.token_cost,
        token_cost_tuned=tuned.token_cost,
    )
