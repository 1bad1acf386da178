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

from ablate.modelled.speed import (
    HARDWARE,
    fp4_share,
    seconds_range,
    speed_up,
    token_time,
    workload_of,
)
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
from ablate.results.losses import with_result

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate, Method
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import LockedArm, LockedPlan
    from ablate.store.records import Environment, RecordedConfig, Speed

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


def timing_of_runs(
    environments: Mapping[str, Environment], plan: LockedPlan
) -> RunTiming:
    """Say where the runs' tokens/s come from."""
    modes = {environment.backend_mode for environment in environments.values()}
    if "imported" in modes:
        return RunTiming(kind="logged", untold=_untold(plan))
    if modes == {"command"}:
        return RunTiming(kind="command")
    return RunTiming(kind="native" if modes == {"native"} else "emulated")


def _untold(plan: LockedPlan) -> dict[str, str]:
    """Map the arms whose logs do not say that they had the baseline's hardware to the reason."""
    # ``differs`` is relative to the baseline now in use, which need not be the study's own.
    base_hardware = plan.training.get("hardware")
    for arm in plan.arms:
        if "hardware" in arm.differs:
            base_hardware, _ = arm.differs["hardware"]
    reasons = {}
    for arm in plan.arms:
        _, hardware = arm.differs.get("hardware", (None, base_hardware))
        if hardware is None or base_hardware is None:
            untold = plan.baseline if base_hardware is None else arm.name
            reasons[arm.name] = (
                f"the logs of {untold} do not tell one kind and number of devices "
                "(`ablate import --hardware`)"
            )
        elif hardware != base_hardware:
            reasons[arm.name] = (
                f"{arm.name} was trained on {hardware}, {plan.baseline} on {base_hardware}"
            )
    if len(reasons) == len(plan.arms) - 1:
        reasons.setdefault(plan.baseline, "no arm to compare it with")
    return reasons


def judge_throughput(
    frames: StudyFrames, *, left_out: Collection[str]
) -> Throughput | None:
    """Decide for which arms the record of ``ablate check steps STUDY`` counts; None without a record.

    ``left_out``: the runs that are not pooled.
    """
    record = frames.throughput
    if record is None:
        return None
    speeds = {speed.arm: speed for speed in record.arms}
    baseline = frames.plan.arm(frames.plan.baseline)
    instead = ""
    if _why_not_used(baseline, speeds.get(baseline.name), frames, left_out):
        instead = "no baseline to compare it with"
    rates = {}
    reasons = {}
    for arm in frames.plan.arms:
        reason = _why_not_used(arm, speeds.get(arm.name), frames, left_out) or instead
        if reason:
            reasons[arm.name] = reason
        else:
            rates[arm.name] = speeds[arm.name].tokens_per_sec
    return Throughput(
        device=record.device.name,
        arch=record.device.arch,
        versions=record.versions,
        steps=record.settings.steps,
        repeats=_TURNS * record.settings.repeats,
        measured_unix=record.measured_unix,
        tokens_per_sec=rates,
        not_used=reasons,
    )


def _why_not_used(
    arm: LockedArm, speed: Speed | None, frames: StudyFrames, left_out: Collection[str]
) -> str:
    """Say why an arm's timing does not count; empty if it does."""
    record = frames.throughput
    if record is None or speed is None:
        return "not timed"
    if speed.backend_mode != "native":
        return f"{speed.backend_mode} arithmetic"
    if not speed.timing_valid:
        return speed.why_not or _NOT_VOUCHED
    if speed.run not in [run.id for run in arm.runs]:
        return "timed with another configuration than its runs have"
    for run in arm.runs:
        environment = frames.environments.get(run.id)
        has_result = frames.runs[run.id].has_result and run.id not in left_out
        if environment is None or not has_result:
            continue
        device = trained_on(environment)
        if environment.backend_mode != "native":
            return f"its runs had {environment.backend_mode or 'unknown'} arithmetic"
        if device != record.device.name:
            return f"timed on {record.device.name}, trained on {device}"
        if environment.code != record.code and "code" not in frames.plan.waive:
            return "timed with other code than trained its runs"
    return ""


def measured_speed(
    arm: Sequence[RunResult], baseline: Sequence[RunResult], method: Method
) -> Measured:
    """Compute the speed as logged; no figure if any run lacks a throughput."""

    def ratio(*, to_target: bool) -> Interval:
        sides = [_log_speeds(runs, to_target=to_target) for runs in (arm, baseline)]
        if not all(sides):
            return _NOT_ALL
        log_ratio = contrast(*sides, paired=method.paired).estimate
        return exponential(t_interval(log_ratio, method.alpha))

    hours = _NOT_ALL
    paces = _log_speeds(arm, to_target=True)
    if paces:
        log_hours = []
        for run, (_, pace) in zip(with_result(arm), paces, strict=True):
            log_hours.append(-pace + math.log(run.devices) - math.log(_HOUR_SEC))
        hours = exponential(mean_interval(log_hours, method.alpha))
    return Measured(
        timed="as logged",
        throughput=ratio(to_target=False),
        end_to_end=ratio(to_target=True),
        hours=hours,
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
    log_rate = mean_estimate([math.log(rate * _HOUR_SEC) for rate in rates])
    base_log_rate = mean_estimate([math.log(rate * _HOUR_SEC) for rate in base_rates])
    hours = _NOT_ALL
    if tokens is not None:
        hours = exponential(combined_interval([(1.0, tokens), (-1.0, log_rate)], alpha))
    ratio = difference(log_rate, base_log_rate)
    throughput = exponential(t_interval(ratio))
    end_to_end = Interval(note=cost.note)
    if cost.kind == "baseline":
        throughput = end_to_end = Interval(estimate=1.0)
    elif cost.figure is not None:
        parts = [(1.0, ratio), (-1.0, cost.figure)]
        end_to_end = exponential(combined_interval(parts, alpha))
    return Measured(
        timed="alone", throughput=throughput, end_to_end=end_to_end, hours=hours
    )


def modelled_speed(
    arm: RunConfig, baseline: RunConfig, *, tokens_to_target: float | None, cost: Cost
) -> tuple[Modelled, ...]:
    """Model an arm on every hardware of the report, from its resolved configuration and the baseline's.

    Empty if the shapes of a model's layers are not in its configuration.
    """
    if not arm.model.describes(arm.trainer) or not baseline.model.describes(
        baseline.trainer
    ):
        return ()
    work = workload_of(arm)
    base_work = workload_of(baseline)
    modelled = []
    for hardware in HARDWARE:
        time = token_time(work, arm.recipe, hardware)
        base_time = token_time(base_work, baseline.recipe, hardware)
        speed = hours = Interval()
        if time is not None and base_time is not None:
            speed = Interval(**vars(speed_up(base_time.by_kernel(), time.by_kernel())))
        if time is not None and tokens_to_target is not None:
            hours = Interval(
                **vars(seconds_range(time).times(tokens_to_target / _HOUR_SEC))
            )
        modelled.append(
            Modelled(hardware=hardware, speed=speed, net=_net(speed, cost), hours=hours)
        )
    return tuple(modelled)


def share_in_fp4(config: RunConfig) -> float | None:
    """Return the share of training FLOPs with both operands in FP4; None without the layers' shapes."""
    if not config.model.describes(config.trainer):
        return None
    return fp4_share(workload_of(config), config.recipe)


def read_configs(configs: Mapping[str, RecordedConfig]) -> dict[str, RunConfig]:
    """Validate the arms' configurations; those that are not complete, as of imported logs, are left out."""
    from pydantic import ValidationError

    from ablate.run.config import config_from_json

    whole = {}
    for arm, recorded in configs.items():
        with suppress(ValidationError):
            whole[arm] = config_from_json(recorded.whole)
    return whole


def _net(speed: Interval, cost: Cost) -> Interval:
    """Compute speed / (1 + token cost), whose errors are independent."""
    if cost.kind == "baseline" or speed.estimate is None:
        return speed
    if cost.estimate is None:
        return Interval(note=cost.note)
    factor = 1 + cost.estimate
    net = speed.estimate / factor
    if speed.low is None or speed.high is None or cost.low is None or cost.high is None:
        return Interval(estimate=net)
    down = math.hypot(
        math.log(speed.estimate / speed.low), math.log((1 + cost.high) / factor)
    )
    up = math.hypot(
        math.log(speed.high / speed.estimate), math.log(factor / (1 + cost.low))
    )
    return Interval(estimate=net, low=net * math.exp(-down), high=net * math.exp(up))


def _log_speeds(
    runs: Sequence[RunResult], *, to_target: bool
) -> list[tuple[int, float]]:
    """Return seed and log tokens/s, or −log seconds to target, of each result; empty unless all have it."""
    logs = []
    for run in with_result(runs):
        if not run.tokens_per_sec or (to_target and not run.exact):
            return []
        log = math.log(run.tokens_per_sec)
        if to_target:
            log -= math.log(run.high)
        logs.append((run.seed, log))
    return logs
