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
from ablate.reports.findings.published import Published, published_for
from ablate.reports.findings.sensitivity import RateCurve, rate_curves
from ablate.reports.findings.speed import (
    Measured,
    Modelled,
    TimedRun,
    alone_speed,
    measured_speed,
    modelled_speed,
    read_configs,
    share_in_fp4,
)
from ablate.reports.findings.timing import RunTiming, Throughput, judge_throughput, timing_of_runs
from ablate.reports.findings.tuning import Tuned, pending, split_frames, tuned
from ablate.reports.read.comparable import SetApart, find_set_apart
from ablate.reports.statistics.cost import Cost, is_settled, log_tokens, mean_tokens, token_cost
from ablate.reports.statistics.effects import Effects, factor_effects
from ablate.reports.statistics.growth import cost_growth
from ablate.reports.statistics.intervals import ALPHA, Interval
from ablate.reports.statistics.losses import Curve, LossDifference, final_difference, final_loss
from ablate.reports.statistics.power import Power, power_of
from ablate.reports.statistics.steps import Step, find_steps
from ablate.reports.statistics.stopping import Stopped, alpha_of
from ablate.reports.statistics.survival import Reached, common_horizon, reached, restricted_mean
from ablate.reports.statistics.sweep import Sweep, target_sweep
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.reports.read.load import StudyFrames
    from ablate.run.config import RunConfig
    from ablate.run.outcome import End, Outcome, Rule
    from ablate.store.lock import DroppedCell, LockedArm, StopRule, Target
    from ablate.store.records import Environment

_OF_THE_RUN = (
    "backend", "backend_mode", "backend_detail", "backend_choices", "self_tests", "timing_valid",
    "timing_why_not", "gpu_uuid",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run: how it stands (``state``), and how it ended with regard to the target (``end``).

    ``tokens`` trained of the ``budget``, in tokens as well.
    """

    run_id: str
    arm: str
    seed: int
    state: str
    end: End
    tokens: int
    budget: int
    tokens_to_target: float | None
    left_bound: bool
    last_loss: float | None
    message: str | None
    seconds: float | None
    tokens_per_sec: float | None
    devices: int
    backend_mode: str | None


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm against the baseline. ``n`` counts results; ``missing`` the runs that are none (yet).

    ``again``: the baseline once more with other seeds, where nothing should be found. ``alpha``: the nominal
    level of its intervals. ``stopped``: why it was stopped early; then ``unused`` runs count for nothing, not
    even as missing, and ``tokens_saved`` of their budget were not trained. ``measured``: None without timing
    that counts, see ``timing``. ``fp4_share``, ``modelled``: None and empty without a configuration.
    ``cost_growth``: of (1 + token cost) from half-way to the target on.
    ``decay_begins``: tokens after which its learning rate falls at the end; None where it does not.
    """

    name: str
    description: str | None
    again: bool
    recipe: str
    differs: dict[str, tuple[Any, Any]]
    folded: tuple[str, ...]
    n: int
    hit: int
    censored: int
    diverged: int
    missing: int
    alpha: float
    stopped: Stopped | None
    unused: int
    tokens_saved: int
    tokens_to_target: Interval
    token_cost: Cost
    break_even: Interval
    final_loss: Interval
    difference: LossDifference
    sweep: Sweep | None
    cost_growth: Cost
    power: Power | None
    reached: Reached | None
    restricted_mean: Interval
    measured: Measured | None
    fp4_share: float | None
    modelled: tuple[Modelled, ...]
    published: tuple[Published, ...]
    decay_begins: int | None
    runs: tuple[RunResult, ...]


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The evaluation interval, in tokens and as a share of the baseline's tokens to target."""

    interval_tokens: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything that the report says in numbers.

    ``tuning``: of a study that tunes its arms; ``arms`` are then those at the values found.
    """

    study: str
    description: str | None
    baseline: str
    target: Target
    paired: bool
    rule: StopRule | None
    training: dict[str, Any]
    arms: tuple[ArmResult, ...]
    steps: tuple[Step, ...]
    rate_curves: tuple[RateCurve, ...]
    resolution: Resolution
    timing: RunTiming
    throughput: Throughput | None
    environments: tuple[tuple[dict[str, Any], int], ...]
    backends: tuple[tuple[str, int], ...]
    failed_self_tests: int
    set_apart: tuple[SetApart, ...]
    waived: tuple[str, ...]
    horizon_tokens: float | None
    token_effects: Effects
    loss_effects: Effects
    dropped: tuple[DroppedCell, ...]
    last_ended_unix: float | None
    curves: tuple[Curve, ...]
    tuning: Tuned | None = None

    @property
    def baseline_arm(self) -> ArmResult:
        """The arm that costs are stated against."""
        return next(arm for arm in self.arms if arm.name == self.baseline)

    @property
    def others(self) -> tuple[ArmResult, ...]:
        """The arms compared with the baseline."""
        return tuple(arm for arm in self.arms if arm.name != self.baseline)

    @property
    def decay_begins(self) -> int | None:
        """Tokens after which the learning rate falls at the end, where that is so of all arms alike."""
        starts = {arm.decay_begins for arm in self.arms}
        return starts.pop() if len(starts) == 1 else None

    @property
    def every_arm(self) -> tuple[ArmResult, ...]:
        """All arms of the plan: before those at the values found for them, those at the study's own."""
        return self.arms if self.tuning is None else (*self.tuning.others, *self.arms)

    @property
    def stopped(self) -> tuple[ArmResult, ...]:
        """The arms that were stopped early."""
        return tuple(arm for arm in self.every_arm if arm.stopped is not None)

    @property
    def missing(self) -> int:
        """Runs of the plan that are no results, and are needed."""
        return sum(arm.missing for arm in self.every_arm)

    @property
    def planned(self) -> int:
        """Runs of the plan."""
        return sum(len(arm.runs) for arm in self.every_arm)


def analyse(frames: StudyFrames, *, waive: Collection[str] = ()) -> Analysis:
    """Compute every number of the report.

    ``waive`` names settings (``comparable.SETTINGS``) in which runs may differ and are pooled all the same,
    besides those that the study waives. Of a study whose arms were tuned: at the values found for them.
    """
    if (parts := split_frames(frames)) is not None:
        at_shared, at_tuned = (_analyse(part, waive) for part in parts)
        return replace(at_tuned, tuning=tuned(frames.plan, at_shared, at_tuned))
    return replace(_analyse(frames, waive), tuning=pending(frames.plan))


def _analyse(frames: StudyFrames, waive: Collection[str]) -> Analysis:
    """Compute every number of one comparison."""
    plan = frames.plan
    waived = tuple(sorted({*waive, *plan.waive}))
    set_apart = find_set_apart(frames, waived)
    apart = {found.run_id: found for found in set_apart}
    target, paired = plan.target, plan.paired_seeds
    outcomes: dict[str, list[Outcome]] = {}
    curves: dict[str, list[Curve]] = {}
    results: dict[str, list[RunResult]] = {}
    whole_steps = {arm.name: arm.tokens for arm in plan.arms}
    for row, tokens, loss, end in run_ends(frames, apart):
        run_id, arm = str(row["run_id"]), str(row["arm"])
        outcomes.setdefault(arm, []).append(end)
        results.setdefault(arm, []).append(
            _run_result(
                row,
                end,
                (tokens, loss),
                frames.environments,
                budget=int(whole_steps[arm] or number_in(row["budget_tokens"]) or 0),
            )
        )
        # A run that diverged before its first evaluation has an empty curve, and still counts as diverged.
        if len(tokens) or end.end != "missing":
            curves.setdefault(arm, []).append(
                Curve(run_id=run_id, arm=arm, seed=int(row["seed"]), end=end.end, tokens=tokens, loss=loss)
            )
    base = plan.baseline
    stops = stopped_arms(plan, outcomes)
    unused = {arm: unused_places(outcomes[arm], stop) for arm, stop in stops.items()}
    for arm, places in unused.items():
        left_out = {results[arm][i].run_id for i in places}
        outcomes[arm] = [run for i, run in enumerate(outcomes[arm]) if i not in places]
        curves[arm] = [curve for curve in curves.get(arm, []) if curve.run_id not in left_out]
        results[arm] = [
            replace(run, end="unused", tokens_to_target=None, left_bound=False) if i in places else run
            for i, run in enumerate(results[arm])
        ]
    base_ended = _all_ended(results.get(base, []))
    alphas = {
        entry.name: stops[entry.name].alpha
        if entry.name in stops
        else ALPHA
        if entry.name == base
        else alpha_of(
            outcomes.get(entry.name, []),
            outcomes.get(base, []),
            plan.stop,
            ended=base_ended and _all_ended(results.get(entry.name, [])),
        )
        for entry in plan.arms
    }
    timing = timing_of_runs(frames.environments, frames.attempts)
    throughput = judge_throughput(frames, left_out=apart.keys(), waived=waived)
    configs = read_configs(frames.configs)
    horizon = common_horizon(outcomes.values())
    # Their other runs are those that happened to end before: no interval comes of them.
    selected = {name for name, stop in stops.items() if stop.kind == "diverged"}
    # At a look both sides have its number of seeds.
    seeds = {entry.name: stops[entry.name].seeds if entry.name in stops else None for entry in plan.arms}
    arms = tuple(
        _arm_result(
            entry,
            outcomes=outcomes.get(entry.name, []),
            base_outcomes=outcomes.get(base, [])[: seeds[entry.name]],
            curves=curves.get(entry.name, []),
            base_curves=curves.get(base, [])[: seeds[entry.name]],
            runs=results.get(entry.name, []),
            base_runs=results.get(base, [])[: seeds[entry.name]],
            config=configs.get(entry.name),
            base_config=configs.get(base),
            timing=timing,
            throughput=throughput,
            horizon=horizon,
            baseline=base,
            paired=paired,
            target=target.val_loss,
            rule=target.crossing,
            alpha=alphas[entry.name],
            stopped=stops.get(entry.name),
            selected=entry.name in selected,
        )
        for entry in plan.arms
    )
    every = tuple(curve for entry in plan.arms for curve in curves.get(entry.name, []))
    ended = [value for row in frames.runs["ended_unix"] if (value := number_in(row)) is not None]
    return Analysis(
        study=plan.study,
        description=plan.description,
        baseline=base,
        target=target,
        paired=paired,
        rule=plan.stop,
        training=plan.training,
        arms=arms,
        steps=tuple(
            step
            if {step.from_arm, step.to_arm}.isdisjoint(selected)
            else replace(step, cost=replace(step.cost, restricted=None))
            for step in find_steps(
                # The baseline's second arm would make each of its steps once more.
                {
                    entry.name: frames.configs[entry.name]
                    for entry in plan.arms
                    if entry.name in frames.configs and not entry.again
                },
                {entry.name: outcomes.get(entry.name, []) for entry in plan.arms},
                paired=paired,
                alphas=alphas,
                seeds=seeds,
            )
        ),
        rate_curves=rate_curves(arms, frames.configs, base),
        resolution=_resolution(every, outcomes.get(base, [])),
        timing=timing,
        throughput=throughput,
        environments=_distinct(frames.environments),
        backends=_backends(frames.environments),
        token_effects=_effects(
            stops,
            [
                (entry.factors, math.log(run.high) if run.exact else None)
                for entry in plan.arms
                if entry.factors
                for run in outcomes.get(entry.name, [])
                if run.end != "missing"
            ],
        ),
        loss_effects=_effects(
            stops,
            [
                (entry.factors, None if curve.end == "diverged" else float(curve.loss[-1]))
                for entry in plan.arms
                if entry.factors
                for curve in curves.get(entry.name, [])
                if curve.end != "missing"
            ],
        ),
        failed_self_tests=sum(
            any(test.get("passed") is False for test in environment.self_tests or ())
            for environment in frames.environments.values()
        ),
        set_apart=set_apart,
        waived=waived,
        horizon_tokens=horizon,
        dropped=plan.dropped,
        last_ended_unix=max(ended) if ended else None,
        curves=every,
    )


def _all_ended(runs: Sequence[RunResult]) -> bool:
    """Tell whether no run is still to come: failed ones are not, unless somebody asks for them again."""
    return all(run.state in ("finished", "diverged", "failed") for run in runs)


def _effects(stops: Mapping[str, Stopped], rows: Sequence[tuple[Mapping[str, Any], float | None]]) -> Effects:
    """Return the factors' effects; none where arms were stopped: the rest is a selection."""
    if stops and rows:
        return Effects(reason=f"arms were stopped early ({', '.join(stops)}): no effects", runs=len(rows))
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
    entry: LockedArm,
    *,
    outcomes: Sequence[Outcome],
    base_outcomes: Sequence[Outcome],
    curves: Sequence[Curve],
    base_curves: Sequence[Curve],
    runs: Sequence[RunResult],
    base_runs: Sequence[RunResult],
    config: RunConfig | None,
    base_config: RunConfig | None,
    timing: RunTiming,
    throughput: Throughput | None,
    horizon: float | None,
    baseline: str,
    paired: bool,
    target: float,
    rule: Rule,
    alpha: float,
    stopped: Stopped | None,
    selected: bool,
) -> ArmResult:
    is_baseline = entry.name == baseline
    ends = [run.end for run in outcomes]
    cost = (
        Cost(kind="baseline")
        if is_baseline
        else token_cost(outcomes, base_outcomes, paired=paired, alpha=alpha)
    )
    mean = mean_tokens(outcomes, alpha)
    if selected:
        cost = replace(cost, restricted=None)

    def plus_one(value: float | None) -> float | None:
        return None if value is None else 1 + value

    falls, base_falls = (None if one is None else decay_begins(one.training) for one in (config, base_config))
    measured = None
    if throughput is not None and entry.name in throughput.rates:
        rates, base_rates = throughput.rates[entry.name], throughput.rates[baseline]
        measured = alone_speed(rates, base_rates, cost=cost, tokens=log_tokens(outcomes), alpha=alpha)
    elif timing.kind == "native":
        measured = measured_speed(
            _timed(outcomes, runs), _timed(base_outcomes, base_runs), paired=paired, alpha=alpha
        )
    return ArmResult(
        name=entry.name,
        description=entry.description,
        again=entry.again,
        recipe=entry.recipe or "",
        differs=entry.differs,
        folded=entry.folded,
        n=sum(end != "missing" for end in ends),
        hit=ends.count("hit"),
        censored=ends.count("censored"),
        diverged=ends.count("diverged"),
        missing=ends.count("missing"),
        alpha=alpha,
        stopped=stopped,
        unused=sum(run.end == "unused" for run in runs),
        tokens_saved=sum(max(0, run.budget - run.tokens) for run in runs if run.end == "unused"),
        tokens_to_target=mean,
        token_cost=cost,
        break_even=Interval(
            estimate=plus_one(cost.estimate), low=plus_one(cost.low), high=plus_one(cost.high)
        ),
        final_loss=final_loss(curves, alpha),
        difference=LossDifference(interval=Interval(note="baseline"))
        if is_baseline
        else final_difference(curves, base_curves, alpha, paired=paired),
        sweep=None
        if is_baseline
        else target_sweep(curves, base_curves, rule=rule, paired=paired, alpha=alpha),
        cost_growth=Cost(kind="baseline" if is_baseline else "none")
        if is_baseline or selected
        else cost_growth(
            curves,
            base_curves,
            target,
            rule=rule,
            paired=paired,
            alpha=alpha,
            decay_begins=min((at for at in (falls, base_falls) if at is not None), default=None),
        ),
        reached=None if selected else reached(outcomes, alpha),
        restricted_mean=Interval(note="stopped early" if selected else "no results")
        if selected or horizon is None
        else restricted_mean(outcomes, horizon, alpha),
        power=None
        if is_baseline or stopped is not None
        else power_of(
            outcomes, base_outcomes, settled=is_settled(cost), estimate=cost.estimate, paired=paired
        ),
        measured=measured,
        fp4_share=None if config is None else share_in_fp4(config),
        modelled=()
        if config is None or base_config is None
        else modelled_speed(config, base_config, tokens_to_target=mean.estimate, cost=cost),
        published=() if config is None else published_for(config.recipe),
        decay_begins=falls,
        runs=tuple(runs),
    )


def _timed(outcomes: Sequence[Outcome], runs: Sequence[RunResult]) -> list[TimedRun]:
    used = [run for run in runs if run.end != "unused"]
    return [
        TimedRun(outcome=outcome, tokens_per_sec=run.tokens_per_sec, devices=run.devices)
        for outcome, run in zip(outcomes, used, strict=True)
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
