"""The verdict in sentences: what to do, what was found on each arm, and how to read it.

What to do: with a margin, take an arm that is shown to be within it, or to need fewer tokens; without a
margin, an arm that is shown to need fewer. First comes the arm with the most of its training in FP4, then the
one that needs the fewest tokens. If there are no such arms, the least costly ones are named.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.reports.findings.compare import target_text
from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words.format import (
    cost,
    grouped,
    interval,
    listed,
    margin,
    plural,
    share,
    times,
    tokens,
)
from ablate.reports.words.judge import LOSS_TONES, TONES, Finding, Tone, judge
from ablate.reports.words.notes import write_notes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult


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
        return (
            self.lead,
            *filter(None, [self.more, self.count]),
            *findings,
            *self.notes,
        )


def write_verdict(analysis: Analysis) -> Verdict:
    """Put an analysis into words."""
    if not any(arm.n for arm in analysis.arms):
        runs = plural(analysis.planned, "run")
        return Verdict(
            lead=f"No results yet: none of the {runs} has finished or diverged."
        )
    findings = tuple(judge(arm, analysis) for arm in analysis.others)
    notes = tuple(write_notes(analysis)) if findings else ()
    return replace(_advise(analysis, findings), findings=findings, notes=notes)


def _advise(analysis: Analysis, findings: Sequence[Finding]) -> Verdict:
    """Say what to do, and count what was found."""
    base = analysis.baseline_arm
    target = analysis.plan.target
    tones: dict[str, Tone] = {}
    for arm, finding in zip(analysis.others, findings, strict=True):
        # The baseline once more cannot be chosen in its own place.
        if target is None or not arm.planned.again:
            tones[arm.name] = finding.tone
    if not tones:
        return Verdict(
            lead=f"The study has one arm, {base.name}: there is nothing to compare it with. Its final loss "
            f"is {interval(base.final_loss)} {analysis.plan.unit}, its tokens to target "
            f"{interval(base.tokens_to_target, tokens)}, n = {base.n}."
        )
    words = LOSS_TONES if target is None else TONES
    numbers = Counter(tones.values())
    summary = listed(
        [f"{text} ({numbers[tone]})" for tone, text in words.items() if numbers[tone]]
    )
    arms = plural(len(tones), "arm")
    if target is None:
        return Verdict(lead=f"Final loss of {arms} against {base.name}: {summary}.")
    count = f"Of {arms} compared with {base.name} at {target_text(analysis.plan)}: {summary}."
    return replace(_choose(analysis, tones), count=count)


def _choose(analysis: Analysis, tones: Mapping[str, Tone]) -> Verdict:
    """Choose an arm by its token cost. ``tones``: of the arms to choose from."""
    base = analysis.baseline_arm
    if missed := base.n - base.count("hit"):
        return Verdict(
            lead=f"Nothing can be chosen yet: the baseline itself did not reach the target in "
            f"{missed} of {plural(base.n, 'run')}, and token costs against it are bounds at best. "
            "Take a target that it reaches, or a larger budget."
        )
    arms = [arm for arm in analysis.others if arm.name in tones]
    good = [arm for arm in arms if tones[arm.name] in ("fewer", "within")]
    known = good or [arm for arm in arms if arm.token_cost.kind == "interval"]
    if not known:
        notes = grouped(
            (arm.name, arm.token_cost.note) for arm in arms if arm.token_cost.note
        )
        reasons = [
            note.replace("this arm", listed(names)) for note, names in notes.items()
        ]
        return Verdict(
            lead=f"Nothing is settled yet: no arm has a token cost with an interval ({'; '.join(reasons)}). "
            "It takes more seeds, or a target that every run reaches after its first evaluation."
        )
    # Of arms with an equal share in FP4, the one of lowest token cost.
    most = max(map(_fp4_share, known))
    first, *equal = sorted(
        (arm for arm in known if _fp4_share(arm) == most), key=tokens_needed
    )
    fewest = min([arm for arm in known if arm.fp4_share] or known, key=tokens_needed)
    answer = _describe(first, equal if most else [])
    beside = ""
    if fewest is not first:
        beside = f" Fewest tokens with FP4: {_describe(fewest)}."
    if good:
        lead = f"Take {answer}: {TONES[tones[first.name]]}.{beside}"
    else:
        least = "Most in FP4 at the least cost" if beside else "Least costly"
        wanted = f"need fewer tokens than {base.name}"
        if analysis.plan.margin is not None:
            wanted = f"be within {margin(analysis.plan)}"
        lead = f"{least}: {answer}.{beside} No arm is shown to {wanted}."
    named = [first] if fewest is first else [first, fewest]
    more = [
        f"{arm.name} pays where it trains {times(arm.break_even)} as fast as {base.name}."
        for arm in named
        if tones[arm.name] == "more"
    ]
    open_arms = [arm for arm in arms if arm not in good]
    if good:  # only what could replace the first
        open_arms = [arm for arm in open_arms if _fp4_share(arm) >= most]
    more += _more_seeds(open_arms, analysis)
    return Verdict(lead=lead, more=" ".join(more), take=first.name if good else None)


def _fp4_share(arm: ArmResult) -> float:
    return round(arm.fp4_share or 0.0, 6)


def tokens_needed(arm: ArmResult) -> float:
    """Return the token cost, by which arms are ordered; infinity where it is not known."""
    if arm.token_cost.estimate is None:
        return math.inf
    return arm.token_cost.estimate


def _describe(arm: ArmResult, equal: Sequence[ArmResult] = ()) -> str:
    """Name an arm with its cost and its share in FP4. ``equal``: other arms with the same share."""
    text = f"{arm.name} (token cost {cost(arm.token_cost)}"
    if arm.fp4_share:
        text += f"; {share(arm.fp4_share)} of the training FLOPs in FP4"
    if equal:
        text += f", as much as {listed([other.name for other in equal])}"
    return f"{text})"


def _more_seeds(arms: Sequence[ArmResult], analysis: Analysis) -> Iterator[str]:
    """Say how many more seeds would settle the arms that are open."""
    seeds = [
        f"{arm.name} about {arm.power.more_seeds or f'over {MOST_SEEDS:,}'}"
        for arm in arms
        if arm.power is not None and arm.power.more_seeds != 0
    ]
    if not seeds:
        return
    yield f"More seeds to settle: {', '.join(seeds)}."
    if analysis.plan.margin is None:
        yield f"To show that an arm is as good as {analysis.baseline}, name a margin (target.within)."
