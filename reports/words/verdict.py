"""The verdict in sentences: what to do, what was found on each arm, and how to read it.

Stated is only what holds for all arms together (``results.claims``). With a margin, take an arm that is shown
to be within it, or to need fewer tokens; without a margin, an arm that is shown to need fewer: of these the one
with the most of its training in FP4, or all that tie. If there are no such arms, what is settled comes first,
then what is not. Least costly is an arm only if every other one is shown to need more.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ablate.reports.findings.compare import target_text
from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words.format import (
    cost,
    grouped,
    interval,
    listed,
    margin,
    percents,
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
    from ablate.results.intervals import Interval


_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``lead`` says what to do, ``more`` what to run next; ``take``: the arm to take, None if none is shown.

    ``take`` is None, too, where several arms tie. ``least``: the arms that may need the fewest tokens, each
    with its interval over the best other. ``count`` sums up, ``findings`` has a sentence for each arm,
    ``notes`` say how to read them.
    """

    lead: str
    more: str = ""
    take: str | None = None
    least: Mapping[str, Interval] = field(default_factory=dict)
    count: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole verdict as sentences, in order."""
        summary = filter(None, [self.lead, self.more, self.count])
        return (*summary, *(finding.text for finding in self.findings), *self.notes)


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
        [f"{text} ({numbers[tone]})" for tone, text in words.items() if tone in numbers]
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
    known_costs = [arm for arm in arms if arm.token_cost.kind == "interval"]
    if not good and not known_costs:
        notes = grouped(
            (arm.name, arm.token_cost.note) for arm in arms if arm.token_cost.note
        )
        reasons = []
        for note, names in notes.items():
            reasons.append(note.replace("this arm", listed(names)))
        return Verdict(
            lead=f"Nothing is settled yet: no arm has a token cost with an interval ({'; '.join(reasons)}). "
            "It takes more seeds, or a target that every run reaches after its first evaluation."
        )
    rivals = [arm for arm in known_costs if arm.fp4_share] or known_costs
    least = analysis.least_costly(rivals)
    open_arms = [arm for arm in arms if arm not in good]
    take: list[ArmResult] = []
    if good:
        most = max(map(_fp4_share, good))
        take = [arm for arm in good if _fp4_share(arm) == most]
        among_these = analysis.least_costly(take)
        if among_these:
            take = [arm for arm in take if arm.name in among_these]
        open_arms = [arm for arm in open_arms if _fp4_share(arm) >= most]
        lead = _take(take, tones)
    else:
        lead = _what_is_settled(arms, tones, analysis)
    more = []
    if not set(least) <= {arm.name for arm in take}:
        more.append(_least_text(rivals, least))
    for arm in rivals:
        may_pay = arm.name in least or len(rivals) == 1
        if may_pay and not good and tones[arm.name] == "more":
            more.append(
                f"{arm.name} pays where it trains {times(arm.break_even)} as fast as {base.name}."
            )
    more += _more_seeds(open_arms, analysis)
    name = take[0].name if len(take) == 1 else None
    return Verdict(lead=lead, more=" ".join(more), take=name, least=least)


def _take(arms: Sequence[ArmResult], tones: Mapping[str, Tone]) -> str:
    """Say which arm to take, or that several tie."""
    shown = listed([*dict.fromkeys(TONES[tones[arm.name]] for arm in arms)])
    if len(arms) == 1:
        return f"Take {_describe(arms[0])}: {shown}."
    return f"Take any of {listed([*map(_describe, arms)])}: {shown}. Which of them needs the fewest is not settled."


def _what_is_settled(
    arms: Sequence[ArmResult], tones: Mapping[str, Tone], analysis: Analysis
) -> str:
    """Say which arms are shown to cost more, or diverged, and then which are open."""
    settled = []
    undecided = []
    for arm in arms:
        if tones[arm.name] == "more":
            settled.append(f"{arm.name} ({cost(arm.token_cost)})")
        elif tones[arm.name] == "diverged":
            settled.append(f"{arm.name} (diverged)")
        else:
            undecided.append(arm.name)
    wanted = f"need fewer tokens than {analysis.baseline}"
    if analysis.plan.margin is not None:
        wanted = f"be within {margin(analysis.plan)}"
    if not settled:
        return f"Nothing is settled yet: no arm is shown to {wanted}."
    lead = f"Settled: more tokens than {analysis.baseline} for {_named(settled)}."
    if undecided:
        lead += f" Not settled: {_named(undecided)}."
    return f"{lead} No arm is shown to {wanted}."


def _least_text(rivals: Sequence[ArmResult], least: Mapping[str, Interval]) -> str:
    """Name the arms that may need the fewest tokens."""
    among = "arms with FP4" if rivals[0].fp4_share else "arms"
    if len(least) == len(rivals):
        return f"Which of the {among} needs the fewest tokens is not settled."
    names = [
        f"{name} ({percents(part)} over the best other)" for name, part in least.items()
    ]
    if len(least) == 1:
        return f"Least costly: {names[0]}. Each other one of the {among} is shown to need more tokens."
    return f"Of the {among}, the one that needs the fewest tokens is among {_named(names)}."


def _named(names: list[str]) -> str:
    """List names, of many the first ones."""
    if len(names) > _MOST_NAMED:
        names = [*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED} others"]
    return listed(names)


def _fp4_share(arm: ArmResult) -> float:
    return round(arm.fp4_share or 0.0, 6)


def tokens_needed(arm: ArmResult) -> float:
    """Return the token cost, by which arms are ordered; infinity where it is not known."""
    if arm.token_cost.estimate is None:
        return math.inf
    return arm.token_cost.estimate


def _describe(arm: ArmResult) -> str:
    """Name an arm with its cost and its share in FP4."""
    text = f"{arm.name} (token cost {cost(arm.token_cost)}"
    if arm.fp4_share:
        text += f"; {share(arm.fp4_share)} of the training FLOPs in FP4"
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
