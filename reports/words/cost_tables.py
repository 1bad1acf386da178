"""Tables of costs beside the headline's: by either evaluation, tuned, in time and money, and as published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.modelled.speed import HARDWARE
from ablate.reports.words.format import (
    NBSP,
    cost,
    coverage,
    interval,
    loss,
    make_table,
    percents,
    setting,
    share,
    signed,
    timed_alone,
    times,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.findings.results import Analysis, InBf16
    from ablate.reports.words.format import Table
    from ablate.results.intervals import Interval


def evaluation_table(analysis: Analysis) -> Table:
    """Return token costs and loss differences by both evaluations, of the arms that have both."""

    def figures(found: InBf16) -> dict[str, str]:
        costs = {
            "Token cost, in bf16": cost(found.token_cost),
            "Evaluation alone": percents(found.tokens_alone),
        }
        return (costs if analysis.plan.target else {}) | {
            "Loss difference, in bf16": interval(found.difference, signed),
            "Evaluation alone, nats/token": interval(found.loss_alone, signed),
        }

    return make_table(
        "Each arm evaluated in bf16, with the same weights on the same batches as by its own Fprop, on which "
        f"all other figures rest. In bf16: what it learnt worse than {analysis.baseline}. Evaluation alone: "
        "what its own forward pass adds; 1 + token cost is 1 + cost in bf16, times 1 + evaluation alone. "
        f"Brackets: {coverage(analysis.plan.stop)} intervals; of evaluation alone from the differences "
        "within each run, by the arm's own variance.",
        [{"Arm": arm.name, **figures(arm.in_bf16)} for arm in analysis.others if arm.in_bf16 is not None],
        range(1, 5),
    )


def tuning_table(analysis: Analysis) -> Table | None:
    """Return what was chosen for each arm and what it changed; None for a study that tunes nothing."""
    tuning = analysis.tuning
    if tuning is None:
        return None

    def found(values: Mapping[str, Any], value: float | None) -> str:
        text = ", ".join(f"{field} {setting(one)}" for field, one in values.items())
        return text if value is None else f"{text} (loss {loss(value)})"

    return make_table(
        f"What was found for each arm in {tuning.plan.trials} trials of {tokens(tuning.plan.tokens)} "
        f"tokens ({tuning.plan.sampler}), and the token cost at the study's own values beside the one at the "
        "values found, each against the baseline at the same kind of values. Trials: complete / pruned / "
        "diverged, of the arm's group. Loss: mean final validation loss of the trial, nats/token. "
        f"Brackets: 95{NBSP}% intervals over the seeds of the runs.",
        [
            {
                "Arm": arm.name if arm.group == arm.name else f"{arm.name} (group {arm.group})",
                "The study's own": found(arm.shared, arm.loss_shared),
                "Found": found(arm.chosen, arm.loss_chosen) + ", the outermost tried" * bool(arm.outermost),
                "Trials": f"{arm.trials_complete} / {arm.trials_pruned} / {arm.trials_diverged}",
                "Tokens of the trials": tokens(arm.tokens_of_the_trials),
                "Token cost, the study's own": cost(arm.token_cost_shared),
                "Token cost, found": cost(arm.token_cost_tuned),
            }
            for arm in tuning.arms
        ],
        range(3, 7),
    )


def measured_table(analysis: Analysis, prices: Mapping[str, float]) -> Table:
    """Return throughput and end-to-end speed-up, where timing counts. ``prices``: USD for a device-hour."""
    # One price for one kind of device: of several, no sum can be named.
    devices = {str(environment.get("gpu")) for environment, _ in analysis.environments}
    price = next((usd for name, usd in prices.items() if all(name in device for device in devices)), None)
    record = analysis.throughput
    alone = "" if record is None else f" (`ablate check STUDY --steps`: {timed_alone(record)})"
    return make_table(
        f"Throughput and end-to-end speed over {analysis.baseline}'s, the latter the ratio of the times to "
        "target, which is throughput / (1 + token cost): above 1 the arm pays. Intervals "
        f"({coverage(analysis.plan.stop)}) on logs, with the errors of throughput and of token cost both in "
        "the latter. GPU-hours: of one run to the target, evaluation left out. Native timing. Timed alone"
        f"{alone}: errors of repeats on that one machine. In its runs: the runs' own tokens/s, errors over "
        "runs. As logged: as the logs of others say, on devices of one kind and number.",
        [
            {"Arm": arm.name, "Timed": measured.timed, "n": arm.n}
            | (
                {"Throughput": "1", "Break-even": "1", "End-to-end speed": "1"}
                if arm.name == analysis.baseline
                else {
                    "Throughput": times(measured.throughput),
                    "Break-even": times(arm.break_even),
                    "End-to-end speed": times(measured.end_to_end),
                }
            )
            | {"GPU-hours to target": _hours(measured.hours)}
            | ({} if price is None else {f"Cost at {price:g} $/h": _hours(measured.hours, price)})
            for arm in analysis.arms
            if (measured := arm.measured) is not None
        ],
        range(2, 8),
    )


def modelled_table(analysis: Analysis, prices: Mapping[str, float]) -> Table:
    """Return the modelled speed on named hardware, of the arms with a configuration to model."""
    return make_table(
        f"Modelled, not measured: step speed over {analysis.baseline}'s at this study's own shapes, on one "
        "device, by a roofline of the shares of published peaks that public measurements reach, without "
        f"launches and communication. Intervals: 95{NBSP}%, from the model's errors on those measurements. "
        "Net: speed / (1 + token cost), with the errors of both. FP4 FLOPs: share of the training FLOPs with "
        "both operands in FP4. – : no unit for the format.",
        [
            {"Arm": arm.name, "FP4 FLOPs": share(arm.fp4_share)}
            | {
                one.hardware: times(one.speed)
                + (f"; net {times(one.net)}" if one.speed.estimate and arm.name != analysis.baseline else "")
                for one in arm.modelled
            }
            | {
                f"{one.hardware}: GPU-hours to target, at {prices[one.hardware]:g} $/h": (
                    f"{_hours(one.hours)}, {_hours(one.hours, prices[one.hardware])}"
                )
                for one in arm.modelled
                if one.hardware in prices
            }
            for arm in analysis.arms
            if arm.modelled
        ],
        range(1, 2 + len(HARDWARE) + len(prices)),
    )


def _hours(value: Interval, price: float | None = None) -> str:
    """Return hours, or what they cost, with their interval."""
    unit = NBSP + ("h" if price is None else "$")
    return interval(value, lambda hours: f"{hours * (price or 1):.3g}", unit)


def published_table(analysis: Analysis) -> Table:
    """Return what others have published for such arms beside our figures."""
    return make_table(
        f"Published figures beside ours (against {analysis.baseline}). They are others' and of other "
        "models, data and baselines: to compare with, and no part of any estimate here. Matched by "
        "format, GEMMs in FP4, rounding and Hadamard.",
        [
            {
                "Arm": arm.name,
                "Ours: token cost": cost(arm.token_cost),
                "Published": one.figure,
                "Their setting": one.setting,
            }
            for arm in analysis.others
            for one in arm.published
        ],
        {1},
    )
