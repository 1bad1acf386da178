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

    from ablate.reports.findings.speed import Modelled, RunTiming, Throughput
    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import GroupTuning, LockedPlan, LockedTuning
    from ablate.store.records import Environment


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
    by_bf16: dict[int, dict[str, RunResult]] = {}
    groups: dict[int, dict[str, ArmResult]] = {}
    compared: dict[str, ArmResult] = {}
    for origin, names in origins(plan).items():
        by_origin[origin] = arm_runs(frames, apart, origin)
        by_bf16[origin] = bf16_ends(frames, apart, origin)
        groups[origin] = {
            name: arm
            for name, arm in by_origin[origin].items()
            if name in names | {plan.baseline}
        }
        compared |= compare_arms(groups[origin], by_bf16[origin], plan)
    baseline = by_origin[plan.counted_from(plan.baseline)][plan.baseline]
    compared[plan.baseline] = baseline
    compared = add_claims(compared, plan)
    num_settled = sum(bool(arm.claims) for arm in compared.values())
    level = level_of(plan.stop, max(1, len(compared) - 1 - num_settled))
    arms = []
    for planned in plan.arms:
        arm = compared[planned.name]
        arm_baseline = by_origin[arm.counted_from][plan.baseline]
        arms.append(_with_figures(arm, arm_baseline, plan, timing, throughput, level))

    @cache
    def over(first: str, origin: int) -> dict[str, ArmResult]:
        return against(groups[origin][first], groups[origin], plan)

    def step_cost(first: str, second: str) -> Cost:
        # Both arms have the same fork, as they differ in one GEMM only.
        return over(first, compared[second].counted_from)[second].token_cost

    configs = {
        arm.name: frames.configs[arm.name]
        for arm in plan.arms
        # The baseline's second arm would repeat each of its cells and steps.
        if arm.name in frames.configs and not arm.again
    }
    cells = find_cells(configs, free=plan.tuning.fields if plan.tuning else ())
    steps = find_steps(configs, step_cost)
    environments = list(frames.environments.values())
    curves = [run for arm in by_origin[0].values() for run in arm.used]
    ended = [
        run.status.ended_unix for run in frames.runs.values() if run.status.ended_unix
    ]
    return Analysis(
        plan=plan,
        arms=tuple(arms),
        matrices=find_matrices(cells),
        steps=steps,
        effects=find_effects(arms, cells, steps, method_of(plan)),
        over_rivals={
            arm.name: over(arm.name, arm.counted_from) for arm in _rivals(arms, plan)
        },
        resolution=_resolution(arms, baseline.used),
        timing=timing,
        throughput=throughput,
        environments=_machines(environments),
        backends=_backends(environments),
        failed_self_tests=sum(
            any(not test.passed for test in environment.self_tests or ())
            for environment in environments
        ),
        accumulators=_accumulators(frames),
        resumed_differently=sum(
            bool(ran_on.whole.get("resumed_differently")) for ran_on in environments
        ),
        log_notes=_log_notes(frames),
        markers=tuple(
            dict.fromkeys(
                marker
                for ran_on in environments
                for marker in ran_on.whole.get("markers") or ()
            )
        ),
        set_apart=set_apart,
        last_ended_unix=max(ended, default=None),
        curves=tuple(run for run in curves if len(run.tokens) or run.end != "missing"),
        curves_in_bf16=tuple(by_bf16[0].values()),
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
    base_runs = base.used[: arm.seeds]
    is_baseline = arm.name == plan.baseline
    cost = arm.token_cost
    mean = mean_tokens(arm.used, arm.alpha)
    if plan.target is None:
        mean = Interval(note=NO_TARGET)
        if not is_baseline:
            cost = Cost(
                kind="none", note=NO_TARGET, n=cost.n, n_baseline=cost.n_baseline
            )
    # Logs do not say the budget of a run that ended at its hit.
    elif cost.kind == "interval" and timing.kind != "logged":
        runs = (*arm.used, *base_runs)
        cost = replace(
            cost,
            near_budget=any(_is_near_budget(run, arm.counted_from) for run in runs),
        )
    final = final_loss(arm.used, arm.alpha)
    arm = replace(arm, tokens_to_target=mean, token_cost=cost, final_loss=final)
    rates = {} if throughput is None else throughput.tokens_per_sec
    if arm.name in rates:
        measured = alone_speed(
            rates[arm.name],
            rates[plan.baseline],
            cost=cost,
            tokens=log_tokens(arm.used),
            alpha=arm.alpha,
        )
        arm = replace(arm, measured=measured)
    elif timing.kind in ("logged", "command") and arm.name not in timing.untold:
        measured = measured_speed(
            arm.used, base_runs, method_of(plan, arm.counted_from)
        )
        # Logs may have no times.
        if measured.throughput.estimate is not None:
            arm = replace(arm, measured=measured)
    limited = None
    is_settled = "differs" in arm.claims
    if plan.margin is not None:
        is_settled = arm.standing != "open"
        limited = limited_figure(cost.figure, arm.difference.figure, plan.margin)
    if arm.stopped is None:
        power = power_of(
            cost, arm.used, base_runs, limited, settled=is_settled, level=level
        )
        arm = replace(arm, power=power)
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


def _rivals(arms: Sequence[ArmResult], plan: LockedPlan) -> list[ArmResult]:
    """Return the arms of lowest cost, of lowest loss without a target; those with FP4 first."""
    ranked = []
    for place, arm in enumerate(arms):
        figure = (arm.difference if plan.target is None else arm.token_cost).figure
        if has_interval(figure) and not arm.planned.again:
            ranked.append((not arm.fp4_share, figure.value, place))
    return [arms[place] for _, _, place in sorted(ranked)[:MOST_RIVALS]]


def _is_near_budget(run: RunResult, origin: int) -> bool:
    """Whether the run hit in the last ``NEAR_BUDGET`` of its budget; a budget of 0 is unknown."""
    edge = (1 - NEAR_BUDGET) * (run.budget - origin)
    return run.tokens_to_target is not None and 0 < edge < run.tokens_to_target


def _log_notes(frames: StudyFrames) -> tuple[str, ...]:
    """Say how the runs' logs were read."""
    notes = {}
    for run_id, environment in frames.environments.items():
        run = frames.runs[run_id]
        notes[f"{run.arm} seed {run.seed}"] = environment.whole.get("log_notes") or ()
    return tuple(notes_of(notes))


def _machines(
    environments: Sequence[Environment],
) -> tuple[tuple[dict[str, Any], int], ...]:
    """Return each environment that differs, and its number of runs.

    The back end belongs to an arm's recipe, and which of several equal GPUs to the run; neither makes the
    machine another environment.
    """
    machines: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for environment in environments:
        machine = {
            key: value
            for key, value in environment.whole.items()
            if key not in _OF_THE_RUN
        }
        text = json.dumps(machine, sort_keys=True)
        machines.setdefault(text, machine)
        counts[text] += 1
    return tuple((machine, counts[text]) for text, machine in machines.items())


def _backends(environments: Sequence[Environment]) -> tuple[tuple[str, int], ...]:
    """Return what each back end did, and in how many runs."""
    counts: Counter[str] = Counter()
    for environment in environments:
        texts = {}
        for choice in environment.backend_choices or ():
            texts[
                f"{choice.operands} by {choice.backend}, {choice.mode}: {choice.detail}"
            ] = 1
        counts.update(texts)
    return tuple(counts.items())


def _accumulators(frames: StudyFrames) -> dict[str, tuple[str, ...]]:
    """Return the arms by what their runs' sums keep: in words, of the back end that keeps the fewest bits."""
    arms: dict[str, dict[str, None]] = {}
    for run_id, environment in frames.environments.items():
        measured = [test for test in environment.self_tests or () if test.figures]
        if measured:
            narrowest = min(measured, key=lambda test: min(test.figures.values()))
            arms.setdefault(narrowest.detail, {})[frames.runs[run_id].arm] = None
    return {detail: tuple(names) for detail, names in arms.items()}


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
    own_arms = {arm.name: arm for arm in at_own_values.arms}
    tuned_arms = {arm.name: arm for arm in at_tuned_values.arms}
    arms = []
    for name, stand_in in tuning.tuned.items():
        if not own_arms[name].planned.again:
            group = tuning.group_of(name, baseline)
            arms.append(_tuned_arm(own_arms[name], tuned_arms[stand_in], group))
    budget = at_tuned_values.plan.training.get("tokens")
    return TuningResult(
        plan=tuning,
        share=tuning.tokens / budget if budget else None,
        total_tokens=sum(
            trial.tokens for group in tuning.groups for trial in group.trials
        ),
        run_tokens=sum(run.trained for arm in at_tuned_values.arms for run in arm.runs),
        arms=tuple(arms),
        others=tuple(arm for arm in at_own_values.arms if arm.name not in tuned_arms),
    )


def _tuned_arm(own: ArmResult, tuned: ArmResult, group: GroupTuning) -> TunedArm:
    """Return what the trials found for an arm: at the study's own values, and at those found."""
    chosen = group.chosen or {}
    outermost = []
    for name, value in chosen.items():
        tried = [trial.values[name] for trial in group.trials]
        numbers = {number for number in tried if isinstance(number, int | float)}
        # Beyond the ends of what was tried a value may be better.
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            outermost.append(name)
    loss_shared = loss_chosen = None
    for trial in group.trials:
        if trial.values == group.shared:
            loss_shared = trial.loss
        if trial.values == chosen:
            loss_chosen = trial.loss
    diverged = sum(trial.diverged > 0 for trial in group.trials)
    pruned = sum(trial.state == "pruned" for trial in group.trials)
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
        tokens_of_the_trials=sum(trial.tokens for trial in group.trials),
        loss_shared=loss_shared,
        loss_chosen=loss_chosen,
        token_cost_shared=own.token_cost,
        token_cost_tuned=tuned.token_cost,
    )
