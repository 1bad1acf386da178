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
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.findings import speed
from ablate.reports.findings.ends import is_paired, number_in, origins, run_ends, stopped_arms, unused_places
from ablate.reports.findings.published import published_for
from ablate.reports.findings.results import Analysis, ArmResult, Measured, Resolution, RunResult
from ablate.reports.findings.timing import judge_throughput, timing_of_runs
from ablate.reports.findings.tuning import pending, rate_curves, split_frames, tuned
from ablate.reports.read.comparable import find_set_apart
from ablate.reports.statistics.cost import Cost, is_settled, log_tokens, mean_tokens, token_cost
from ablate.reports.statistics.effects import Effects, factor_effects
from ablate.reports.statistics.intervals import ALPHA, Interval
from ablate.reports.statistics.losses import Curve, LossDifference, final_difference, final_loss
from ablate.reports.statistics.power import power_of
from ablate.reports.statistics.steps import find_steps
from ablate.reports.statistics.stopping import alpha_of
from ablate.reports.statistics.survival import common_horizon, reached, restricted_mean
from ablate.reports.statistics.sweep import cost_growth, target_sweep
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
    run has one, as of logs that others wrote. ``alpha``: the nominal level of the arm's intervals.
    ``origin``: the tokens from which the outcomes are counted.
    """

    outcomes: Sequence[Outcome]
    curves: Sequence[Curve]
    results: Sequence[RunResult]
    stopped: Stopped | None
    config: RunConfig | None
    alpha: float = ALPHA
    origin: int = 0

    @property
    def whole(self) -> list[Outcome]:
        """The outcomes counted from the beginning."""
        return [run.after(-self.origin) for run in self.outcomes]

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

    def cost_over(self, other: _ArmRuns, *, paired: bool) -> Cost:
        """Return the token cost over another arm, of as many seeds as both count, at the stricter level."""
        n = min((own.seeds for own in (self, other) if own.seeds is not None), default=None)
        alpha = min(self.alpha, other.alpha)
        cost = token_cost(self.outcomes[:n], other.outcomes[:n], paired=paired, alpha=alpha)
        cost = replace(cost, counted_from=self.origin)
        return replace(cost, restricted=None) if self.is_selected or other.is_selected else cost


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
    by_origin = {origin: _arm_runs(frames, apart, origin) for origin in origins(plan)}
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
        timing=timing_of_runs(frames.environments, frames.attempts),
        throughput=judge_throughput(frames, left_out=apart, waived=waived),
        horizon=common_horizon(own.whole for own in runs.values()),
    )
    bases[plan.baseline] = base
    arms = tuple(_arm_result(entry, runs[entry.name], bases[entry.name], setting) for entry in plan.arms)
    curves = tuple(curve for own in by_origin[0].values() for curve in own.curves)
    ended = [value for row in frames.runs["ended_unix"] if (value := number_in(row)) is not None]
    token_effects, loss_effects = _effects(plan, runs)
    return Analysis(
        plan=plan,
        arms=arms,
        steps=find_steps(
            # The baseline's second arm would make each of its steps once more.
            {
                arm.name: frames.configs[arm.name]
                for arm in plan.arms
                if arm.name in frames.configs and not arm.again
            },
            # Of one configuration but for a GEMM, so also of one fork.
            lambda first, second: runs[second].cost_over(
                runs[first], paired=is_paired(plan, runs[second].origin)
            ),
        ),
        rate_curves=rate_curves(arms, frames.configs, plan.baseline),
        resolution=_resolution(curves, base.outcomes),
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
    )


def _arm_runs(frames: StudyFrames, apart: Collection[str], origin: int) -> dict[str, _ArmRuns]:
    """Return every arm's runs, counted from ``origin``, in the order of the plan; ``apart``: no results."""
    plan = frames.plan
    ends: dict[str, list[tuple[Outcome, Curve, RunResult]]] = {arm.name: [] for arm in plan.arms}
    whole_steps = {arm.name: arm.tokens for arm in plan.arms}
    for row, curve, end in run_ends(frames, apart, origin):
        budget = int(whole_steps[curve.arm] or number_in(row["budget_tokens"]) or 0)
        result = _run_result(row, end, curve, frames.environments, budget=budget)
        ends[curve.arm].append((end, curve, result))
    stops = stopped_arms(plan, {arm: [end for end, _, _ in own] for arm, own in ends.items()}, origin)
    configs = speed.read_configs(frames.configs)
    return {
        arm: replace(_used(own, stops.get(arm), configs.get(arm)), origin=origin) for arm, own in ends.items()
    }


def _used(
    runs: Sequence[tuple[Outcome, Curve, RunResult]], stopped: Stopped | None, config: RunConfig | None
) -> _ArmRuns:
    """Return an arm's runs; those that a stop made needless are among the results alone."""
    places = unused_places([end for end, _, _ in runs], stopped) if stopped else frozenset()
    used = [run for i, run in enumerate(runs) if i not in places]
    return _ArmRuns(
        outcomes=[end for end, _, _ in used],
        # A run that diverged before its first evaluation has an empty curve, and still counts as diverged.
        curves=[curve for end, curve, _ in used if len(curve.tokens) or end.end != "missing"],
        results=[
            replace(run, end="unused", tokens_to_target=None, left_bound=False) if i in places else run
            for i, (_, _, run) in enumerate(runs)
        ],
        stopped=stopped,
        config=config,
    )


def _alpha(own: _ArmRuns, base: _ArmRuns, plan: LockedPlan) -> float:
    """Return the nominal level of an arm's intervals."""
    if own.stopped is not None:
        return own.stopped.alpha
    if own is base:
        return ALPHA
    return alpha_of(own.outcomes, base.outcomes, plan.stop, ended=own.have_ended and base.have_ended)


def _effects(plan: LockedPlan, runs: Mapping[str, _ArmRuns]) -> tuple[Effects, Effects]:
    """Return the factors' effects on log tokens to target and on the final loss.

    There are none where arms were stopped, because the remaining arms were selected by their results.
    """
    in_grid = [(entry.factors, runs[entry.name]) for entry in plan.arms if entry.factors]
    stopped = ", ".join(name for name, own in runs.items() if own.stopped is not None)
    places = {runs[entry.name].origin for entry in plan.arms if entry.factors}
    tokens = [
        (factors, math.log(run.high) if run.exact else None)
        for factors, own in in_grid
        for run in own.outcomes
        if run.end != "missing"
    ]
    losses = [
        (factors, None if curve.end == "diverged" else float(curve.loss[-1]))
        for factors, own in in_grid
        for curve in own.curves
        if curve.end != "missing"
    ]
    why = f"arms were stopped early ({stopped}): no effects" if stopped else ""
    if len(places) > 1:
        why = "the arms' tokens are not counted from one place: no effects"
    on_tokens, on_loss = (
        Effects(reason=why, runs=len(rows)) if why and rows else factor_effects(rows)
        for rows in (tokens, losses)
    )
    return on_tokens, on_loss


def _run_result(
    row: dict[str, Any], end: Outcome, curve: Curve, environments: dict[str, Environment], *, budget: int
) -> RunResult:
    environment = environments.get(curve.run_id)
    started, ended = number_in(row["started_unix"]), number_in(row["ended_unix"])
    mode = row["backend_mode"]
    return RunResult(
        run_id=curve.run_id,
        arm=curve.arm,
        seed=curve.seed,
        state=str(row["state"]),
        end=end.end,
        # The status tells it at the end of an attempt; an evaluation may be later than a killed one's.
        tokens=max(int(row["tokens"]), int(curve.tokens[-1]) if len(curve.tokens) else 0),
        budget=budget,
        tokens_to_target=end.high if end.end == "hit" else None,
        left_bound=end.end == "hit" and not end.exact,
        last_loss=float(curve.loss[-1]) if len(curve.loss) else None,
        message=row["message"] if isinstance(row["message"], str) else None,
        seconds=ended - started if started is not None and ended is not None else None,
        tokens_per_sec=number_in(row["tokens_per_sec"]),
        devices=(environment and environment.world_size) or 1,
        backend_mode=mode if isinstance(mode, str) else None,
    )


def _arm_result(entry: LockedArm, own: _ArmRuns, baseline: _ArmRuns, setting: _Setting) -> ArmResult:
    """Return one arm against the baseline; of the baseline as many seeds as the arm was stopped at."""
    base = baseline.first(own.seeds)
    is_baseline = own is baseline
    paired, target, alpha = is_paired(setting.plan, own.origin), setting.plan.target, own.alpha
    cost = Cost(kind="baseline") if is_baseline else own.cost_over(baseline, paired=paired)
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
        difference=LossDifference(note="baseline")
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
        reached=None if own.is_selected else reached(own.whole, alpha),
        restricted_mean=Interval(note="stopped early" if own.is_selected else "no results")
        if own.is_selected or setting.horizon is None
        else restricted_mean(own.whole, setting.horizon, alpha),
        power=None
        if is_baseline or own.stopped is not None
        else power_of(
            own.outcomes, base.outcomes, settled=is_settled(cost), estimate=cost.estimate, paired=paired
        ),
        measured=_measured(entry.name, own, base, setting, cost),
        fp4_share=None if own.config is None else speed.share_in_fp4(own.config),
        modelled=()
        if own.config is None or base.config is None
        else speed.modelled_speed(own.config, base.config, tokens_to_target=mean.estimate, cost=cost),
        published=() if own.config is None else published_for(own.config.recipe),
        decay_begins=falls,
        counted_from=own.origin,
        runs=tuple(own.results),
    )


def _measured(name: str, own: _ArmRuns, base: _ArmRuns, setting: _Setting, cost: Cost) -> Measured | None:
    """Return an arm's speed, timed alone where it was, else in its runs; None where no timing counts."""
    timed = setting.throughput
    if timed is not None and name in timed.tokens_per_sec:
        rates, base_rates = timed.tokens_per_sec[name], timed.tokens_per_sec[setting.plan.baseline]
        return speed.alone_speed(
            rates, base_rates, cost=cost, tokens=log_tokens(own.outcomes), alpha=own.alpha
        )
    if setting.timing.kind != "native":
        return None
    return speed.measured_speed(
        own.results, base.results, paired=is_paired(setting.plan, own.origin), alpha=own.alpha
    )


def _resolution(curves: Sequence[Curve], baseline: Sequence[Outcome]) -> Resolution:
    """Take the widest of the runs' usual intervals: the coarsest reading limits the comparison."""
    steps = [float(np.median(np.diff(curve.tokens))) for curve in curves if len(curve.tokens) > 1]
    interval = max(steps, default=None)
    reached = mean_tokens(baseline).estimate
    share = interval / reached if interval is not None and reached else math.inf
    return Resolution(tokens=interval, share_of_tokens_to_target=share if math.isfinite(share) else None)


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
