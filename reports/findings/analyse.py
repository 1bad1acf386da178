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

from ablate.reports.findings.arms import against, arm_runs, compare_arms, second_ends
from ablate.reports.findings.gemms import find_matrices, find_steps, published_for
from ablate.reports.findings.power import power_of
from ablate.reports.findings.results import Analysis, ArmResult, Resolution, TunedArm, TuningResult
from ablate.reports.findings.speed import (
    alone_speed,
    judge_throughput,
    measured_speed,
    modelled_speed,
    share_in_fp4,
    timing_of_runs,
)
from ablate.results.cost import NEAR_BUDGET, Cost, asked, log_tokens, mean_tokens, standing
from ablate.results.ends import comparisons, find_set_apart, origins
from ablate.results.intervals import Interval
from ablate.results.losses import final_loss
from ablate.results.stop_rule import method_of
from ablate.run.evaluations import notes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.speed import RunTiming, Throughput
    from ablate.results.frames import StudyFrames
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan


NO_TARGET = "no target was given"
# Records of older versions have ``timing_…``.
_OF_THE_RUN = (
    "backend", "backend_mode", "backend_detail", "backend_choices", "self_tests", "timing_valid",
    "timing_why_not", "gpu_uuid", "markers", "resumed_differently", "log_notes",
)  # fmt: skip


def analyse(frames: StudyFrames) -> Analysis:
    """Compute every number of the report; in a tuned study at the values found."""
    plan = frames.plan
    *at_shared, found = (_analyse(part) for part in comparisons(frames))
    if at_shared:
        return replace(found, tuning=_tuned(plan, at_shared[0], found))
    # The tuning has not ended.
    return replace(found, tuning=None if plan.tuning is None else TuningResult(plan=plan.tuning))


def _log_notes(frames: StudyFrames) -> dict[str, Sequence[str]]:
    """Return how each run's log was read, by the run's arm and seed."""
    return {
        f"{frames.runs[run_id].arm} seed {frames.runs[run_id].seed}": ran.whole.get("log_notes") or ()
        for run_id, ran in frames.environments.items()
    }


def _analyse(frames: StudyFrames) -> Analysis:
    plan = frames.plan
    set_apart = find_set_apart(frames)
    apart = {found.run for found in set_apart}
    timing = timing_of_runs(frames.environments, plan)
    throughput = judge_throughput(frames, left_out=apart)
    # Arms that fork are compared from the fork on: with the baseline, and with arms of the same fork.
    from_place = {origin: arm_runs(frames, apart, origin) for origin in origins(plan)}
    second = {origin: second_ends(frames, apart, origin) for origin in from_place}
    groups: dict[int, dict[str, ArmResult]] = {}
    compared: dict[str, ArmResult] = {}
    for origin, names in origins(plan).items():
        groups[origin] = {
            name: arm for name, arm in from_place[origin].items() if name in {*names, plan.baseline}
        }
        compared |= compare_arms(groups[origin], second[origin], plan)
    base = from_place[plan.counted_from(plan.baseline)][plan.baseline]
    compared[plan.baseline] = base
    arms = []
    for entry in plan.arms:
        arm = compared[entry.name]
        other = from_place[arm.counted_from][plan.baseline]
        arms.append(_with_figures(arm, other, plan, timing, throughput))
    between = cache(lambda first, origin: against(groups[origin][first], groups[origin], plan))
    once = {
        # The baseline's second arm would repeat each of its cells and steps.
        arm.name: frames.configs[arm.name]
        for arm in plan.arms
        if arm.name in frames.configs and not arm.again
    }
    environments = frames.environments.values()
    alike: dict[str, list[dict[str, Any]]] = {}
    for ran in environments:
        # The back end belongs to an arm's recipe, and which of several equal GPUs to the run; neither makes
        # the machine another environment.
        machine = {key: one for key, one in ran.whole.items() if key not in _OF_THE_RUN}
        alike.setdefault(json.dumps(machine, sort_keys=True), []).append(machine)
    backends = Counter(
        text
        for ran in environments
        for text in dict.fromkeys(
            f"{choice.operands} by {choice.backend}, {choice.mode}: {choice.detail}"
            for choice in ran.backend_choices or ()
        )
    )
    return Analysis(
        plan=plan,
        arms=tuple(arms),
        matrices=find_matrices(once, free=plan.tuning.fields if plan.tuning else ()),
        # Both arms of a step have the same fork, as they differ in one GEMM only.
        steps=find_steps(
            once, lambda one, other: between(one, compared[other].counted_from)[other].token_cost
        ),
        resolution=_resolution(arms, base.used),
        timing=timing,
        throughput=throughput,
        environments=tuple((same[0], len(same)) for same in alike.values()),
        backends=tuple(backends.items()),
        failed_self_tests=sum(any(not test.passed for test in ran.self_tests or ()) for ran in environments),
        accumulators=_accumulators(frames),
        resumed_differently=sum(bool(ran.whole.get("resumed_differently")) for ran in environments),
        log_notes=tuple(notes_of(_log_notes(frames))),
        markers=tuple(dict.fromkeys(one for ran in environments for one in ran.whole.get("markers") or ())),
        set_apart=set_apart,
        last_ended_unix=max(
            (run.status.ended_unix for run in frames.runs.values() if run.status.ended_unix), default=None
        ),
        curves=tuple(
            run
            for arm in from_place[0].values()
            for run in arm.used
            if len(run.tokens) or run.end != "missing"
        ),
        curves_in_bf16=tuple(second[0].values()),
    )


def _with_figures(
    arm: ArmResult, base: ArmResult, plan: LockedPlan, timing: RunTiming, throughput: Throughput | None
) -> ArmResult:
    """Add an arm's own figures. ``base``: the baseline, counted from the same place."""
    of_base = base.used[: arm.seeds]
    is_baseline, target, margin = arm.name == plan.baseline, plan.target, plan.margin
    cost, difference, mean = arm.token_cost, arm.difference, mean_tokens(arm.used, arm.alpha)
    # Logs do not say the budget of a run that ended at its hit.
    if cost.kind == "interval" and timing.kind != "logged":
        late = [
            run.tokens_to_target is not None
            # A budget of 0 is unknown.
            and 0 < (1 - NEAR_BUDGET) * (run.budget - arm.counted_from) < run.tokens_to_target
            for run in (*arm.used, *of_base)
        ]
        cost = replace(cost, near_budget=any(late))
    if target is None:
        mean = Interval(note=NO_TARGET)
        if not is_baseline:
            cost = Cost(kind="none", note=NO_TARGET, n=cost.n, n_baseline=cost.n_baseline)
    figures: dict[str, Any] = {
        "tokens_to_target": mean,
        "token_cost": cost,
        "final_loss": final_loss(arm.used, arm.alpha),
    }
    if throughput is not None and arm.name in throughput.tokens_per_sec:
        rates = throughput.tokens_per_sec
        figures["measured"] = alone_speed(
            rates[arm.name], rates[plan.baseline], cost=cost, tokens=log_tokens(arm.used), alpha=arm.alpha
        )
    elif timing.kind in ("logged", "command") and arm.name not in timing.untold:
        found = measured_speed(arm.used, of_base, method_of(plan, arm.counted_from))
        # Logs may have no times.
        if found.throughput.estimate is not None:
            figures["measured"] = found
    of_margin = None
    if not is_baseline and margin is not None:
        figures["standing"] = standing(cost, difference.figure, margin, arm.alpha)
        figure, limit = asked(cost, difference.figure, margin)
        of_margin = (figure, limit) if figure is not None and figure.variance else None
    if arm.stopped is None:
        figures["power"] = power_of(cost, arm.used, of_base, of_margin, arm.alpha)
    if arm.config is not None:
        figures["fp4_share"] = share_in_fp4(arm.config)
        figures["published"] = published_for(arm.config.recipe)
        if base.config is not None:
            figures["modelled"] = modelled_speed(
                arm.config, base.config, tokens_to_target=mean.estimate, cost=cost
            )
    return replace(arm, **figures)


def _accumulators(frames: StudyFrames) -> dict[str, tuple[str, ...]]:
    """Return the arms by what their runs' sums keep: in words, of the back end that keeps the fewest bits."""
    arms: dict[str, dict[str, None]] = {}
    for run_id, ran in frames.environments.items():
        measured = [test for test in ran.self_tests or () if test.figures]
        if measured:
            narrowest = min(measured, key=lambda test: min(test.figures.values()))
            arms.setdefault(narrowest.detail, {})[frames.runs[run_id].arm] = None
    return {detail: tuple(names) for detail, names in arms.items()}


def _resolution(arms: Sequence[ArmResult], baseline: Sequence[Outcome]) -> Resolution:
    """Take the widest evaluation interval at a run's crossing: it limits the comparison."""
    steps = []
    for run in (run for arm in arms for run in arm.used if len(run.tokens) > 1):
        # The interval in which the run crossed the target; the last one if it did not.
        crossing = run.high if run.interpolated is None else run.interpolated
        place = np.searchsorted(run.tokens, crossing + run.origin) - 1
        steps.append(float(np.diff(run.tokens)[np.clip(place, 0, len(run.tokens) - 2)]))
    interval = max(steps, default=None)
    mean = mean_tokens(baseline).estimate
    share = interval / mean if interval is not None and mean else math.inf
    return Resolution(tokens=interval, share_of_tokens_to_target=share if math.isfinite(share) else None)


def _tuned(plan: LockedPlan, at_shared: Analysis, at_tuned: Analysis) -> TuningResult:
    """Put both comparisons of a tuned study side by side: at its own values, and at those found."""
    tuning = plan.tuning
    assert tuning is not None
    shared_arms, tuned_arms = ({arm.name: arm for arm in one.arms} for one in (at_shared, at_tuned))
    arms = []
    for name, stand_in in tuning.tuned.items():
        if shared_arms[name].planned.again:
            continue
        group = tuning.group_of(name, plan.baseline)
        trials, chosen = group.trials, group.chosen or {}
        losses = [(trial.values, trial.loss) for trial in reversed(trials)]
        tried = {
            field: {value for trial in trials if isinstance(value := trial.values[field], int | float)}
            for field in chosen
        }
        diverged = sum(trial.diverged > 0 for trial in trials)
        pruned = sum(trial.state == "pruned" for trial in trials)
        arms.append(
            TunedArm(
                name=name,
                tuned=stand_in,
                group=group.name,
                shared=group.shared,
                chosen=chosen,
                # Beyond the ends of what was tried a value may be better.
                outermost=tuple(
                    field
                    for field, values in tried.items()
                    if len(values) > 1 and chosen[field] in (min(values), max(values))
                ),
                trials_complete=len(trials) - pruned - diverged,
                trials_pruned=pruned,
                trials_diverged=diverged,
                tokens_of_the_trials=sum(trial.tokens for trial in trials),
                loss_shared=next((loss for values, loss in losses if values == group.shared), None),
                loss_chosen=next((loss for values, loss in losses if values == chosen), None),
                token_cost_shared=shared_arms[name].token_cost,
                token_cost_tuned=tuned_arms[stand_in].token_cost,
            )
        )
    budget = at_tuned.plan.training.get("tokens")
    return TuningResult(
        plan=tuning,
        share=tuning.tokens / budget if budget else None,
        total_tokens=sum(trial.tokens for group in tuning.groups for trial in group.trials),
        run_tokens=sum(run.trained for arm in at_tuned.arms for run in arm.runs),
        arms=tuple(arms),
        others=tuple(arm for arm in at_shared.arms if arm.name not in tuned_arms),
    )
