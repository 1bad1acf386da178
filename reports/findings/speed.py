"""What an arm gains in time: measured, where timing is native and unshared; as logged; modelled.

Measured: the ratio of throughputs, and the end-to-end speed-up, which is the ratio of the times to target.
Where ``ablate throughput`` has timed the arm alone, that is the throughput ratio over (1 + token cost), whose
errors are independent. Else it comes from the runs' own timing, by Welch's (or paired) intervals on logs.

Emulated or shared timing gives no measured figure, nor do logs of others that do not tell both arms to have
had the same devices; an arm without a resolved configuration, as of such logs, has no modelled one.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from ablate.modelled.speed import HARDWARE, fp4_share, token_time, workload_of
from ablate.modelled.spread import Range, seconds_range, speed_up
from ablate.reports.findings.results import Measured, Modelled
from ablate.results.contrasts import contrasts
from ablate.results.intervals import (
    ALPHA,
    Interval,
    difference,
    exponential,
    mean_estimate,
    mean_interval,
    t_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.reports.findings.results import RunResult, Timed
    from ablate.results.cost import Cost
    from ablate.results.intervals import Estimate
    from ablate.run.config import RunConfig
    from ablate.store.records import RecordedConfig

_HOUR_SEC = 3600.0


_NOT_ALL = Interval(note="not every run has a figure")


def measured_speed(
    arm: Sequence[RunResult],
    baseline: Sequence[RunResult],
    *,
    timed: Timed = "in its runs",
    paired: bool,
    alpha: float = ALPHA,
) -> Measured:
    """Return what the runs' own timing shows; runs without a throughput leave no figure."""

    def ratio(figure: Callable[[RunResult], float | None]) -> Interval:
        own, base = _of_all(arm, figure), _of_all(baseline, figure)
        if not own or not base:
            return _NOT_ALL
        compared = contrasts({"": (own, base)}, paired=paired, moderated=False)[""]
        return exponential(t_interval(compared.estimate, alpha))

    hours = [-pace - math.log(_HOUR_SEC) for _, pace in _of_all(arm, _device_pace)]
    return Measured(
        timed=timed,
        throughput=ratio(_speed),
        end_to_end=ratio(_pace),
        hours=exponential(mean_interval(hours, alpha)) if hours else _NOT_ALL,
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
        hours=_NOT_ALL if tokens is None else exponential(t_interval(difference(tokens, own), alpha)),
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

    Nothing for a model whose layers' shapes are not in its configuration.
    """
    if not all(one.model.describes(one.trainer) for one in (arm, baseline)):
        return ()
    work, base_work = workload_of(arm), workload_of(baseline)
    found = []
    for hardware in HARDWARE:
        own = token_time(work, arm.recipe, hardware)
        base = token_time(base_work, baseline.recipe, hardware)
        speed = _interval(
            None if own is None or base is None else speed_up(base.by_kernel(), own.by_kernel())
        )
        found.append(
            Modelled(
                hardware=hardware,
                speed=speed,
                net=_net(speed, cost),
                hours=_interval(
                    None
                    if own is None or tokens_to_target is None
                    else seconds_range(own).times(tokens_to_target / _HOUR_SEC)
                ),
            )
        )
    return tuple(found)


def share_in_fp4(config: RunConfig) -> float | None:
    """Return the share of a described model's training FLOPs that have both operands in FP4."""
    if not config.model.describes(config.trainer):
        return None
    return fp4_share(workload_of(config), config.recipe)


def read_configs(configs: Mapping[str, RecordedConfig]) -> dict[str, RunConfig]:
    """Return the arms' configurations as checked data, without those of imported logs, which do not fit."""
    from pydantic import ValidationError

    from ablate.run.config import config_from_json

    found = {}
    for arm, recorded in configs.items():
        with suppress(ValidationError):
            found[arm] = config_from_json(recorded.whole)
    return found


def _interval(found: Range | None) -> Interval:
    return Interval() if found is None else Interval(**vars(found))


def _net(speed: Interval, cost: Cost) -> Interval:
    """Return speed / (1 + token cost), whose errors are independent."""
    if cost.kind == "baseline" or speed.estimate is None:
        return speed
    if cost.estimate is None:
        return Interval(note=cost.reason)
    middle, net = 1 + cost.estimate, speed.estimate / (1 + cost.estimate)
    if speed.low is None or speed.high is None or cost.low is None or cost.high is None:
        return Interval(estimate=net)
    down = math.hypot(math.log(speed.estimate / speed.low), math.log((1 + cost.high) / middle))
    up = math.hypot(math.log(speed.high / speed.estimate), math.log(middle / (1 + cost.low)))
    return Interval(estimate=net, low=net * math.exp(-down), high=net * math.exp(up))


def _of_all(
    runs: Sequence[RunResult], figure: Callable[[RunResult], float | None]
) -> list[tuple[int, float]]:
    """Return the seed and the figure of each result; nothing unless every result has one."""
    results = [run for run in runs if run.end not in ("missing", "unused")]
    found = [(run.seed, value) for run in results if (value := figure(run)) is not None]
    return found if len(found) == len(results) else []


def _speed(run: RunResult) -> float | None:
    """Return log tokens/s."""
    return math.log(run.tokens_per_sec) if run.tokens_per_sec else None


def _pace(run: RunResult) -> float | None:
    """Return −log seconds to target."""
    speed = _speed(run)
    if speed is None or run.tokens_to_target is None or run.left_bound:
        return None
    return speed - math.log(run.tokens_to_target)


def _device_pace(run: RunResult) -> float | None:
    """Return −log device-seconds to target."""
    pace = _pace(run)
    return None if pace is None else pace - math.log(run.devices)
