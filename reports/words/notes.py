"""How to read the figures of a verdict, and what else follows from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.base.command_hints import command_line
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.gemms import greatest_step
from ablate.reports.words.format import (
    NBSP,
    cost,
    coverage,
    difference,
    listed,
    percents,
    share,
    times,
)
from ablate.results.cost import NEAR_BUDGET
from ablate.results.intervals import KNOWN_DEGREES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis, ArmResult


def write_notes(analysis: Analysis) -> Iterator[str]:
    """Say how to read the figures, and what else follows from them."""
    yield from _on_the_target(analysis)
    yield from _on_evaluation(analysis)
    yield from _on_steps(analysis)
    for arm in analysis.others:
        yield from _on_arm(arm, analysis)
    yield from _on_intervals(analysis)
    yield from _on_timing(analysis)


def _on_the_target(analysis: Analysis) -> Iterator[str]:
    """Say how to get a target, or one that all runs reach."""
    plan = analysis.plan
    if plan.target is None:
        if analysis.has_curves:
            command = command_line("report", plan.study, target="VALUE", out="FOLDER")
            yield f"No target was given, so nothing is said of tokens: `{command}` sets one."
        else:
            yield (
                "The logs hold only final losses: their owners have to vouch that the runs went equally far."
            )
        return
    reached = analysis.reached_by_all
    kinds = {arm.token_cost.kind for arm in analysis.others}
    if (
        reached is None
        or reached <= plan.target.val_loss
        or not kinds & {"bound", "none"}
    ):
        return
    if plan.target.kind == "perplexity":
        value = math.ceil(10 * math.exp(reached)) / 10
    else:
        value = math.ceil(100 * reached) / 100
    words = target_text(replace(plan, target=replace(plan.target, value=value)))
    command = command_line("report", plan.study, target=f"{value:g}", out="FOLDER")
    yield (
        f"All runs that have not diverged reach {words}: with that target (`{command}`) a cost can be given."
    )


def _on_evaluation(analysis: Analysis) -> Iterator[str]:
    """Say what an arm's own evaluation adds, where that is settled."""
    for arm in analysis.others:
        in_bf16 = arm.in_bf16
        if in_bf16 is None:
            continue
        alone = (
            in_bf16.loss_alone if analysis.plan.target is None else in_bf16.tokens_alone
        )
        if (alone.low or 0) <= 0 <= (alone.high or 0):
            continue
        if analysis.plan.target is None:
            yield (
                f"Of the loss difference of {arm.name}, {difference(alone)} {analysis.plan.unit} is its "
                f"evaluation alone; evaluated in bf16 it is {difference(in_bf16.difference)}."
            )
            continue
        text = f"Evaluation alone changes the tokens of {arm.name} by {percents(alone)}"
        if in_bf16.share is not None:
            text += f", {share(in_bf16.share)} of its log cost"
        yield f"{text}; evaluated in bf16 its token cost is {cost(in_bf16.token_cost)}."


def _on_steps(analysis: Analysis) -> Iterator[str]:
    """Say which GEMM adds most: only if the intervals of the steps do not overlap."""
    if len({step.gemm for step in analysis.steps}) < 2:
        return
    greatest = greatest_step(analysis.steps)
    for step in analysis.steps:
        if step.gemm == greatest:
            yield (
                f"{step.gemm.capitalize()} adds most: from {step.from_arm} to {step.to_arm} "
                f"{cost(step.cost)}, above every other step."
            )
            return
    yield "Which GEMM adds most is not settled: the intervals of the steps overlap or are lacking."


def _on_arm(arm: ArmResult, analysis: Analysis) -> Iterator[str]:
    """Say how fast an arm reaches the target, and whether its interval is too narrow."""
    if arm.measured is not None and arm.measured.end_to_end.estimate is not None:
        yield (
            f"End to end, throughput over token cost, {arm.name} goes to the target at "
            f"{times(arm.measured.end_to_end)} the speed of {analysis.baseline} (timed: "
            f"{arm.measured.timed}); it is faster or slower only where the interval leaves 1 out."
        )
    if arm.token_cost.stands_out:
        text = "its interval is from its own spread alone."
        if arm.token_cost.own is not None:
            text = (
                "too few runs of it to know its spread, so its own interval, "
                f"{percents(arm.token_cost.own)}, is the safer one."
            )
        yield f"The runs of {arm.name} spread more than those of the other arms: {text}"


def _on_intervals(analysis: Analysis) -> Iterator[str]:
    """Say what the intervals hold, and what they do not."""
    if any(arm.token_cost.baseline_stands_out for arm in analysis.others):
        yield (
            f"The runs of {analysis.baseline}, the baseline, spread more than those of the arms: every "
            "interval takes the baseline's own variance."
        )
    if any(arm.token_cost.near_budget for arm in analysis.others):
        yield (
            f"Near the budget: a run reached the target only in the last {NEAR_BUDGET:.0%} of its budget. "
            "Its interval is there only because no run missed, and holds the truth less often: take a higher "
            "loss as the target, or a larger budget."
        )
    moderated = ""
    if analysis.is_moderated:
        others = "each other's" if len(analysis.others) == 1 else "the other arms'"
        moderated = f", moderated by {others} spread"
        if any(arm.n <= KNOWN_DEGREES for arm in analysis.others):
            moderated += (
                f" (of at most {KNOWN_DEGREES} runs: too few to know an arm's own)"
            )
    text = f"Brackets are {coverage(analysis.plan.stop)} intervals{moderated}"
    if len(analysis.judged) > 1:
        text += (
            f", each for its own comparison. What is stated holds for all {len(analysis.judged)} comparisons "
            f"together (Hochberg 1988): in 95{NBSP}% of studies no statement of one kind is false"
        )
    yield f"{text}."
    looked = analysis.plan.settled
    if looked is not None:
        yield (
            f"The study could stop arms at looks after {listed([str(n) for n in looked.looks])} seeds. "
            f"Repeated intervals hold over all looks together in 95{NBSP}% of studies, whether and when an "
            f"arm was stopped; the nominal level of each look is stricter "
            f"({100 * analysis.baseline_arm.alpha:.2g}{NBSP}%). The "
            "estimate of an arm that was stopped is biased away from zero; its interval takes the stop into "
            "account."
        )


def _on_timing(analysis: Analysis) -> Iterator[str]:
    """Say who timed the runs, and of which arms no speed is claimed."""
    untimed = [arm.name for arm in analysis.others if arm.measured is None]
    is_timed = len(untimed) < len(analysis.others)
    if analysis.timing.kind == "command":
        text = (
            "The runs were trained by commands, as configured: ablate started them, read their logs and did "
            "not see their arithmetic."
        )
        if is_timed:
            text += " Speed is as logged, and intervals hold nothing of other machines."
        yield text
    elif analysis.timing.kind == "logged":
        text = (
            "The runs were read from logs that others wrote: what is not in a log, such as how FP4 was "
            "computed, is theirs to vouch for."
        )
        if is_timed:
            text += (
                " Speed as logged is of the same kind and number of devices, and holds whatever else "
                "differs: software, clocks, network."
            )
        yield text
        reasons = dict.fromkeys(
            analysis.timing.untold.get(
                name, f"the logs tell no time to set {name} beside it"
            )
            for name in untimed
        )
        if reasons and analysis.plan.target is not None:
            other_arms = "other arms" if is_timed else "these arms"
            yield f"For {other_arms} no claim on speed is made: {'; '.join(reasons)}."
    elif not is_timed:
        yield "No claim on speed is made: `ablate check steps STUDY` on native hardware would give one."
