"""What an arm gains in time: measured, where timing is native and unshared; modelled, on named hardware.

Measured: the ratio of throughputs, and the end-to-end speed-up, which is the ratio of the times to target.
Where ``ablate throughput`` has timed the arm alone, that is the throughput ratio over (1 + token cost), whose
errors are independent: their variances on logs add up. Else the runs' own timing serves: Welch's (or paired)
intervals on logs over runs, in which both errors are, with what they have in common. Modelled:
``ablate.modelled.speed``.

How it fails: it does not raise. Emulated, shared or logged timing gives no measured figure; an arm without a
resolved configuration, as of logs that others wrote, no modelled one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ablate.modelled.speed import HARDWARE, LLAMA_8B, Workload, fp4_share, token_time, workload_of
from ablate.reports.statistics.intervals import (
    ALPHA,
    Interval,
    difference,
    exponential,
    mean_estimate,
    mean_interval,
    t_interval,
    welch_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.recipes import Recipe
    from ablate.reports.statistics.cost import Cost
    from ablate.reports.statistics.intervals import Estimate
    from ablate.run.config import RunConfig
    from ablate.run.outcome import Outcome
    from ablate.store.records import RecordedConfig

_HOUR_SEC = 3600.0


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """How a run ended, and its own training throughput in tokens/s on its devices together."""

    outcome: Outcome
    tokens_per_sec: float | None
    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Native timing: throughput and end-to-end speed over the baseline's, and device-hours to target.

    ``timed``: alone by ``ablate throughput``, or in its runs.
    """

    timed: Literal["alone", "in its runs"]
    throughput: Interval
    end_to_end: Interval
    hours: Interval


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """An arm on named hardware. ``speed``: step speed over the baseline's; None without the units for it.

    ``net``: speed / (1 + token cost), with the interval of the token cost alone. ``hours``: device-hours of
    training to the target, None where the target was not reached by all. ``large``: ``speed`` at the shapes
    of Llama 3.1 8B.
    """

    hardware: str
    speed: float | None
    net: Interval
    hours: float | None
    large: float | None


def measured_speed(
    arm: Sequence[TimedRun], baseline: Sequence[TimedRun], *, paired: bool, alpha: float = ALPHA
) -> Measured:
    """Return what native timing shows; runs without a throughput leave no figure."""
    own, base = ([run for run in side if run.outcome.end != "missing"] for side in (arm, baseline))

    def ratio(figure: Callable[[TimedRun], float | None]) -> Interval:
        return _ratio([figure(run) for run in own], [figure(run) for run in base], own, base, paired, alpha)

    return Measured(
        timed="in its runs",
        throughput=ratio(_speed),
        end_to_end=ratio(_pace),
        hours=_hours([_device_pace(run) for run in own], alpha),
    )


def alone_speed(
    rates: Sequence[float],
    base_rates: Sequence[float],
    *,
    cost: Cost,
    tokens: Estimate | None,
    alpha: float = ALPHA,
) -> Measured:
    """Return what timing the arm and the baseline alone shows, with the token cost of their runs.

    ``rates``: tokens/s of each repeat. ``tokens``: log tokens to target of the arm, None without.
    """
    own, base = (mean_estimate([math.log(rate * _HOUR_SEC) for rate in side]) for side in (rates, base_rates))
    if cost.kind == "baseline":
        throughput = end_to_end = Interval(estimate=1.0)
    else:
        ratio = difference(own, base)
        throughput = exponential(t_interval(ratio))
        end_to_end = _over_cost(ratio, cost, alpha)
    return Measured(
        timed="alone",
        throughput=throughput,
        end_to_end=end_to_end,
        hours=Interval(note="not every run has a figure")
        if tokens is None
        else exponential(t_interval(difference(tokens, own), alpha)),
    )


def _over_cost(ratio: Estimate, cost: Cost, alpha: float) -> Interval:
    """Return throughput ratio / (1 + token cost); no interval where either of them has none."""
    if cost.log_ratio is None:
        return Interval(note=cost.reason)
    found = exponential(t_interval(difference(ratio, cost.log_ratio), alpha))
    lacking = next((part.note for part in map(t_interval, (ratio, cost.log_ratio)) if part.low is None), None)
    return found if lacking is None else Interval(estimate=found.estimate, note=lacking)


def modelled_speed(
    arm: RunConfig, baseline: RunConfig, *, tokens_to_target: float | None, cost: Cost
) -> tuple[Modelled, ...]:
    """Return an arm on every hardware of the report, from its resolved configuration and the baseline's.

    Nothing for a model that is not built in: the shapes of its layers are not in its configuration.
    """
    if not (arm.model.is_built_in and baseline.model.is_built_in):
        return ()
    work, base_work = workload_of(arm), workload_of(baseline)
    found = []
    for hardware in HARDWARE:
        own = token_time(work, arm.recipe, hardware)
        speed = _model_ratio(work, arm.recipe, base_work, baseline.recipe, hardware)
        found.append(
            Modelled(
                hardware=hardware,
                speed=speed,
                net=Interval() if speed is None else _net(speed, cost),
                hours=None
                if own is None or tokens_to_target is None
                else own.total * tokens_to_target / _HOUR_SEC,
                large=_model_ratio(LLAMA_8B, arm.recipe, LLAMA_8B, baseline.recipe, hardware),
            )
        )
    return tuple(found)


def share_in_fp4(config: RunConfig) -> float | None:
    """Return the share of a built-in model's training FLOPs that have both operands in FP4."""
    if not config.model.is_built_in:
        return None
    return fp4_share(workload_of(config), config.recipe)


def read_configs(configs: Mapping[str, RecordedConfig]) -> dict[str, RunConfig]:
    """Return the arms' configurations as checked data; those of imported logs are none and are left out."""
    from pydantic import ValidationError

    from ablate.run.config import config_from_json

    found = {}
    for arm, recorded in configs.items():
        try:
            found[arm] = config_from_json(recorded.whole)
        except ValidationError:
            continue
    return found


def _model_ratio(
    work: Workload, recipe: Recipe, base_work: Workload, base_recipe: Recipe, hardware: str
) -> float | None:
    own, base = token_time(work, recipe, hardware), token_time(base_work, base_recipe, hardware)
    return None if own is None or base is None else base.total / own.total


def _net(speed: float, cost: Cost) -> Interval:
    if cost.kind == "baseline":
        return Interval(estimate=speed)
    if cost.estimate is None:
        return Interval(note=cost.reason)
    low, high = cost.low, cost.high
    return Interval(
        estimate=speed / (1 + cost.estimate),
        low=None if high is None else speed / (1 + high),
        high=None if low is None else speed / (1 + low),
    )


def _speed(run: TimedRun) -> float | None:
    """Return log tokens/s."""
    return math.log(run.tokens_per_sec) if run.tokens_per_sec else None


def _pace(run: TimedRun) -> float | None:
    """Return −log seconds to target."""
    speed = _speed(run)
    return None if speed is None or not run.outcome.exact else speed - math.log(run.outcome.high)


def _device_pace(run: TimedRun) -> float | None:
    """Return −log device-seconds to target."""
    pace = _pace(run)
    return None if pace is None else pace - math.log(run.devices)


def _ratio(
    own: list[float | None],
    base: list[float | None],
    own_runs: Sequence[TimedRun],
    base_runs: Sequence[TimedRun],
    paired: bool,
    alpha: float,
) -> Interval:
    left, right = ([value for value in side if value is not None] for side in (own, base))
    if not left or not right or len(left) < len(own) or len(right) < len(base):
        return Interval(note="not every run has a figure")
    if paired:
        x = {run.outcome.seed: value for run, value in zip(own_runs, left, strict=True)}
        y = {run.outcome.seed: value for run, value in zip(base_runs, right, strict=True)}
        seeds = sorted(x.keys() & y.keys())
        if len(seeds) >= 2:
            return exponential(mean_interval([x[seed] - y[seed] for seed in seeds], alpha))
    return exponential(welch_interval(left, right, alpha))


def _hours(paces: list[float | None], alpha: float) -> Interval:
    known = [-pace - math.log(_HOUR_SEC) for pace in paces if pace is not None]
    if not known or len(known) < len(paces):
        return Interval(note="not every run has a figure")
    return exponential(mean_interval(known, alpha))
