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
from ablate.reports.findings.ends import (
    decide_stops,
    is_paired,
    number_in,
    origins,
    run_ends,
    unused_places,
)
from ablate.reports.findings.published import published_for
from ablate.reports.findings.results import Analysis, ArmResult, Measured, Resolution, RunResult
from ablate.reports.findings.timing import judge_throughput, timing_of_runs
from ablate.reports.findings.tuning import pending, rate_curves, split_frames, tuned
from ablate.reports.read.comparable import find_set_apart
from ablate.reports.statistics.cost import Cost, log_tokens, mean_tokens, token_costs
from ablate.reports.statistics.effects import Effects, factor_effects
from ablate.reports.statistics.equivalence import standing
from ablate.reports.statistics.intervals import ALPHA, Interval
from ablate.reports.statistics.losses import (
    Curve,
    LossDifference,
    final_differences,
    final_loss,
    tokens_behind,
)
from ablate.reports.statistics.power import power_of
from ablate.reports.statistics.steps import find_steps
from ablate.reports.statistics.stopping import alpha_of
from ablate.reports.statistics.survival import common_horizon, reached, restricted_mean
from ablate.reports.statistics.sweep import Sweep, cost_growths, target_sweeps
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ablate.reports.findings.timing import RunTiming, Throughput
    from ablate.reports.read.load import StudyFrames
    from ablate.reports.statistics.stopping import Stopped
    from ablate.run.config import RunConfig
    from ablate.run.outcome import Outcome
    from ablate.store.lock import LockedArm, LockedPlan
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
    def decay_begins(self) -> int | None:
        """Tokens after which the learning rate falls at the end; None where it does not, or is not known."""
        return None if self.config is None else decay_begins(self.config.training)

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


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Each arm against the baseline: what takes the other arms' runs, too."""

    costs: Mapping[str, Cost]
    differences: Mapping[str, LossDifference]
    sweeps: Mapping[str, Sweep]
    growths: Mapping[str, Cost]


_PARTS = ("costs", "differences", "sweeps", "growths")


def _costs_over(base: str, runs: Mapping[str, _ArmRuns], plan: LockedPlan, origin: int) -> dict[str, Cost]:
    """Return each arm's cost over one of them, of as many seeds as both count, at the stricter level."""
    other = runs[base]
    sides, alphas = {}, {}
    for name, own in runs.items():
        if name != base:
            n = min((one.seeds for one in (own, other) if one.seeds is not None), default=None)
            sides[name] = (own.outcomes[:n], other.outcomes[:n])
            alphas[name] = min(own.alpha, other.alpha)
    paired = is_paired(plan, origin)
    costs = token_costs(sides, paired=paired, alpha=alphas, moderated=plan.is_moderated)
    return {
        name: replace(
            cost,
            counted_from=origin,
            restricted=None if runs[name].is_selected or other.is_selected else cost.restricted,
        )
        for name, cost in costs.items()
    }


def _compare(runs: Mapping[str, _ArmRuns], plan: LockedPlan, origin: int) -> _Compared:
    """Compare arms counted from one place with the baseline: as many seeds as the arm was stopped at."""
    base = runs[plan.baseline]
    others = {name: own for name, own in runs.items() if own is not base}
    sides = {name: (own.curves, base.first(own.seeds).curves) for name, own in others.items()}
    alphas = {name: own.alpha for name, own in others.items()}
    how = {"paired": is_paired(plan, origin), "moderated": plan.is_moderated}
    falls = {
        name: min((at for one in (own, base) if (at := one.decay_begins) is not None), default=None)
        for name, own in others.items()
    }
    complete = {name: side for name, side in sides.items() if not others[name].is_selected}
    target = plan.target
    return _Compared(
        costs=_costs_over(plan.baseline, runs, plan, origin),
        differences=final_differences(sides, alphas, **how),
        sweeps={} if target is None else target_sweeps(sides, alphas, rule=target.crossing, **how),
        growths={}
        if target is None
        else cost_growths(complete, alphas, target.val_loss, decay_begins=falls, rule=target.crossing, **how),
    )


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
        timing=timing_of_runs(frames.environments, frames.attempts, plan),
        throughput=judge_throughput(frames, left_out=apart, waived=waived),
        horizon=None if plan.target is None else common_horizon(own.whole for own in runs.values()),
    )
    bases[plan.baseline] = base
    # Arms that fork are compared with the baseline from there on, and with each other where they share it.
    groups: dict[int, dict[str, _ArmRuns]] = {}
    for name, own in runs.items():
        groups.setdefault(own.origin, {plan.baseline: bases[name]})[name] = own
    compared = [_compare(group, plan, origin) for origin, group in groups.items()]
    every = _Compared(
        **{part: {k: v for one in compared for k, v in getattr(one, part).items()} for part in _PARTS}
    )
    costs_over = cache(lambda first, origin: _costs_over(first, groups[origin], plan, origin))
    arms = tuple(
        _arm_result(entry, runs[entry.name], bases[entry.name], setting, every) for entry in plan.arms
    )
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
            lambda first, second: costs_over(first, runs[second].origin)[second],
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
    runs = {arm: [(end, curve) for end, curve, _ in own] for arm, own in ends.items()}
    stops = decide_stops(plan, runs, origin).stopped
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
            replace(
                run, end="unused", tokens_to_target=None, interpolated=None, fitted=None, left_bound=False
            )
            if i in places
            else run
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
        interpolated=end.interpolated,
        fitted=end.fitted,
        left_bound=end.end == "hit" and not end.exact,
        last_loss=float(curve.loss[-1]) if len(curve.loss) else None,
        message=row["message"] if isinstance(row["message"], str) else None,
        seconds=ended - started if started is not None and ended is not None else None,
        tokens_per_sec=number_in(row["tokens_per_sec"]),
        devices=(environment and environment.world_size) or 1,
        backend_mode=mode if isinstance(mode, str) else None,
    )


def _arm_result(
    entry: LockedArm, own: _ArmRuns, baseline: _ArmRuns, setting: _Setting, compared: _Compared
) -> ArmResult:
    """Return one arm against the baseline; of the baseline as many seeds as the arm was stopped at."""
    base = baseline.first(own.seeds)
    is_baseline = own is baseline
    alpha, target = own.alpha, setting.plan.target
    cost = Cost(kind="baseline") if is_baseline else compared.costs[entry.name]
    mean = mean_tokens(own.outcomes, alpha)
    difference = compared.differences.get(entry.name, LossDifference(note="baseline"))
    margin = setting.plan.margin
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
        sweep=compared.sweeps.get(entry.name),
        cost_growth=compared.growths.get(entry.name, Cost(kind="baseline" if is_baseline else "none")),
        reached=None if own.is_selected or target is None else reached(own.whole, alpha),
        restricted_mean=Interval(
            note="stopped early" if own.is_selected else NO_TARGET if target is None else "no results"
        )
        if own.is_selected or setting.horizon is None
        else restricted_mean(own.whole, setting.horizon, alpha),
        power=None if is_baseline or own.stopped is not None else power_of(cost, own.outcomes, base.outcomes),
        measured=_measured(entry.name, own, base, setting, cost),
        fp4_share=None if own.config is None else speed.share_in_fp4(own.config),
        modelled=()
        if own.config is None or base.config is None
        else speed.modelled_speed(own.config, base.config, tokens_to_target=mean.estimate, cost=cost),
        published=() if own.config is None else published_for(own.config.recipe),
        decay_begins=own.decay_begins,
        counted_from=own.origin,
        runs=tuple(own.results),
    )


def _is_falling(own: _ArmRuns, base: _ArmRuns, tokens: int | None) -> bool:
    """Tell whether the learning rate of either falls there, so that the curve's slope is not its own."""
    for one in (own, base):
        if one.config is not None and one.config.training.schedule == "cosine":
            return True
        if one.decay_begins is not None and (tokens or 0) > one.decay_begins:
            return True
    return False


def _measured(name: str, own: _ArmRuns, base: _ArmRuns, setting: _Setting, cost: Cost) -> Measured | None:
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


def _resolution(runs: Iterable[_ArmRuns], baseline: Sequence[Outcome]) -> Resolution:
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
