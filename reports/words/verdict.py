"""The verdict in sentences: what the data say, and what they do not.

A sentence claims a cost only where the interval excludes zero; a bound is called a bound; one run an
arm is called no finding. Which GEMM adds most is said only if the intervals of the steps do not overlap.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.base.command_hints import command_line
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.gemms import greatest_step
from ablate.reports.words import words
from ablate.reports.words.evaluation import evaluation_notes
from ablate.reports.words.headline import write_headline
from ablate.results.cost import NEAR_BUDGET, is_settled
from ablate.results.stop_rule import levels_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.words.headline import Tone

_MOST_REASONS = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one arm."""

    arm: str
    tone: Tone
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``lead`` says what to do, ``more`` what to run next; ``take``: the arm that the data speak for.

    ``count`` sums up, ``findings`` has a sentence for each arm, ``notes`` say how to take them.
    """

    lead: str
    more: str = ""
    take: str | None = None
    count: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole verdict as plain sentences."""
        findings = (finding.text for finding in self.findings)
        return (self.lead, *filter(None, [self.more, self.count]), *findings, *self.notes)


def write_verdict(analysis: Analysis) -> Verdict:
    """Put an analysis into words."""
    if not any(arm.n for arm in analysis.arms):
        runs = words.plural(analysis.planned, "run")
        return Verdict(lead=f"No results yet: none of the {runs} has finished or diverged.")
    if not analysis.others:
        return Verdict(lead=_baseline_alone(analysis))
    if analysis.plan.target is None:
        return _by_final_loss(analysis)
    found = [(arm.planned.again, _finding(arm, analysis.baseline_arm)) for arm in analysis.others]
    tones = {finding.arm: finding.tone for again, finding in found if not again}
    headline = write_headline(analysis, tones) if tones else None
    return Verdict(
        lead=headline.text if headline else _baseline_alone(analysis),
        more=headline.more if headline else "",
        take=headline.take if headline else None,
        count=_count(analysis, Counter(tones.values())) if headline else "",
        findings=tuple(finding for _, finding in found),
        notes=tuple(_notes(analysis)),
    )


def _baseline_alone(analysis: Analysis) -> str:
    base = analysis.baseline_arm
    text = f"The study has one arm, {base.name}: there is nothing to compare it with."
    if analysis.plan.target is None:
        return f"{text} Its final loss is {words.loss_interval(base.final_loss)} nats/token, n = {base.n}."
    if base.hit == base.n:
        reached = words.tokens_interval(base.tokens_to_target)
        return f"{text} It reaches {target_text(analysis.plan.target)} after {reached} tokens, n = {base.n}."
    return f"{text} Of {words.plural(base.n, 'run')}, {base.hit} reached {target_text(analysis.plan.target)}."


def _count(analysis: Analysis, tones: Counter[Tone]) -> str:
    phrases: dict[Tone, tuple[str, str]] = {
        "fewer": ("needs fewer tokens", "need fewer tokens"),
        "within": ("is within the margin", "are within the margin"),
        "more": ("needs more tokens", "need more tokens"),
        "bound": ("has a bound alone", "have a bound alone"),
        "diverged": ("diverged in every run", "diverged in every run"),
        "open": ("is not settled", "are not settled"),
        "none": ("cannot be judged", "cannot be judged"),
    }
    parts = [f"{n} {phrases[tone][n > 1]}" for tone in phrases if (n := tones[tone])]
    arms = words.plural(tones.total(), "arm")
    compared = f"{arms} compared with {analysis.baseline} at {target_text(analysis.plan.target)}"
    return f"Of {compared}, {words.listed(parts)}."


def _finding(arm: ArmResult, base: ArmResult) -> Finding:
    """Say what was found on an arm, and whether it was stopped early."""
    judge = _judge_bound if arm.token_cost.kind == "bound" else _judge
    tone, text = judge(arm, base)
    more = ""
    if arm.token_cost.kind == "interval" and (reason := arm.token_cost.reason):
        more += f" {reason.capitalize()}."
    if arm.counted_from:
        more += f" Counted from its fork after {words.tokens(arm.counted_from)} tokens."
    if arm.token_cost.near_budget:
        more += (
            f" A run reached the target only in the last {100 * NEAR_BUDGET:g}\u00a0% of its budget. Where "
            "one misses there is no interval, so those that are given are of lucky runs and hold the truth "
            "less often: take a higher loss as the target, or a larger budget."
        )
    if arm.behind.estimate is not None:
        more += (
            f" At equal tokens its loss differs by {words.signed(arm.difference.estimate or 0.0, 4)} "
            f"nats/token: over the slope of {base.name}'s curve there, about "
            f"{words.percent_interval(arm.behind)} in tokens, at that loss and not at the target."
        )
    if arm.standing == "open":
        more += " Whether it is within the margin is open."
    elif arm.standing is not None:
        more += f" It is shown to be {'within' if arm.standing == 'within' else 'outside of'} the margin."
    if arm.stopped is not None:
        more += f" Stopped early: {arm.stopped.reason}."
    if arm.standing == "within" and tone in ("more", "open"):
        tone = "within"
    elif tone == "open" and arm.token_cost.kind == "bound":
        tone = "bound"
    return Finding(arm=arm.name, tone=tone, text=text + more)


def _counts(arm: ArmResult) -> str:
    """Return the numbers of runs, and if they were emulated: a sentence may be quoted on its own."""
    text = words.counts(arm.token_cost)
    modes = {run.backend_mode for run in arm.runs if run.end != "missing"}
    return f"{text}, emulated" if modes & {"emulated", "reference"} else text


def _judge(arm: ArmResult, base: ArmResult) -> tuple[Tone, str]:
    cost, n = arm.token_cost, _counts(arm)
    size = words.share(cost.estimate)
    if cost.kind == "point":
        way = "fewer" if (cost.estimate or 0) < 0 else "more"
        text = (
            f"{arm.name} took {size} {way} tokens than {base.name}, but that is no finding ({cost.reason})."
        )
        return "open", text
    if cost.estimate is None or cost.low is None or cost.high is None:
        return "none", f"For {arm.name} no token cost can be given ({cost.reason})."
    change, interval = words.percent(cost.estimate), words.percent_range(cost.low, cost.high)
    if arm.planned.again and not is_settled(cost):
        alone = f"{arm.name}, which differs in its seeds alone"
        return "open", f"{alone}: {change} tokens {interval}, {n}; no false alarm."
    if arm.planned.again:  # whatever is found between the baseline and itself is found by chance
        return "none", (
            f"{arm.name} differs from {base.name} in its seeds alone, and yet: {change} tokens {interval}, "
            f"{n}. That is a false alarm (one in twenty is to be expected); a cost of that size is not "
            "beyond chance here."
        )
    if cost.low > 0:
        return "more", f"{arm.name} costs {size} more tokens than {base.name} {interval}, {n}."
    if cost.high < 0:
        return "fewer", f"{arm.name} needs {size} fewer tokens than {base.name} {interval}, {n}."
    return "open", (
        f"{arm.name} is inconclusive: {change} tokens against {base.name} {interval}, {n}; the interval "
        f"holds zero, and excludes costs above {words.share(cost.high)}."
    )


def _judge_bound(arm: ArmResult, base: ArmResult) -> tuple[Tone, str]:
    cost = arm.token_cost
    if arm.n and arm.diverged == arm.n:
        runs = "its one run" if arm.n == 1 else f"all {arm.n} runs"
        return "diverged", f"{arm.name} did not reach the target: {runs} diverged."
    if cost.low is None or cost.low <= 0:
        bound = f"the cost is {words.cost(cost)} in these runs ({cost.reason})"
        return "open", f"{arm.name} is inconclusive: {bound}."
    # Without a sampling error it says nothing of other runs.
    text = (
        f"In these runs {arm.name} took at least {words.share(cost.low)} more tokens than {base.name} "
        f"({cost.reason}"
    )
    restricted = cost.restricted
    if restricted is None or restricted.low is None:
        return "open", f"{text}, {_counts(arm)})."
    cut = words.percent_range(restricted.low, restricted.high)
    text = f"{text}; with all runs cut at the budget {cut}"
    if restricted.low > 0:
        return "more", f"{text}, {_counts(arm)})."
    return "open", f"{text}, which holds zero, {_counts(arm)})."


def _notes(analysis: Analysis) -> Iterator[str]:
    yield from _target_note(analysis)
    yield from _tuning_notes(analysis)
    yield from evaluation_notes(analysis)
    yield from _gemm_note(analysis)
    yield from _speed_notes(analysis)
    for arm in analysis.others:
        own = arm.token_cost.own
        if arm.token_cost.stands_out and own is not None and own.low is not None:
            yield (
                f"The runs of {arm.name} spread more than those of the other arms: its own interval, "
                f"{words.percent_range(own.low, own.high)}, is the safer one."
            )
    if any(arm.token_cost.baseline_stands_out for arm in analysis.others):
        yield (
            f"The runs of {analysis.baseline}, the baseline, spread more than those of the arms: every "
            "interval takes the baseline's own variance."
        )
    yield from _bracket_note(analysis, sum(arm.token_cost.kind == "interval" for arm in analysis.others))
    yield from _stop_notes(analysis)
    if analysis.timing.kind == "logged":
        yield _logged_note(analysis)
    elif not any(arm.measured for arm in analysis.others):
        reasons = words.timing_reasons(analysis.timing)
        yield f"The runs' own timing does not count, so no claim on speed is made: {reasons}."


def _target_note(analysis: Analysis) -> Iterator[str]:
    """Name a target that all runs reach, where an arm has no cost or a bound for want of one."""
    target, reached = analysis.plan.target, analysis.reached_by_all
    if target is None or reached is None or reached <= target.val_loss:
        return
    if all(arm.token_cost.kind in ("interval", "point") for arm in analysis.others):
        return
    steps, value = (10, math.exp(reached)) if target.kind == "perplexity" else (100, reached)
    diverged = any(arm.diverged for arm in analysis.arms)
    runs = "All runs that have not diverged" if diverged else "All runs"
    higher = replace(target, value=math.ceil(value * steps) / steps)
    command = command_line("report", analysis.plan.study, target=f"{higher.value:g}", out="FOLDER")
    yield f"{runs} reach {target_text(higher)}: with that target (`{command}`) a cost can be given."


def _bracket_note(analysis: Analysis, count: int) -> Iterator[str]:
    """Say what the brackets of so many comparisons are."""
    if count:
        many = (
            f", each for its own comparison and not adjusted for there being {count}: the chance that one of "
            "them misses is greater than 5\u00a0%"
        )
        moderated = ", moderated by the other arms' spread" if analysis.is_moderated else ""
        yield (
            f"Brackets are {words.coverage(analysis.plan.stop)} intervals{moderated}"
            f"{many if count > 1 else ''}."
        )


def _logged_note(analysis: Analysis) -> str:
    """Say what logs of others are worth, and of which arms they do not tell the speed."""
    text = (
        "The runs were read from logs that others wrote: what is not in a log, such as how FP4 was "
        "computed, is theirs to vouch for"
    )
    if analysis.plan.target is None:
        return f"{text}."
    timed = [arm.name for arm in analysis.others if arm.measured is not None]
    if timed:
        text += (
            f". Speed as logged ({', '.join(timed)}) is of the same kind and number of devices, and holds "
            "whatever else differs: software, clocks, network"
        )
    untimed = [arm for arm in analysis.others if arm.measured is None]
    reasons = dict.fromkeys(
        analysis.timing.untold.get(arm.name, f"the logs tell no time to set {arm.name} beside it")
        for arm in untimed
    )
    if not reasons:
        return f"{text}."
    text += f"{'. For other arms' if timed else ', and'} no claim on speed is made: "
    named = [*reasons][:_MOST_REASONS]
    left = f"; and {len(reasons) - len(named)} more" * (len(reasons) > len(named))
    return f"{text}{'; '.join(named)}{left}."


def _by_final_loss(analysis: Analysis) -> Verdict:
    """Put a study without a target into words: arms are compared by their final losses."""
    found = [_loss_finding(arm, analysis) for arm in analysis.others]
    phrases: dict[Tone, str] = {
        "more": "above it",
        "fewer": "below it",
        "open": "not settled",
        "none": "without a figure",
    }
    tones = Counter(finding.tone for finding in found)
    parts = [f"{n} {phrase}" for tone, phrase in phrases.items() if (n := tones[tone])]
    arms = words.plural(len(found), "arm")
    notes = [*evaluation_notes(analysis)]
    notes += [*_bracket_note(analysis, sum(arm.difference.low is not None for arm in analysis.others))]
    if analysis.has_curves:
        command = command_line("report", analysis.plan.study, target="VALUE", out="FOLDER")
        notes.append(f"No target was given, so that nothing is said of tokens: `{command}` takes one.")
    else:
        notes.append(
            "The logs hold final losses alone: that the runs went equally far is for their owners to vouch."
        )
    if analysis.timing.kind == "logged":
        notes.append(_logged_note(analysis))
    return Verdict(
        lead=f"Final loss of {arms} against {analysis.baseline}: {words.listed(parts)}.",
        findings=tuple(found),
        notes=tuple(notes),
    )


def _loss_finding(arm: ArmResult, analysis: Analysis) -> Finding:
    """Say how far an arm's final loss is from the baseline's."""
    tone, text = _judge_loss(arm, analysis)
    return Finding(arm=arm.name, tone=tone, text=text)


def _judge_loss(arm: ArmResult, analysis: Analysis) -> tuple[Tone, str]:
    found, base = arm.difference, analysis.baseline
    if found.estimate is None:
        return "none", f"For {arm.name} no loss difference can be given ({found.note})."
    verb, at = ("is", f" after {words.tokens(found.tokens)} tokens") if analysis.has_curves else ("ends", "")
    size = f"{abs(found.estimate):.4f} nats/token {'above' if found.estimate > 0 else 'below'} {base}"
    if found.low is None or found.high is None:
        return "open", f"{arm.name} {verb} {size}{at}, but that is no finding ({found.note})."
    brackets = f"[{words.signed(found.low, 4)}, {words.signed(found.high, 4)}], {words.results(found)}"
    if found.note is not None:
        brackets += f" ({found.note})"
    if found.low <= 0 <= found.high:
        excludes = (
            f"the interval holds zero, and excludes differences above {max(-found.low, found.high):.4f}"
        )
        return "open", f"{arm.name} is inconclusive: {size}{at} {brackets}; {excludes}."
    return "more" if found.low > 0 else "fewer", f"{arm.name} {verb} {size}{at} {brackets}."


def _tuning_notes(analysis: Analysis) -> Iterator[str]:
    """Say that the arms are compared at values of their own, what finding them took, and what it changed."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return
    yield (
        f"Each arm trains at the {words.listed([*tuning.plan.fields])} found for it in {tuning.plan.trials} "
        f"trials of {words.tokens(tuning.plan.tokens)} tokens, as many for every arm. The trials took "
        f"{words.tokens(tuning.total_tokens)} tokens in all, beside {words.tokens(tuning.run_tokens)} in the "
        "runs compared."
    )
    for arm in tuning.arms:
        before, after = (
            ((cost.estimate or 0.0) > 0 if is_settled(cost) else None)
            for cost in (arm.token_cost_shared, arm.token_cost_tuned)
        )
        if before != after and arm.token_cost_shared.kind == "interval":
            cost = words.cost(arm.token_cost_shared)
            yield f"Tuning changes what is found for {arm.name}: at the study's own values {cost}."


def _stop_notes(analysis: Analysis) -> Iterator[str]:
    """Say what early stops mean for the figures, and what they saved."""
    looked = None if analysis.plan.stop is None else analysis.plan.stop.settled
    if looked is not None:
        yield (
            "The study could stop arms at looks after "
            f"{words.listed([str(n) for n in looked.looks])} seeds. Repeated intervals hold over all looks "
            "together in 95\u00a0% of studies, whether and when an arm was stopped; at each look the nominal "
            f"level is stricter ({words.levels(levels_of(looked))})."
        )
    if any(arm.stopped is not None and arm.stopped.seeds is not None for arm in analysis.stopped):
        yield (
            "The estimate of an arm that was stopped at a look is biased away from zero; its interval "
            "takes the stop into account."
        )
    if analysis.stopped:
        unused = sum(arm.unused for arm in analysis.stopped)
        saved = sum(arm.tokens_saved for arm in analysis.stopped)
        of_all = saved / max(1, sum(run.budget for arm in analysis.arms for run in arm.runs))
        yield (
            f"Early stops saved {words.tokens(saved)} tokens ({words.share(of_all)} of the study's budget): "
            f"{words.plural(unused, 'run')} {'was' if unused == 1 else 'were'} not needed."
        )


def _gemm_note(analysis: Analysis) -> Iterator[str]:
    """Say which GEMM adds most, or that it is not settled; nothing where no pair of arms shows it."""
    gemms = {step.gemm for step in analysis.steps}
    if len(gemms) < 2 or not any(step.cost.estimate is not None for step in analysis.steps):
        return
    greatest = greatest_step(analysis.steps)
    if greatest is None:
        yield "Which GEMM adds most is not settled: the intervals of the steps overlap or are lacking."
        return
    step = next(step for step in analysis.steps if step.gemm == greatest)
    yield (
        f"{greatest.capitalize()} adds most: from {step.from_arm} to {step.to_arm} "
        f"{words.percent(step.cost.estimate)} tokens {words.percent_range(step.cost.low, step.cost.high)}, "
        "above every other step."
    )


def _speed_notes(analysis: Analysis) -> Iterator[str]:
    """Say of each arm with native timing whether it is faster to the target, tokens and time together."""
    for arm in analysis.others:
        if arm.measured is None or arm.measured.end_to_end.estimate is None:
            continue
        found = arm.measured.end_to_end
        if found.low is None or found.high is None:
            outcome = "which is no finding without an interval"
        elif found.low <= 1 <= found.high:
            outcome = "so whether it is faster is not settled"
        else:
            outcome = f"so it is {'faster' if found.low > 1 else 'slower'}"
        timed = {"alone": "timed alone", "in its runs": "as timed in its runs"}.get(
            arm.measured.timed, "as logged"
        )
        yield (
            f"End to end, throughput over token cost, {arm.name} goes to the target at {words.times(found)} "
            f"the speed of {analysis.baseline}, {timed}: {outcome}."
        )
