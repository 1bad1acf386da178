"""The verdict in sentences: what to do, what was found on each arm, and how to read it.

A sentence claims a cost only if the interval excludes zero; a bound is called a bound; a single run for each
arm is called no finding. Which GEMM adds most is said only if the intervals of the steps do not overlap.

What to do: with a margin, take an arm that is shown to be within it, or to need fewer tokens; without a
margin, an arm that is shown to need fewer. First comes the arm with the most of its training in FP4, then the
one that needs the fewest tokens. If there are no such arms, the least costly ones are named.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.command_hints import command_line
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.gemms import greatest_step
from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words.format import (
    NBSP,
    cost,
    counts,
    coverage,
    interval,
    listed,
    margin,
    percents,
    plural,
    share,
    signed,
    times,
    tokens,
)
from ablate.results.cost import NEAR_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult

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
_LOSS_TONES = TONES | {"fewer": "below it", "more": "above it"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one arm."""

    arm: str
    tone: Tone
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``lead`` says what to do, ``more`` what to run next; ``take``: the arm to take, None if none is shown.

    ``count`` sums up, ``findings`` has a sentence for each arm, ``notes`` say how to read them.
    """

    lead: str
    more: str = ""
    take: str | None = None
    count: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole verdict as sentences, in order."""
        findings = (finding.text for finding in self.findings)
        return (self.lead, *filter(None, [self.more, self.count]), *findings, *self.notes)


def write_verdict(analysis: Analysis) -> Verdict:
    """Put an analysis into words."""
    base, target = analysis.baseline_arm, analysis.plan.target
    if not any(arm.n for arm in analysis.arms):
        runs = plural(analysis.planned, "run")
        return Verdict(lead=f"No results yet: none of the {runs} has finished or diverged.")
    findings = tuple(_judge(arm, analysis) for arm in analysis.others)
    again = {arm.name for arm in analysis.arms if arm.planned.again}
    tones = {one.arm: one.tone for one in findings if one.arm not in again or target is None}
    said: dict[str, Any] = {"findings": findings, "notes": tuple(_notes(analysis)) if findings else ()}
    if not tones:
        lead = (
            f"The study has one arm, {base.name}: there is nothing to compare it with. Its final loss is "
            f"{interval(base.final_loss)} {analysis.plan.unit}, its tokens to target "
            f"{interval(base.tokens_to_target, tokens)}, n = {base.n}."
        )
        return Verdict(lead=lead, **said)
    words = TONES if target is not None else _LOSS_TONES
    numbers = Counter(tones.values())
    found = listed([f"{words[tone]} ({numbers[tone]})" for tone in words if numbers[tone]])
    arms = plural(len(tones), "arm")
    if target is None:
        return Verdict(lead=f"Final loss of {arms} against {base.name}: {found}.", **said)
    said["count"] = f"Of {arms} compared with {base.name} at {target_text(analysis.plan)}: {found}."
    return Verdict(**_advice(analysis, tones), **said)


def _advice(analysis: Analysis, tones: dict[str, Tone]) -> dict[str, Any]:
    """Choose ``lead``, ``more`` and ``take`` of the verdict. ``tones``: of the arms to choose from."""
    base, within = analysis.baseline_arm, analysis.plan.margin
    arms = [arm for arm in analysis.others if arm.name in tones]
    good = [arm for arm in arms if tones[arm.name] in ("fewer", "within")]
    known = good or [arm for arm in arms if arm.token_cost.kind == "interval"]
    if missed := base.n - base.count("hit"):
        lead = (
            f"Nothing can be chosen yet: the baseline itself did not reach the target in "
            f"{missed} of {plural(base.n, 'run')}, and token costs against it are bounds at best. "
            "Take a target that it reaches, or a larger budget."
        )
        return {"lead": lead}
    if not known:
        named: dict[str, list[str]] = {}
        for arm in arms:
            if arm.token_cost.note:
                named.setdefault(arm.token_cost.note, []).append(arm.name)
        reasons = (why.replace("this arm", listed(names)) for why, names in named.items())
        lead = (
            f"Nothing is settled yet: no arm has a token cost with an interval ({'; '.join(reasons)}). It "
            "takes more seeds, or a target that every run reaches after its first evaluation."
        )
        return {"lead": lead}

    def tokens_needed(arm: ArmResult) -> float:
        return math.inf if arm.token_cost.estimate is None else arm.token_cost.estimate

    def told(arm: ArmResult, equal: Sequence[str] = ()) -> str:
        flops = f"; {share(arm.fp4_share)} of the training FLOPs in FP4" if arm.fp4_share else ""
        ties = f", as much as {listed(equal)}" if equal else ""
        return f"{arm.name} (token cost {cost(arm.token_cost)}{flops}{ties})"

    fewest = min([arm for arm in known if arm.fp4_share] or known, key=tokens_needed)
    # Of arms with an equal share in FP4, the one of lowest token cost.
    most = round(max(arm.fp4_share or 0 for arm in known), 6)
    first, *equal = sorted((arm for arm in known if round(arm.fp4_share or 0, 6) == most), key=tokens_needed)
    answer = told(first, [arm.name for arm in equal] if most else ())
    beside = "" if fewest is first else f" Fewest tokens with FP4: {told(fewest)}."
    if good:
        lead = f"Take {answer}: {TONES[tones[first.name]]}.{beside}"
    else:
        lacking = f"need fewer tokens than {base.name}"
        if within is not None:
            lacking = f"be within {margin(within, analysis.plan.unit)}"
        least = "Most in FP4 at the least cost" if beside else "Least costly"
        lead = f"{least}: {answer}.{beside} No arm is shown to {lacking}."
    more = [
        f"{arm.name} pays where it trains {times(arm.break_even)} as fast as {base.name}."
        for arm in (first, *([fewest] if beside else []))
        if tones[arm.name] == "more"
    ]
    # Open arms that could replace the first.
    seeds = [
        f"{arm.name} about {arm.power.more_seeds or f'over {MOST_SEEDS:,}'}"
        for arm in arms
        if arm not in good
        and arm.power is not None
        and arm.power.more_seeds != 0
        and (arm.fp4_share or 0) >= (first.fp4_share or 0) * bool(good)
    ]
    if seeds:
        more.append(f"More seeds to settle: {', '.join(seeds)}.")
        if within is None:
            more.append(f"To show that an arm is as good as {base.name}, name a margin (target.within).")
    return {"lead": lead, "more": " ".join(more), "take": first.name if good else None}


def _judge(arm: ArmResult, analysis: Analysis) -> Finding:
    """Say what was found on an arm: on its token cost or, without a target, on its final loss."""
    name, base, found = arm.name, analysis.baseline, arm.token_cost
    of_loss = analysis.plan.target is None
    figure = arm.difference if of_loss else found
    low, high, reason = figure.low, figure.high, figure.note
    modes = {run.backend_mode for run in arm.runs if run.end != "missing"}
    # Also whether they were emulated: a sentence may be quoted alone.
    numbers = counts(found) + ", emulated" * bool(modes & {"emulated", "reference"})
    kind, size, noun = found.kind, f"{cost(found)}, {numbers}", "token cost"
    limit, worse, better = f"costs above {share(high)}", "costs more tokens than", "needs fewer tokens than"
    if of_loss:
        loss, noun, worse, better = arm.difference, "loss difference", "ends above", "ends below"
        at = f" after {tokens(loss.tokens)} tokens" if analysis.has_curves else ""
        size = f"{interval(loss, signed)} {analysis.plan.unit}{at}, {counts(loss)}"
        kind = "none" if loss.estimate is None else "point" if low is None or high is None else "interval"
        limit = f"differences above {max(-(low or 0), high or 0):.4f}"
    tone: Tone = "open"
    if kind == "none":
        tone, text = "none", f"For {name} no {noun} can be given"
    elif kind == "point":
        text = f"{name} against {base} is no finding: {size}"
    elif kind == "bound" and arm.count("diverged") == arm.n:
        tone, text, reason = (
            "diverged",
            f"{name} did not reach the target",
            f"all its runs ({arm.n}) diverged",
        )
    elif kind == "bound" and low is not None and low > 0:
        # Without a sampling error the bound says nothing of other runs.
        cut = found.restricted
        tone = "more" if cut is not None and cut.low is not None and cut.low > 0 else "bound"
        at_budget = "" if cut is None else f"; with all runs cut at the budget {percents(cut)}"
        text = f"In these runs {name} took at least {share(low)} more tokens than {base}"
        reason = f"{reason}{at_budget}, {numbers}"
    elif kind == "bound":
        tone, text = "bound", f"{name} is inconclusive: the cost is {cost(found)} in these runs"
    elif arm.planned.again:  # any difference between the baseline and itself is chance
        text = (
            f"{name} differs from {base} in its seeds alone, and one such interval in twenty leaves zero "
            f"out: {size}"
        )
    elif (low or 0.0) <= 0.0 <= (high or 0.0):  # None: beyond the range of numbers
        text = f"{name} is inconclusive against {base}: {size}; the interval holds zero, and excludes {limit}"
    else:
        tone = "more" if (low or 0) > 0 else "fewer"
        text = f"{name} {worse if tone == 'more' else better} {base}: {size}"
    text += f" ({reason})." if reason else "."
    if arm.standing is not None:
        text += f" Against the margin: {arm.standing}."
    if arm.stopped is not None:
        text += f" Stopped early: {arm.stopped.reason}."
    if arm.standing == "within" and tone in ("more", "open", "bound"):
        tone = "within"
    return Finding(arm=name, tone=tone, text=text)


def _notes(analysis: Analysis) -> Iterator[str]:
    """Say how to read the figures, and what else follows from them."""
    target, reached = analysis.plan.target, analysis.reached_by_all
    if target is None and analysis.has_curves:
        command = command_line("report", analysis.plan.study, target="VALUE", out="FOLDER")
        yield f"No target was given, so that nothing is said of tokens: `{command}` takes one."
    elif target is None:
        yield "The logs hold final losses alone: that the runs went equally far is for their owners to vouch."
    elif (
        reached is not None
        and reached > target.val_loss
        and any(arm.token_cost.kind in ("bound", "none") for arm in analysis.others)
    ):
        steps, value = (10, math.exp(reached)) if target.kind == "perplexity" else (100, reached)
        higher = replace(target, value=math.ceil(value * steps) / steps)
        command = command_line("report", analysis.plan.study, target=f"{higher.value:g}", out="FOLDER")
        yield (
            "All runs that have not diverged reach "
            f"{target_text(replace(analysis.plan, target=higher))}: with that target (`{command}`) a cost "
            "can be given."
        )
    for arm in analysis.others:
        found = arm.in_bf16
        if found is None:
            continue
        alone = found.loss_alone if target is None else found.tokens_alone
        if (alone.low or 0) <= 0 <= (alone.high or 0):
            continue
        if target is None:
            yield (
                f"Of the loss difference of {arm.name}, {interval(alone, signed)} {analysis.plan.unit} is "
                f"its evaluation alone; evaluated in bf16 it is {interval(found.difference, signed)}."
            )
        else:
            part = "" if found.share is None else f", {share(found.share)} of its log cost"
            yield (
                f"Evaluation alone changes the tokens of {arm.name} by {percents(alone)}{part}; evaluated "
                f"in bf16 its token cost is {cost(found.token_cost)}."
            )
    if len({step.gemm for step in analysis.steps}) > 1:
        greatest = greatest_step(analysis.steps)
        most = next((step for step in analysis.steps if step.gemm == greatest), None)
        yield (
            "Which GEMM adds most is not settled: the intervals of the steps overlap or are lacking."
            if most is None
            else f"{most.gemm.capitalize()} adds most: from {most.from_arm} to {most.to_arm} "
            f"{cost(most.cost)}, above every other step."
        )
    for arm in analysis.others:
        if arm.measured is not None and arm.measured.end_to_end.estimate is not None:
            yield (
                f"End to end, throughput over token cost, {arm.name} goes to the target at "
                f"{times(arm.measured.end_to_end)} the speed of {analysis.baseline} (timed: "
                f"{arm.measured.timed}); it is faster or slower only where the interval leaves 1 out."
            )
        own = arm.token_cost.own
        if arm.token_cost.stands_out and own is not None:
            yield (
                f"The runs of {arm.name} spread more than those of the other arms: its own interval, "
                f"{percents(own)}, is the safer one."
            )
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
    moderated = ", moderated by the other arms' spread" if analysis.is_moderated else ""
    yield (
        f"Brackets are {coverage(analysis.plan.stop)} intervals{moderated}, each for its own comparison, not "
        "adjusted for how many there are."
    )
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
    untimed = [arm for arm in analysis.others if arm.measured is None]
    if analysis.timing.kind == "command":
        yield (
            "The runs were trained by commands, as configured: ablate started them, read their logs and did "
            "not see their arithmetic. Speed is as logged, and intervals hold nothing of other machines."
        )
    elif analysis.timing.kind == "logged":
        yield (
            "The runs were read from logs that others wrote: what is not in a log, such as how FP4 was "
            "computed, is theirs to vouch for. Speed as logged, where it is given, is of the same kind and "
            "number of devices, and holds whatever else differs: software, clocks, network."
        )
        reasons = dict.fromkeys(
            analysis.timing.untold.get(arm.name, f"the logs tell no time to set {arm.name} beside it")
            for arm in untimed
        )
        if reasons and analysis.plan.target is not None:
            yield f"For other arms no claim on speed is made: {'; '.join(reasons)}."
    elif len(untimed) == len(analysis.others):
        yield "No claim on speed is made: `ablate check steps STUDY` on native hardware would give one."
