"""The report's tables of speed: measured on the device, modelled on named hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.modelled.speed import HARDWARE
from ablate.reports.words import words
from ablate.reports.words.table import Table, make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.findings.speed import Measured, Modelled


def measured_table(analysis: Analysis, prices: Mapping[str, float]) -> Table:
    """Return throughput and end-to-end speed-up, where timing counts."""
    known = [(arm, arm.measured) for arm in analysis.arms if arm.measured is not None]
    # One price for one kind of device: of several, no sum can be named.
    devices = {str(environment.get("gpu")) for environment, _ in analysis.environments}
    price = next((usd for name, usd in prices.items() if all(name in device for device in devices)), None)
    timed = {measured.timed for _, measured in known}
    logged = timed == {"as logged"}
    caption = (
        (
            "As the logs of others say, on devices of one kind and number"
            if logged
            else "Measured, native timing"
        )
        + f". Throughput and end-to-end speed over {analysis.baseline}'s, the latter "
        "the ratio of the times to target, which is throughput / (1 + token cost): above 1 the arm pays. "
        f"Intervals ({words.coverage(analysis.plan.stop)}) on logs, with the errors of throughput and of "
        "token cost both in the latter. GPU-hours: of one run to the target, evaluation left out."
    )
    if "alone" in timed and analysis.throughput is not None:
        caption += (
            f" Timed alone: by `ablate throughput` on {words.timed_alone(analysis.throughput)}; its errors "
            "are those of repeats on that one machine."
        )
    if "in its runs" in timed:
        caption += " Timed in its runs: the runs' own tokens/s, errors over runs."

    def over(text: Callable[[ArmResult, Measured], str]) -> Callable[[tuple[ArmResult, Measured]], str]:
        return lambda row: "1" if row[0].name == analysis.baseline else text(*row)

    columns: dict[str, Callable[[tuple[ArmResult, Measured]], str]] = {
        "Arm": lambda row: row[0].name,
        "n": lambda row: str(row[0].n),
        "Timed": lambda row: row[1].timed,
        "Throughput": over(lambda _, measured: words.times(measured.throughput)),
        "Break-even": over(lambda arm, _: words.break_even(arm)),
        "End-to-end speed": over(lambda _, measured: words.times(measured.end_to_end)),
        "GPU-hours to target": lambda row: words.hours(row[1].hours),
    }
    if price is not None:
        columns[f"Cost at {price:g} $/h"] = lambda row: words.hours(row[1].hours, "$", price)
    return make_table(caption, known, columns, numeric={1, 3, 4, 5, 6, 7})


def modelled_table(analysis: Analysis, prices: Mapping[str, float]) -> Table:
    """Return the modelled speed on named hardware, of the arms with a configuration to model."""
    priced = [name for name in HARDWARE if name in prices]

    def speed(arm: ArmResult, one: Modelled) -> str:
        if one.speed.estimate is None:
            return words.DASH
        if arm.name == analysis.baseline:
            return "1"
        return f"{words.times(one.speed)}; net {words.times(one.net)}"

    def price(one: Modelled) -> str:
        if one.hours.estimate is None:
            return words.DASH
        return f"{words.hours(one.hours)}, {words.hours(one.hours, '$', prices[one.hardware])}"

    return Table(
        caption=(
            f"Modelled, not measured: step speed over {analysis.baseline}'s at this study's own shapes, on "
            "one device, by a roofline of the shares of published peaks that public measurements reach, "
            "without launches and communication. Intervals: 95 %, from the model's errors on those "
            "measurements. Net: speed / (1 + token cost), with the errors of both. FP4 FLOPs: share of the "
            "training FLOPs with both operands in FP4. – : no unit for the format."
        ),
        columns=(
            "Arm",
            "FP4 FLOPs",
            *HARDWARE,
            *(f"{name}: GPU-hours to target, at {prices[name]:g} $/h" for name in priced),
        ),
        rows=tuple(
            (
                arm.name,
                words.share(arm.fp4_share),
                *(speed(arm, one) for one in arm.modelled),
                *(price(one) for one in arm.modelled if one.hardware in priced),
            )
            for arm in analysis.arms
            if arm.modelled
        ),
        numeric=range(1, 2 + len(HARDWARE) + len(priced)),
    )
