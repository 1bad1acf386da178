"""The verdict in sentences: what the data say, and what they do not.

A sentence claims a cost only where the interval excludes zero; a bound is called a bound; one run an
arm is called no finding. Which GEMM adds most is said only if the intervals of the steps do not overlap.

How it fails: it does not raise. A study without results gets the sentence that says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ablate.reports.findings.ends import target_text
from ablate.reports.statistics.cost import is_settled
from ablate.reports.statistics.steps import greatest_step
from ablate.reports.statistics.stopping import levels_of
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.statistics.cost import Cost

Tone = Literal["more", "diverged", "fewer", "open", "none"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one arm. ``tone``: costs tokens, diverges, saves tokens, not settled, no say."""

    arm: str
    tone: Tone
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``lead`` sums up, ``findings`` has a sentence for each arm, ``notes`` say how to take them."""

    lead: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole verdict as plain sentences."""
        return (self.lead, *(finding.text for finding in self.findings), *self.notes)


def write_verdict(analysis: Analysis) -> Verdict:
    """Put an analysis into words."""
    base = analysis.baseline_arm
    if not any(arm.n for arm in analysis.arms):
        lead = (
            f"No results yet: none of the {words.plural(analysis.planned, 'run')} has finished or diverged."
        )
        return Verdict(lead=lead, findings=(), notes=())
    if not analysis.others:
        return Verdict(lead=_baseline_alone(analysis), findings=(), notes=())
    findings = tuple(
        _with_stop(_again(arm, base) if arm.planned.again else _finding(arm, base), arm)
        for arm in analysis.others
    )
    judged = tuple(
        finding for finding, arm in zip(findings, analysis.others, strict=True) if not arm.planned.again
    )
    return Verdict(
        lead=_lead(analysis, judged) if judged else _baseline_alone(analysis),
        findings=findings,
        notes=_notes(analysis),
    )


def _baseline_alone(analysis: Analysis) -> str:
    base = analysis.baseline_arm
    text = f"The study has one arm, {base.name}: there is nothing to compare it with."
    if base.hit == base.n:
        reached = words.tokens_interval(base.tokens_to_target)
        return f"{text} It reaches {target_text(analysis.target)} after {reached} tokens, n = {base.n}."
    return f"{text} Of {words.plural(base.n, 'run')}, {base.hit} reached {target_text(analysis.target)}."


def _lead(analysis: Analysis, findings: tuple[Finding, ...]) -> str:
    tones = Counter(finding.tone for finding in findings)
    phrases: dict[Tone, tuple[str, str]] = {
        "more": ("needs more tokens", "need more tokens"),
        "diverged": ("diverged in every run", "diverged in every run"),
        "fewer": ("needs fewer tokens", "need fewer tokens"),
        "open": ("is not settled", "are not settled"),
        "none": ("cannot be judged", "cannot be judged"),
    }
    parts = [
        f"{tones[tone]} {one if tones[tone] == 1 else many}"
        for tone, (one, many) in phrases.items()
        if tones[tone]
    ]
    arms = words.plural(len(findings), "arm")
    compared = f"{arms} compared with {analysis.baseline} at {target_text(analysis.target)}"
    return f"Of {compared}, {words.listed(parts)}."


def _with_stop(finding: Finding, arm: ArmResult) -> Finding:
    """Say beside what was found that the arm was stopped for it."""
    if arm.stopped is None:
        return finding
    return replace(finding, text=f"{finding.text} Stopped early: {arm.stopped.reason}.")


def _counts(arm: ArmResult) -> str:
    """Return the numbers of runs, and if they were emulated: a sentence may be quoted on its own."""
    text = words.counts(arm.token_cost)
    modes = {run.backend_mode for run in arm.runs if run.end != "missing"}
    return f"{text}, emulated" if modes & {"emulated", "reference"} else text


def _again(arm: ArmResult, base: ArmResult) -> Finding:
    """Say what comparing the baseline with itself came to: whatever is found is found by chance."""
    cost = arm.token_cost
    if cost.kind != "interval":
        return _finding(arm, base)
    interval = f"{words.percent(cost.estimate)} tokens {words.percent_range(cost.low, cost.high)}"
    counts = _counts(arm)
    if not is_settled(cost):
        text = f"{arm.name}, which differs in its seeds alone: {interval}, {counts}; no false alarm."
        return Finding(arm=arm.name, tone="open", text=text)
    text = (
        f"{arm.name} differs from {base.name} in its seeds alone, and yet: {interval}, {counts}. That is a "
        "false alarm (one in twenty is to be expected); a cost of that size is not beyond chance here."
    )
    return Finding(arm=arm.name, tone="none", text=text)


def _finding(arm: ArmResult, base: ArmResult) -> Finding:
    cost = arm.token_cost
    interval = words.percent_range(cost.low, cost.high)
    n = _counts(arm)
    if (
        cost.kind == "interval"
        and cost.estimate is not None
        and cost.low is not None
        and cost.high is not None
    ):
        size = words.share(cost.estimate)
        if cost.low > 0:
            text = f"{arm.name} costs {size} more tokens than {base.name} {interval}, {n}."
            return Finding(arm=arm.name, tone="more", text=text)
        if cost.high < 0:
            text = f"{arm.name} needs {size} fewer tokens than {base.name} {interval}, {n}."
            return Finding(arm=arm.name, tone="fewer", text=text)
        text = (
            f"{arm.name} is inconclusive: {words.percent(cost.estimate)} tokens against {base.name} "
            f"{interval}, {n}; the interval holds zero, and excludes costs above {words.share(cost.high)}."
        )
        return Finding(arm=arm.name, tone="open", text=text)
    if cost.kind == "point":
        text = (
            f"{arm.name} took {words.share(cost.estimate)} {'fewer' if (cost.estimate or 0) < 0 else 'more'} "
            f"tokens than {base.name}, but that is no finding ({cost.reason})."
        )
        return Finding(arm=arm.name, tone="open", text=text)
    if cost.kind == "bound":
        return _bound_finding(arm, base)
    return Finding(arm=arm.name, tone="none", text=f"{arm.name} has no token cost ({cost.reason}).")


def _bound_finding(arm: ArmResult, base: ArmResult) -> Finding:
    cost = arm.token_cost
    if arm.n and arm.diverged == arm.n:
        runs = "its one run" if arm.n == 1 else f"all {arm.n} runs"
        text = f"{arm.name} did not reach the target: {runs} diverged."
        return Finding(arm=arm.name, tone="diverged", text=text)
    if cost.low is None or cost.low <= 0:
        text = f"{arm.name} is inconclusive: the cost is {words.cost(cost)} in these runs ({cost.reason})."
        return Finding(arm=arm.name, tone="open", text=text)
    text = f"{arm.name} costs at least {words.share(cost.low)} more tokens than {base.name} ({cost.reason}"
    restricted = cost.restricted
    if restricted is None or restricted.low is None:
        return Finding(
            arm=arm.name, tone="open", text=f"{text}; a bound from these runs alone, {_counts(arm)})."
        )
    settled = restricted.low > 0
    cut = words.percent_range(restricted.low, restricted.high)
    tail = "" if settled else ", which holds zero"
    return Finding(
        arm=arm.name,
        tone="more" if settled else "open",
        text=f"{text}; with all runs cut at the budget {cut}{tail}, {_counts(arm)}).",
    )


def _notes(analysis: Analysis) -> tuple[str, ...]:
    notes = []
    base = analysis.baseline_arm
    failed = base.n - base.hit
    if failed:
        notes.append(
            f"The baseline itself did not reach the target in {failed} of {_runs(base.n)}: token costs "
            "against it are bounds at best. Take a target that it reaches, or a larger budget."
        )
    notes.extend(_tuning_notes(analysis))
    notes.extend(_gemm_note(analysis))
    notes.extend(_speed_notes(analysis))
    with_interval = [arm for arm in analysis.others if arm.token_cost.kind == "interval"]
    if with_interval:
        text = f"Brackets are {words.coverage(analysis.rule)} intervals"
        if len(with_interval) > 1:
            text += (
                f", each for its own comparison and not adjusted for there being {len(with_interval)}: the "
                "chance that one of them misses is greater than 5\u00a0%"
            )
        notes.append(text + ".")
    notes.extend(_stop_notes(analysis))
    if analysis.timing.kind == "logged":
        notes.append(
            "The runs were read from logs that others wrote: what is not in a log, such as how FP4 was "
            "computed, is theirs to vouch for, and no claim on speed is made."
        )
    elif not any(arm.measured for arm in analysis.others):
        reasons = words.timing_reasons(analysis.timing)
        notes.append(f"The runs' own timing does not count, so no claim on speed is made: {reasons}.")
    return tuple(notes)


def _tuning_notes(analysis: Analysis) -> list[str]:
    """Say that the arms are compared at values of their own, what finding them took, and what it changed."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return []
    text = (
        f"Each arm trains at the {words.listed(tuning.fields)} found for it in {tuning.trials} trials of "
        f"{words.tokens(tuning.tokens)} tokens, as many for every arm. The trials took "
        f"{words.tokens(tuning.total_tokens)} tokens in all, beside {words.tokens(tuning.run_tokens)} in the "
        "runs compared."
    )
    notes = [text]
    for arm in tuning.arms:
        before, after = (_sign(cost) for cost in (arm.shared_cost, arm.tuned_cost))
        if before != after and arm.shared_cost.kind == "interval":
            cost = words.cost(arm.shared_cost)
            notes.append(f"Tuning changes what is found for {arm.name}: at the study's own values {cost}.")
    return notes


def _sign(cost: Cost) -> int:
    """Return whether a cost is settled above zero (1), below (-1), or not settled."""
    if not is_settled(cost):
        return 0
    return 1 if (cost.estimate or 0.0) > 0 else -1


def _stop_notes(analysis: Analysis) -> list[str]:
    """Say what early stops mean for the figures, and what they saved."""
    notes = []
    hopeless = None if analysis.rule is None else analysis.rule.hopeless
    if hopeless is not None:
        notes.append(
            "The study could stop arms at looks after "
            f"{words.listed([str(n) for n in hopeless.looks])} seeds. Repeated intervals hold over all looks "
            "together in 95\u00a0% of studies, whether and when an arm was stopped; at each look the nominal "
            f"level is stricter ({words.levels(levels_of(hopeless))})."
        )
    if any(arm.stopped is not None and arm.stopped.kind == "hopeless" for arm in analysis.stopped):
        notes.append(
            "The estimate of an arm that was stopped for its cost is biased away from zero; its interval "
            "takes the stop into account."
        )
    if analysis.stopped:
        unused = sum(arm.unused for arm in analysis.stopped)
        saved = sum(arm.tokens_saved for arm in analysis.stopped)
        of_all = saved / max(1, sum(run.budget for arm in analysis.arms for run in arm.runs))
        notes.append(
            f"Early stops saved {words.tokens(saved)} tokens ({words.share(of_all)} of the study's budget): "
            f"{_runs(unused)} {'was' if unused == 1 else 'were'} not needed."
        )
    return notes


def _gemm_note(analysis: Analysis) -> list[str]:
    """Say which GEMM adds most, or that it is not settled; nothing where no pair of arms shows it."""
    gemms = {step.gemm for step in analysis.steps}
    if len(gemms) < 2 or not any(step.cost.estimate is not None for step in analysis.steps):
        return []
    greatest = greatest_step(analysis.steps)
    if greatest is None:
        return ["Which GEMM adds most is not settled: the intervals of the steps overlap or are lacking."]
    step = next(step for step in analysis.steps if step.gemm == greatest)
    interval = words.percent_range(step.cost.low, step.cost.high)
    text = (
        f"{greatest.capitalize()} adds most: from {step.from_arm} to {step.to_arm} "
        f"{words.percent(step.cost.estimate)} tokens {interval}, above every other step."
    )
    return [text]


def _speed_notes(analysis: Analysis) -> list[str]:
    """Say of each arm with native timing whether it is faster to the target, tokens and time together."""
    notes = []
    for arm in analysis.others:
        if arm.measured is None or arm.measured.end_to_end.estimate is None:
            continue
        found = arm.measured.end_to_end
        if found.low is None or found.high is None:
            outcome = "which is no finding without an interval"
        elif found.low > 1:
            outcome = "so it is faster"
        elif found.high < 1:
            outcome = "so it is slower"
        else:
            outcome = "so whether it is faster is not settled"
        timed = "timed alone" if arm.measured.timed == "alone" else "as timed in its runs"
        notes.append(
            f"End to end, throughput over token cost, {arm.name} goes to the target at {words.times(found)} "
            f"the speed of {analysis.baseline}, {timed}: {outcome}."
        )
    return notes


def _runs(count: int) -> str:
    return words.plural(count, "run")
