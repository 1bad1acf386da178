"""Frames → every number of the report, as plain frozen data. Pure: no files, no pictures, no clock.

Runs of an arm that was stopped early are left out here, before anything is compared; see ``stopping``.

How it fails: it does not raise on a study that is only half there. Runs that are no results are counted as
missing, figures that cannot be had are None with a note, and what a reader must know is in ``warnings``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.findings.ends import number_in, run_ends, stopped_arms, unused_places
from ablate.reports.findings.published import published_for
from ablate.reports.findings.results import Analysis, ArmResult, Resolution, RunResult
from ablate.reports.findings.sensitivity import rate_curves
from ablate.reports.findings.speed import (
    TimedRun,
    alone_speed,
    measured_speed,
    modelled_speed,
    read_configs,
    share_in_fp4,
)
from ablate.reports.findings.timing import judge_throughput, timing_of_runs
from ablate.reports.findings.tuning import pending, split_frames, tuned
from ablate.reports.read.comparable import find_set_apart
from ablate.reports.statistics.cost import Cost, is_settled, log_tokens, mean_tokens, token_cost
from ablate.reports.statistics.effects import Effects, factor_effects
from ablate.reports.statistics.growth import cost_growth
from ablate.reports.statistics.intervals import ALPHA, Interval
from ablate.reports.statistics.losses import Curve, LossDifference, final_difference, final_loss
from ablate.reports.statistics.power import power_of
from ablate.reports.statistics.steps import find_steps
from ablate.reports.statistics.stopping import alpha_of
from ablate.reports.statistics.survival import common_horizon, reached, restricted_mean
from ablate.reports.statistics.sweep import target_sweep
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.reports.findings.speed import Measured
    from ablate.reports.findings.timing import RunTiming, Throughput
    from ablate.reports.read.load import StudyFrames
    from ablate.reports.statistics.stopping import Stopped
    from ablate.run.config import RunConfig
    from ablate.run.outcome import Outcome
    from ablate.store.lock import LockedArm, LockedPlan
    from ablate.store.records import Environment

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
class _ArmRuns:
    """One arm's runs, in the order of the study's seeds: how they ended, their curves, their results.

    Of a stopped arm, runs that count for nothing stand among the ``results`` alone. ``config``: None where no
    run has one, as of logs that others wrote.
    """

    outcomes: Sequence[Outcome]
    curves: Sequence[Curve]
    results: Sequence[RunResult]
    stopped: Stopped | None
    config: RunConfig | None

    @property
    def seeds(self) -> int | None:
        """At a look both sides have its number of seeds; None where the arm was not stopped at one."""
        return None if self.stopped is None else self.stopped.seeds

    @property
    def is_selected(self) -> bool:
        """Whether its runs are those that happened to end before a stop: no interval comes of them."""
        return self.stopped is not None and self.stopped.kind == "diverged"

    @property
    def have_ended(self) -> bool:
        """Whether no run is still to come: failed ones are not, unless somebody asks for them again."""
        return all(run.state in ("finished", "diverged", "failed") for run in self.results)

    def first(self, seeds: int | None) -> _ArmRuns:
        """Return the first so many of the runs, all for None."""
        return replace(
            self, outcomes=self.outcomes[:seeds], curves=self.curves[:seeds], results=self.results[:seeds]
        )


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
    apart = {found.run_id for found in set_apart}
    runs = _arm_runs(frames, apart)
    base = runs[plan.baseline]
    setting = _Setting(
        plan=plan,
        timing=timing_of_runs(frames.environments, frames.attempts),
        throughput=judge_throughput(frames, left_out=apart, waived=waived),
        horizon=common_horizon(own.outcomes for own in runs.values()),
    )
    alphas = {name: _alpha(own, base, plan) for name, own in runs.items()}
    arms = tuple(
        _arm_result(entry, runs[entry.name], base, setting, alphas[entry.name]) for entry in plan.arms
    )
    curves = tuple(curve for own in runs.values() for curve in own.curves)
    steps = find_steps(
        # The baseline's second arm would make each of its steps once more.
        {
            entry.name: frames.configs[entry.name]
            for entry in plan.arms
            if entry.name in frames.configs and not entry.again
        },
        {name: own.outcomes for name, own in runs.items()},
        paired=plan.paired_seeds,
        alphas=alphas,
        seeds={name: own.seeds for name, own in runs.items()},
    )
    ended = [value for row in frames.runs["ended_unix"] if (value := number_in(row)) is not None]
    in_grid = [(entry.factors, runs[entry.name]) for entry in plan.arms if entry.factors]
    stopped = [name for name, own in runs.items() if own.stopped is not None]
    return Analysis(
        study=plan.study,
        description=plan.description,
        baseline=plan.baseline,
        target=plan.target,
        paired=plan.paired_seeds,
        rule=plan.stop,
        training=plan.training,
        arms=arms,
        steps=tuple(
            replace(step, cost=replace(step.cost, restricted=None))
            if runs[step.from_arm].is_selected or runs[step.to_arm].is_selected
            else step
            for step in steps
        ),
        rate_curves=rate_curves(arms, frames.configs, plan.baseline),
        resolution=_resolution(curves, base.outcomes),
        timing=setting.timing,
        throughput=setting.throughput,
        environments=_distinct(frames.environments),
        backends=_backends(frames.environments),
        token_effects=_effects(
            stopped,
            [
                (factors, math.log(run.high) if run.exact else None)
                for factors, own in in_grid
                for run in own.outcomes
                if run.end != "missing"
            ],
        ),
        loss_effects=_effects(
            stopped,
            [
                (factors, None if curve.end == "diverged" else float(curve.loss[-1]))
                for factors, own in in_grid
                for curve in own.curves
                if curve.end != "missing"
            ],
        ),
        failed_self_tests=sum(
            any(test.get("passed") is False for test in environment.self_tests or ())
            for environment in frames.environments.values()
        ),
        set_apart=set_apart,
        waived=waived,
        horizon_tokens=setting.horizon,
        dropped=plan.dropped,
        last_ended_unix=max(ended) if ended else None,
        curves=curves,
    )


def _arm_runs(frames: StudyFrames, apart: Collection[str]) -> dict[str, _ArmRuns]:
    """Return every arm's runs, in the order of the plan; those in ``apart`` are no results."""
    plan = frames.plan
    outcomes: dict[str, list[Outcome]] = {arm.name: [] for arm in plan.arms}
    curves: dict[str, list[Curve]] = {arm.name: [] for arm in plan.arms}
    results: dict[str, list[RunResult]] = {arm.name: [] for arm in plan.arms}
    whole_steps = {arm.name: arm.tokens for arm in plan.arms}
    for row, tokens, loss, end in run_ends(frames, apart):
        run_id, arm = str(row["run_id"]), str(row["arm"])
        budget = int(whole_steps[arm] or number_in(row["budget_tokens"]) or 0)
        outcomes[arm].append(end)
        results[arm].append(_run_result(row, end, (tokens, loss), frames.environments, budget=budget))
        # A run that diverged before its first evaluation has an empty curve, and still counts as diverged.
        if len(tokens) or end.end != "missing":
            curves[arm].append(
                Curve(run_id=run_id, arm=arm, seed=int(row["seed"]), end=end.end, tokens=tokens, loss=loss)
            )
    stops = stopped_arms(plan, outcomes)
    for arm, stop in stops.items():
        places = unused_places(outcomes[arm], stop)
        left_out = {results[arm][i].run_id for i in places}
        outcomes[arm] = [run for i, run in enumerate(outcomes[arm]) if i not in places]
        curves[arm] = [curve for curve in curves[arm] if curve.run_id not in left_out]
        results[arm] = [
            replace(run, end="unused", tokens_to_target=None, left_bound=False) if i in places else run
            for i, run in enumerate(results[arm])
        ]
    configs = read_configs(frames.configs)
    return {
        arm: _ArmRuns(
            outcomes=outcomes[arm], curves=curves[arm], results=results[arm], stopped=stops.get(arm),
            config=configs.get(arm),
        )
        for arm in outcomes
    }  # fmt: skip


def _alpha(own: _ArmRuns, base: _ArmRuns, plan: LockedPlan) -> float:
    """Return the nominal level of an arm's intervals."""
    if own.stopped is not None:
        return own.stopped.alpha
    if own is base:
        return ALPHA
    return alpha_of(own.outcomes, base.outcomes, plan.stop, ended=own.have_ended and base.have_ended)


def _effects(stopped: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], float | None]]) -> Effects:
    """Return the factors' effects; none where arms were stopped: the rest is a selection."""
    if stopped and rows:
        return Effects(reason=f"arms were stopped early ({', '.join(stopped)}): no effects", runs=len(rows))
    return factor_effects(rows)


def _run_result(
    row: dict[str, Any],
    end: Outcome,
    curve: tuple[np.ndarray, np.ndarray],
    environments: dict[str, Environment],
    *,
    budget: int,
) -> RunResult:
    evaluated, loss = curve
    environment = environments.get(str(row["run_id"]))
    started, ended = number_in(row["started_unix"]), number_in(row["ended_unix"])
    mode = row["backend_mode"]
    return RunResult(
        run_id=str(row["run_id"]),
        arm=str(row["arm"]),
        seed=int(row["seed"]),
        state=str(row["state"]),
        end=end.end,
        # The status tells it at the end of an attempt; an evaluation may be later than a killed one's.
        tokens=max(int(row["tokens"]), int(evaluated[-1]) if len(evaluated) else 0),
        budget=budget,
        tokens_to_target=end.high if end.end == "hit" else None,
        left_bound=end.end == "hit" and not end.exact,
        last_loss=float(loss[-1]) if len(loss) else None,
        message=row["message"] if isinstance(row["message"], str) else None,
        seconds=ended - started if started is not None and ended is not None else None,
        tokens_per_sec=number_in(row["tokens_per_sec"]),
        devices=(environment and environment.world_size) or 1,
        backend_mode=mode if isinstance(mode, str) else None,
    )


def _arm_result(
    entry: LockedArm, own: _ArmRuns, baseline: _ArmRuns, setting: _Setting, alpha: float
) -> ArmResult:
    """Return one arm against the baseline; of the baseline as many seeds as the arm was stopped at."""
    base = baseline.first(own.seeds)
    is_baseline = own is baseline
    paired, target = setting.plan.paired_seeds, setting.plan.target
    cost = Cost(kind="baseline")
    if not is_baseline:
        cost = token_cost(own.outcomes, base.outcomes, paired=paired, alpha=alpha)
    if own.is_selected:
        cost = replace(cost, restricted=None)
    mean = mean_tokens(own.outcomes, alpha)
    falls, base_falls = (
        None if one.config is None else decay_begins(one.config.training) for one in (own, base)
    )
    return ArmResult(
        planned=entry,
        alpha=alpha,
        stopped=own.stopped,
        tokens_to_target=mean,
        token_cost=cost,
        final_loss=final_loss(own.curves, alpha),
        difference=LossDifference(interval=Interval(note="baseline"))
        if is_baseline
        else final_difference(own.curves, base.curves, alpha, paired=paired),
        sweep=None
        if is_baseline
        else target_sweep(own.curves, base.curves, rule=target.crossing, paired=paired, alpha=alpha),
        cost_growth=Cost(kind="baseline" if is_baseline else "none")
        if is_baseline or own.is_selected
        else cost_growth(
            own.curves,
            base.curves,
            target.val_loss,
            rule=target.crossing,
            paired=paired,
            alpha=alpha,
            decay_begins=min((at for at in (falls, base_falls) if at is not None), default=None),
        ),
        reached=None if own.is_selected else reached(own.outcomes, alpha),
        restricted_mean=Interval(note="stopped early" if own.is_selected else "no results")
        if own.is_selected or setting.horizon is None
        else restricted_mean(own.outcomes, setting.horizon, alpha),
        power=None
        if is_baseline or own.stopped is not None
        else power_of(
            own.outcomes, base.outcomes, settled=is_settled(cost), estimate=cost.estimate, paired=paired
        ),
        measured=_measured(entry.name, own, base, setting, cost, alpha),
        fp4_share=None if own.config is None else share_in_fp4(own.config),
        modelled=()
        if own.config is None or base.config is None
        else modelled_speed(own.config, base.config, tokens_to_target=mean.estimate, cost=cost),
        published=() if own.config is None else published_for(own.config.recipe),
        decay_begins=falls,
        runs=tuple(own.results),
    )


def _measured(
    name: str, own: _ArmRuns, base: _ArmRuns, setting: _Setting, cost: Cost, alpha: float
) -> Measured | None:
    """Return an arm's speed, timed alone where it was, else in its runs; None where no timing counts."""
    timed = setting.throughput
    if timed is not None and name in timed.rates:
        rates, base_rates = timed.rates[name], timed.rates[setting.plan.baseline]
        return alone_speed(rates, base_rates, cost=cost, tokens=log_tokens(own.outcomes), alpha=alpha)
    if setting.timing.kind != "native":
        return None
    return measured_speed(_timed(own), _timed(base), paired=setting.plan.paired_seeds, alpha=alpha)


def _timed(runs: _ArmRuns) -> list[TimedRun]:
    used = [run for run in runs.results if run.end != "unused"]
    return [
        TimedRun(outcome=outcome, tokens_per_sec=run.tokens_per_sec, devices=run.devices)
        for outcome, run in zip(runs.outcomes, used, strict=True)
    ]


def _resolution(curves: Sequence[Curve], baseline: Sequence[Outcome]) -> Resolution:
    """Take the widest of the runs' usual intervals: the coarsest reading limits the comparison."""
    steps = [float(np.median(np.diff(curve.tokens))) for curve in curves if len(curve.tokens) > 1]
    interval = max(steps) if steps else None
    reached = mean_tokens(baseline).estimate
    share = interval / reached if interval is not None and reached else None
    return Resolution(
        interval_tokens=interval, share=share if share is not None and math.isfinite(share) else None
    )


def _distinct(environments: dict[str, Environment]) -> tuple[tuple[dict[str, Any], int], ...]:
    """Return the different machines and versions, with the number of runs on each, in the order of the plan.

    Who did which GEMM belongs to an arm's recipe, and on which of equal GPUs to the run; neither makes
    another environment of the same machine.
    """
    counts: list[tuple[dict[str, Any], int]] = []
    for one in environments.values():
        environment = {key: value for key, value in one.whole.items() if key not in _OF_THE_RUN}
        for i, (known, count) in enumerate(counts):
            if known == environment:
                counts[i] = (known, count + 1)
                break
        else:
            counts.append((environment, 1))
    return tuple(counts)


def _backends(environments: dict[str, Environment]) -> tuple[tuple[str, int], ...]:
    """Return who did which kind of GEMM and how, with the number of runs, in the order of the plan."""
    counts: dict[str, int] = {}
    for environment in environments.values():
        found = [
            f"{choice.operands} by {choice.backend}, {choice.mode}: {choice.detail}"
            for choice in environment.backend_choices or ()
        ]
        for text in dict.fromkeys(found):
            counts[text] = counts.get(text, 0) + 1
    return tuple(counts.items())
