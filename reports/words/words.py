"""How numbers are written: one place, so that the page, the figures and the verdict agree.

Percentages carry a sign and one decimal, losses four decimals, tokens three significant digits with k, M or
B (10⁹). What is None is written as a dash.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ablate.models.arithmetic import parameters_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ablate.reports.findings.results import ArmResult
    from ablate.reports.findings.speed import RunTiming, Throughput
    from ablate.reports.findings.targets import Sweep
    from ablate.results.cost import Cost
    from ablate.results.intervals import Interval
    from ablate.results.losses import Band, LossDifference
    from ablate.store.plan_file import Margin, StopRule

DASH = "–"
NBSP = "\u00a0"
MINUS = "−"

RULES = {
    "confirmed": "first crossing confirmed by the next evaluation",
    "first_eval": "first evaluation at or under the target",
}


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign and a proper minus; what rounds to zero has none."""
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def _percent_number(value: float) -> str:
    return signed(100 * value, 0 if abs(value) >= 9.995 else 1)


def percent(value: float | None) -> str:
    """Return a fraction as a signed percentage."""
    return DASH if value is None else f"{_percent_number(value)}{NBSP}%"


def share(value: float | None) -> str:
    """Return a fraction as a percentage without a sign."""
    return DASH if value is None else f"{100 * abs(value):.{0 if abs(value) >= 9.995 else 1}f}{NBSP}%"


def percent_range(low: float | None, high: float | None) -> str:
    """Return ``[+14.1, +22.3]``, empty where there is no interval."""
    if low is None or high is None:
        return ""
    return f"[{_percent_number(low)}, {_percent_number(high)}]"


def percent_interval(value: Interval | Cost) -> str:
    """Return a fraction as a signed percentage with its interval."""
    if value.estimate is None:
        return DASH
    interval = percent_range(value.low, value.high) or "(no interval)"
    return f"{percent(value.estimate)} {interval}"


def tokens(value: float | None) -> str:
    """Return a token count as people say it."""
    if value is None:
        return DASH
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            decimals = max(0, 2 - (math.floor(math.log10(scaled)) if scaled >= 1 else 0))
            return f"{scaled:.{decimals}f}{NBSP}{unit}"
    return f"{value:.0f}"


def parameters(count: int) -> str:
    """Return a number of parameters as people say it, on one line."""
    return parameters_text(count).replace(" ", NBSP)


def loss(value: float | None) -> str:
    """Return a validation loss in nats per token."""
    return DASH if value is None else f"{value:.4f}".replace("-", MINUS)


def with_range(value: Interval | Cost, number: Callable[[float], str], unit: str = "") -> str:
    """Return an estimate with the ``unit``, and with its interval where there is one."""
    if value.estimate is None:
        return DASH
    text = number(value.estimate) + unit
    if value.low is None or value.high is None:
        return text
    return f"{text} [{number(value.low)}, {number(value.high)}]"


def tokens_interval(value: Interval) -> str:
    """Return tokens to target with their interval, or the bound there is."""
    if value.estimate is None and value.low is not None:
        return f"> {tokens(value.low)}"
    if value.estimate is None and value.high is not None:
        return f"≤ {tokens(value.high)}"
    return with_range(value, tokens)


def loss_interval(value: Interval, *, difference: bool = False) -> str:
    """Return a loss, or a signed difference of losses, with its interval."""
    return with_range(value, (lambda number: signed(number, 4)) if difference else loss)


def cost(value: Cost | None) -> str:
    """Return a token cost with its interval, or the bound there is, and the fork that it is counted from."""
    if value is None:
        return DASH
    if value.kind == "baseline":
        return "baseline"
    return _cost(value) + (from_fork(value.counted_from) if value.kind != "none" else "")


def from_fork(origin: int) -> str:
    """Return the words for figures that are counted from a fork after so many tokens; nothing for 0."""
    return f" from {tokens(origin)} on" if origin else ""


def forked(arms: Iterable[ArmResult]) -> str:
    """Return the sentence on the arms whose cost counts from a fork; nothing without one."""
    named = "; ".join(f"{arm.name}{from_fork(arm.counted_from)}" for arm in arms if arm.counted_from)
    return f" Counted from a fork, no cost of whole runs: {named}." if named else ""


def _cost(value: Cost) -> str:
    if value.kind == "bound":
        if value.low is not None and value.high is not None:
            return f"between {percent(value.low)} and {percent(value.high)}"
        if value.low is None:
            return f"< {percent(value.high)}"
        # "> +39 %" reads badly: the sign says no more than "more than".
        return "> " + percent(value.low).removeprefix("+")
    return percent_interval(value) + (", near the budget" if value.near_budget else "")


def break_even(arm: ArmResult) -> str:
    """Return the throughput, as a multiple of the baseline's, from which the arm pays."""
    value = arm.break_even
    if value.estimate is None and value.low is not None:
        return f"> {value.low:.2f}×"
    if value.estimate is None and value.high is not None:
        return f"< {value.high:.2f}×"
    return times(value)


def times(value: Interval) -> str:
    """Return a factor with its interval."""
    return with_range(value, "{:.2f}".format, "×")


def hours(value: Interval, unit: str = "h", scale: float = 1.0) -> str:
    """Return hours, or what they cost, with their interval."""
    return with_range(value, lambda number: f"{number * scale:.3g}", f"{NBSP}{unit}")


def ends(arm: ArmResult) -> str:
    """Return ``hit / censored / diverged``."""
    return f"{arm.hit} / {arm.censored} / {arm.diverged}"


def counts(value: Cost) -> str:
    """Return the numbers of runs behind a comparison."""
    return results(value) if value.pairs is None else f"n{NBSP}={NBSP}{value.pairs} pairs"


def results(value: Cost | Band | Sweep | LossDifference) -> str:
    """Return the numbers of results on both sides, one number where they are equal."""
    own = f"n{NBSP}={NBSP}{value.n}"
    return own if value.n == value.n_baseline else f"{own} against {value.n_baseline}"


def plain(value: object) -> str:
    """Return a value of a study file."""
    if value is None:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def plural(count: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def moment(unix: float | None) -> str:
    """Return a time of the run data in UTC."""
    return DASH if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def timing_reasons(value: RunTiming) -> str:
    """Return why the runs' own timing says nothing of speed."""
    return ", ".join(f"{reason} ({plural(count, 'run')})" for reason, count in value.reasons)


def timed_alone(value: Throughput) -> str:
    """Return what ``ablate throughput`` measured, on what and when."""
    return (
        f"{value.device}, {plural(value.repeats, 'repeat')} of {plural(value.steps, 'step')}, "
        f"{moment(value.measured_unix)}"
    )


def margin(value: Margin) -> str:
    """Return ``±5 % in token cost`` or ``±0.01 nats/token in final loss``."""
    if value.kind == "cost":
        return f"±{100 * value.value:g}{NBSP}% in token cost"
    return f"±{value.value:g} nats/token in final loss"


def levels(alphas: Sequence[float]) -> str:
    """Return nominal significance levels: ``0.069, 0.64, 1.9 and 3.7 %``."""
    return listed([f"{100 * alpha:.2g}" for alpha in alphas]) + f"{NBSP}%"


def coverage(*rules: StopRule | None) -> str:
    """Return what share of intervals holds the truth: one by one, or over all looks of a stop rule."""
    repeated = any(rule is not None and rule.settled is not None for rule in rules)
    return f"repeated 95{NBSP}%" if repeated else f"95{NBSP}%"


def listed(parts: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def p_value(value: float | None) -> str:
    """Return a p-value as people write it."""
    if value is None:
        return DASH
    return "<0.001" if value < 0.001 else f"{value:.3f}"
