"""What an arm gains in time: measured by ``ablate check steps STUDY``; as logged; modelled.

Measured: the ratio of throughputs, and the end-to-end speed-up, which is the ratio of the times to target:
the throughput ratio over (1 + token cost), whose errors are independent. As logged it comes from the logs'
own timing, by Welch's (or paired) intervals on logs.

The record of ``ablate check steps STUDY`` counts for an arm only if it is native, was taken on an idle and
undivided device, and has the configuration, code and kind of device of the arm's runs.

The tokens/s that our own runs train at give no measured figure. Imported logs give one only if they say that
both arms had the same devices. An arm without a resolved configuration, as in such logs, has no modelled
figure.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ablate.modelled.speed import HARDWARE, fp4_share, seconds_range, speed_up, token_time, workload_of
from ablate.results.ends import trained_on
from ablate.results.intervals import (
    ALPHA,
    Interval,
    combined_interval,
    contrast,
    difference,
    exponential,
    mean_estimate,
    mean_interval,
    t_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate, Method
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import LockedPlan
    from ablate.store.records import Environment, RecordedConfig

_TURNS = 2
"""``ablate check steps STUDY`` times the arms forwards, then backwards."""
_HOUR_SEC = 3600.0
_NOT_VOUCHED = "a record that does not vouch for it"
_NOT_ALL = Interval(note="not every run has a figure")


@dataclass(frozen=True, kw_only=True)
class RunTiming:
    """Where the runs' tokens/s come from.

    ``kind``: ``native`` or ``emulated`` arithmetic; ``logged``, from imported logs; ``command``, from
    commands' logs. ``untold``: for logged runs, by arm, why its speed cannot be compared with the baseline's.
    """

    kind: Literal["native", "emulated", "logged", "command"]
    untold: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The part of ``ablate check steps STUDY`` that counts, and the reasons against the rest.

    ``tokens_per_sec``: of every repeat, by arm; empty if the baseline has none. ``not_used``: by arm, why its
    timing does not count. ``steps``: in each repeat. ``repeats``: of each arm.
    """

    device: str
    arch: str
    versions: dict[str, str | None]
    steps: int
    repeats: int
    measured_unix: float
    tokens_per_sec: dict[str, tuple[float, ...]]
    not_used: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Timing that counts: throughput and end-to-end speed over the baseline's, and device-hours to target.

    ``timed``: alone by ``ablate check steps STUDY``, or as the logs of imported runs or commands say.
    """

    timed: Literal["alone", "as logged"]
    throughput: Interval
    end_to_end: Interval
    hours: Interval


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """An arm on named hardware. ``speed``: step speed over the baseline's; empty if either cannot run there.

    ``net``: speed / (1 + token cost). ``hours``: device-hours of training to the target, empty unless all
    runs reached it. Intervals are the model's 95 % ranges; that of ``net`` includes the token cost's.
    """

    hardware: str
    speed: Interval
    net: Interval
    hours: Interval


def timing_of_runs(environments: Mapping[str, Environment], plan: LockedPlan) -> RunTiming:
    """Say where the runs' tokens/s come from."""
    modes = {environment.backend_mode for environment in environments.values()}
    if "imported" in modes:
        return RunTiming(kind="logged", untold=_untold(plan))
    if modes == {"command"}:
        return RunTiming(kind="command")
    return RunTiming(kind="native" if modes == {"native"} else "emulated")


def _untold(plan: LockedPlan) -> dict[str, str]:
    """Map the arms whose logs do not say that they had the baseline's hardware to the reason."""
    pairs = {arm.name: arm.differs.get("hardware") for arm in plan.arms}
    # ``differs`` is relative to the baseline now in use, which need not be the study's own.
    base = next((pair[0] for pair in pairs.values() if pair), plan.training.get("hardware"))
    found = {}
    for name, pair in pairs.items():
        own = pair[1] if pair else base
        if own is None or base is None:
            whose = plan.baseline if base is None else name
            found[name] = (
                f"the logs of {whose} do not tell one kind and number of devices (`ablate import --hardware`)"
            )
        elif own != base:
            found[name] = f"{name} was trained on {own}, {plan.baseline} on {base}"
    if len(found) == len(plan.arms) - 1:
        found.setdefault(plan.baseline, "no arm to compare it with")
    return found


def judge_throughput(frames: StudyFrames, *, left_out: Collection[str]) -> Throughput | None:
    """Decide for which arms the record of ``ablate check steps STUDY`` counts; None without a record.

    ``left_out``: the runs that are not pooled.
    """
    record = frames.throughput
    if record is None:
        return None
    timed = {one.arm: one for one in record.arms}
    pooled = {run_id for run_id, run in frames.runs.items() if run.has_result} - set(left_out)

    def why_not(arm: str, ids: Sequence[str]) -> str | None:
        one = timed.get(arm)
        if one is None:
            return "not timed"
        if one.backend_mode != "native":
            return f"{one.backend_mode} arithmetic"
        if not one.timing_valid:
            return one.why_not or _NOT_VOUCHED
        if one.run not in ids:
            return "timed with another configuration than its runs have"
        for run_id in ids:
            if run_id not in pooled or (ran := frames.environments.get(run_id)) is None:
                continue
            if ran.backend_mode != "native":
                return f"its runs had {ran.backend_mode or 'unknown'} arithmetic"
            if trained_on(ran) != record.device.name:
                return f"timed on {record.device.name}, trained on {trained_on(ran)}"
            if ran.code != record.code and "code" not in frames.plan.waive:
                return "timed with other code than trained its runs"
        return None

    reasons = {arm.name: why_not(arm.name, [run.id for run in arm.runs]) for arm in frames.plan.arms}
    if reasons[frames.plan.baseline] is not None:
        reasons = {arm: reason or "no baseline to compare it with" for arm, reason in reasons.items()}
    return Throughput(
        device=record.device.name,
        arch=record.device.arch,
        versions=record.versions,
        steps=record.settings.steps,
        repeats=_TURNS * record.settings.repeats,
        measured_unix=record.measured_unix,
        tokens_per_sec={arm: timed[arm].tokens_per_sec for arm, reason in reasons.items() if reason is None},
        not_used={arm: reason for arm, reason in reasons.items() if reason is not None},
    )


def measured_speed(arm: Sequence[RunResult], baseline: Sequence[RunResult], how: Method) -> Measured:
    """Compute the speed as logged; no figure if any run lacks a throughput."""

    def ratio(figure: Callable[[RunResult], float | None]) -> Interval:
        own, base = _of_all(arm, figure), _of_all(baseline, figure)
        if not own or not base:
            return _NOT_ALL
        return exponential(t_interval(contrast(own, base, paired=how.paired).estimate, how.alpha))

    hours = _of_all(arm, lambda run: None if (pace := _pace(run)) is None else -pace + math.log(run.devices))
    return Measured(
        timed="as logged",
        throughput=ratio(_speed),
        end_to_end=ratio(_pace),
        hours=exponential(mean_interval([one - math.log(_HOUR_SEC) for _, one in hours], how.alpha))
        if hours
        else _NOT_ALL,
    )


def alone_speed(
    rates: Sequence[float],
    base_rates: Sequence[float],
    *,
    cost: Cost,
    tokens: Estimate | None,
    alpha: float = ALPHA,
) -> Measured:
    """Compute the speed from timing the arm and the baseline alone, with the token cost of their runs.

    ``rates``: tokens/s of each repeat. ``tokens``: the arm's mean log tokens to target, None if unknown.
    """
    own, base = (mean_estimate([math.log(rate * _HOUR_SEC) for rate in side]) for side in (rates, base_rates))
    hours = _NOT_ALL
    if tokens is not None:
        hours = exponential(combined_interval([(1.0, tokens), (-1.0, own)], alpha))
    if cost.kind == "baseline":
        one = Interval(estimate=1.0)
        return Measured(timed="alone", throughput=one, end_to_end=one, hours=hours)
    ratio = difference(own, base)
    end_to_end = Interval(note=cost.note)
    if cost.figure is not None:
        end_to_end = exponential(combined_interval([(1.0, ratio), (-1.0, cost.figure)], alpha))
    return Measured(
        timed="alone", throughput=exponential(t_interval(ratio)), end_to_end=end_to_end, hours=hours
    )


def modelled_speed(
    arm: RunConfig, baseline: RunConfig, *, tokens_to_target: float | None, cost: Cost
) -> tuple[Modelled, ...]:
    """Model an arm on every hardware of the report, from its resolved configuration and the baseline's.

    Empty if the shapes of a model's layers are not in its configuration.
    """
    if not all(one.model.describes(one.trainer) for one in (arm, baseline)):
        return ()
    work, base_work = workload_of(arm), workload_of(baseline)
    found = []
    for hardware in HARDWARE:
        own = token_time(work, arm.recipe, hardware)
        base = token_time(base_work, baseline.recipe, hardware)
        speed = hours = Interval()
        if own is not None and base is not None:
            speed = Interval(**vars(speed_up(base.by_kernel(), own.by_kernel())))
        if own is not None and tokens_to_target is not None:
            hours = Interval(**vars(seconds_range(own).times(tokens_to_target / _HOUR_SEC)))
        found.append(Modelled(hardware=hardware, speed=speed, net=_net(speed, cost), hours=hours))
    return tuple(found)


def share_in_fp4(config: RunConfig) -> float | None:
    """Return the share of training FLOPs with both operands in FP4; None without the layers' shapes."""
    if not config.model.describes(config.trainer):
        return None
    return fp4_share(workload_of(config), config.recipe)


def read_configs(configs: Mapping[str, RecordedConfig]) -> dict[str, RunConfig]:
    """Validate the arms' configurations; those that are not complete, as of imported logs, are left out."""
    from pydantic import ValidationError

    from ablate.run.config import config_from_json

    found = {}
    for arm, recorded in configs.items():
        with suppress(ValidationError):
            found[arm] = config_from_json(recorded.whole)
    return found


def _net(speed: Interval, cost: Cost) -> Interval:
    """Compute speed / (1 + token cost), whose errors are independent."""
    if cost.kind == "baseline" or speed.estimate is None:
        return speed
    if cost.estimate is None:
        return Interval(note=cost.note)
    middle, net = 1 + cost.estimate, speed.estimate / (1 + cost.estimate)
    if speed.low is None or speed.high is None or cost.low is None or cost.high is None:
        return Interval(estimate=net)
    down = math.hypot(math.log(speed.estimate / speed.low), math.log((1 + cost.high) / middle))
    up = math.hypot(math.log(speed.high / speed.estimate), math.log(middle / (1 + cost.low)))
    return Interval(estimate=net, low=net * math.exp(-down), high=net * math.exp(up))


def _of_all(
    runs: Sequence[RunResult], figure: Callable[[RunResult], float | None]
) -> list[tuple[int, float]]:
    """Return seed and figure of each result; empty unless every result has a figure."""
    results = [run for run in runs if run.end != "missing"]
    found = [(run.seed, value) for run in results if (value := figure(run)) is not None]
    return found if len(found) == len(results) else []


def _speed(run: RunResult) -> float | None:
    """Return log tokens/s."""
    return math.log(run.tokens_per_sec) if run.tokens_per_sec else None


def _pace(run: RunResult) -> float | None:
    """Return −log seconds to target."""
    speed, tokens = _speed(run), run.tokens_to_target
    return None if speed is None or tokens is None or run.left_bound else speed - math.log(tokens)
