"""What was found on one arm, in a sentence.

A sentence claims a cost only if that holds beside the claims on all other arms; a bound is called a bound; a
single run for each arm is called no finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ablate.reports.words.format import (
    cost,
    counts,
    difference,
    percents,
    share,
    tokens,
)

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.intervals import Interval

Tone = Literal["fewer", "within", "more", "bound", "diverged", "open", "none"]
TONES: dict[Tone, str] = {
    "fewer": "fewer tokens",
    "within": "within the margin",
    "more": "more tokens",
    "bound": "bound alone",
    "diverged": "diverged",
    "open": "not settled",
    "none": "cannot be judged",
}
"""The words for what was found on an arm."""
LOSS_TONES = TONES | {"fewer": "below it", "more": "above it"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one arm."""

    arm: str
    tone: Tone
    text: str


def judge(arm: ArmResult, analysis: Analysis) -> Finding:
    """Say what was found on an arm: on its token cost or, without a target, on its final loss."""
    if analysis.plan.target is None:
        tone, text = _judge_loss(arm, analysis)
    elif arm.token_cost.kind == "bound":
        tone, text = _judge_bound(arm, analysis)
    else:
        tone, text = _judge_cost(arm, analysis)
    if arm.standing is not None:
        text += f" Against the margin: {arm.standing}."
    if arm.stopped is not None:
        text += f" Stopped early: {arm.stopped.reason}."
    if arm.standing == "within" and tone in ("more", "open", "bound"):
        tone = "within"
    return Finding(arm=arm.name, tone=tone, text=text)


def _judge_loss(arm: ArmResult, analysis: Analysis) -> tuple[Tone, str]:
    loss = arm.difference
    if loss.estimate is None:
        return (
            "none",
            f"No loss difference can be given for {arm.name}{_because(loss)}.".replace(
                "the baseline", analysis.baseline
            ),
        )
    size = f"{difference(loss)} {analysis.plan.unit}"
    if analysis.has_curves:
        size += f" after {tokens(loss.tokens)} tokens"
    size += f", {counts(loss)}"
    if loss.low is None or loss.high is None:
        return (
            "open",
            f"{arm.name} against {analysis.baseline} is no finding: {size}{_because(loss)}.",
        )
    limit = f"differences above {max(-loss.low, loss.high):.4f}"
    return _judge_interval(
        arm, analysis.baseline, loss, size, limit, ("ends above", "ends below")
    )


def _judge_cost(arm: ArmResult, analysis: Analysis) -> tuple[Tone, str]:
    token_cost = arm.token_cost
    if token_cost.kind == "none":
        return (
            "none",
            f"No token cost can be given for {arm.name}{_because(token_cost)}.",
        )
    size = f"{cost(token_cost)}, {_sample(arm)}"
    if token_cost.kind == "point":
        return (
            "open",
            f"{arm.name} against {analysis.baseline} is no finding: {size}{_because(token_cost)}.",
        )
    limit = f"costs above {share(token_cost.high)}"
    words = ("costs more tokens than", "needs fewer tokens than")
    return _judge_interval(arm, analysis.baseline, token_cost, size, limit, words)


def _judge_interval(
    arm: ArmResult,
    baseline: str,
    figure: Interval,
    size: str,
    limit: str,
    words: tuple[str, str],
) -> tuple[Tone, str]:
    """Judge by where zero is. ``words``: for an interval above it, and for one below it."""
    low = figure.low or 0.0  # None: beyond the range of numbers
    high = figure.high or 0.0
    reason = _because(figure)
    if arm.planned.again:  # any difference between the baseline and itself is chance
        text = f"{arm.name} differs from {baseline} in its seeds alone, and one such interval in twenty leaves"
        return "open", f"{text} zero out: {size}{reason}."
    if low <= 0.0 <= high:
        text = f"{arm.name} is inconclusive against {baseline}: {size}; the interval holds zero, and excludes"
        return "open", f"{text} {limit}{reason}."
    if "differs" not in arm.claims:
        text = f"{arm.name} is not settled against {baseline}: {size}; its own interval leaves zero out, but"
        return "open", f"{text} not beside the other arms'{reason}."
    above, below = words
    if low > 0:
        return "more", f"{arm.name} {above} {baseline}: {size}{reason}."
    return "fewer", f"{arm.name} {below} {baseline}: {size}{reason}."


def _judge_bound(arm: ArmResult, analysis: Analysis) -> tuple[Tone, str]:
    token_cost = arm.token_cost
    if arm.count("diverged") == arm.n:
        return (
            "diverged",
            f"{arm.name} did not reach the target (all its runs ({arm.n}) diverged).",
        )
    if token_cost.low is None or token_cost.low <= 0:
        text = (
            f"{arm.name} is inconclusive: the cost is {cost(token_cost)} in these runs"
        )
        return "bound", f"{text}{_because(token_cost)}."
    # Without a sampling error the bound says nothing of other runs.
    tone: Tone = "bound"
    at_budget = ""
    if token_cost.restricted is not None:
        at_budget = (
            f"; with all runs cut at the budget {percents(token_cost.restricted)}"
        )
        if "differs" in arm.claims:
            tone = "more"
    return tone, (
        f"In these runs {arm.name} took at least {share(token_cost.low)} more tokens than "
        f"{analysis.baseline} ({token_cost.note}{at_budget}, {_sample(arm)})."
    )


def _sample(arm: ArmResult) -> str:
    """Say how many runs there are, and whether they were emulated: a sentence may be quoted alone."""
    modes = {run.backend_mode for run in arm.runs if run.end != "missing"}
    if modes & {"emulated", "reference"}:
        return f"{counts(arm.token_cost)}, emulated"
    return counts(arm.token_cost)


def _because(figure: Interval) -> str:
    return f" ({figure.note})" if figure.note else ""
