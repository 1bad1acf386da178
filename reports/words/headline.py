"""The verdict's first sentence: what to do, by what the arms are found to be.

With a margin: the arm that is shown to be within it, or to need fewer tokens. Without one: an arm that is
shown to need fewer tokens, else what the least costly arms cost. Among arms that will do, the one with the
most of its training in FP4 comes first, and the one that needs the fewest tokens beside it. What is open and
could change the choice is named, with the seeds that it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ablate.reports.words import words
from ablate.results.intervals import ONE_RUN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult

_MOST_NAMES = 3
_MANY_SEEDS = 20
"""Beyond so many more, the number is no advice."""
Tone = Literal["fewer", "within", "more", "bound", "diverged", "open", "none"]
"""What was found on an arm: fewer tokens, within the margin, more tokens, a bound alone, all runs diverged,
not settled, no say."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """What to do. ``take``: the arm that the data speak for, None without one; ``more``: what to run next."""

    text: str
    take: str | None = None
    more: str = ""


def write_headline(analysis: Analysis, tones: Mapping[str, Tone]) -> Headline:
    """Say what to do. ``tones``: what was found on each arm but the baseline and its repetition."""
    base = analysis.baseline_arm
    if base.hit < base.n:
        return Headline(
            text=f"Nothing can be chosen yet: the baseline itself did not reach the target in "
            f"{base.n - base.hit} of {words.plural(base.n, 'run')}, and token costs against it are bounds at "
            "best. Take a target that it reaches, or a larger budget.",
        )
    arms = [arm for arm in analysis.others if arm.name in tones]
    good = [arm for arm in arms if tones[arm.name] in ("fewer", "within")]
    if good:
        first = _foremost(good)
        text = _taken(first, good, analysis, tones[first.name])
        return Headline(text=text, take=first.name, more=_next(arms, first, tones, analysis))
    pays = [
        f"{arm.name} pays where it trains {words.break_even(arm)} as fast as {analysis.baseline}."
        for arm in _least_costly(arms).values()
        if tones[arm.name] == "more"
    ]
    more = " ".join(filter(None, [*pays, _next(arms, None, tones, analysis)]))
    return Headline(text=_without(arms, analysis), more=more)


def _share(arm: ArmResult) -> float:
    return arm.fp4_share or 0.0


def _cost(arm: ArmResult) -> float:
    estimate = arm.token_cost.estimate
    return math.inf if estimate is None else estimate


def _foremost(arms: Sequence[ArmResult]) -> ArmResult:
    """Return the arm with most of its training in FP4; among equals the one of the lowest token cost."""
    return min(arms, key=lambda arm: (-round(_share(arm), 6), _cost(arm)))


def _in_fp4(arms: Sequence[ArmResult]) -> Sequence[ArmResult]:
    return [arm for arm in arms if _share(arm)] or arms


def _cheapest(arms: Sequence[ArmResult]) -> ArmResult:
    """Return the arm of the lowest token cost, one with an FP4 GEMM where there is one."""
    return min(_in_fp4(arms), key=_cost)


def _taken(first: ArmResult, good: Sequence[ArmResult], analysis: Analysis, tone: Tone) -> str:
    base, margin = analysis.baseline, analysis.plan.margin
    what = f"needs fewer tokens than {base}"
    if margin is not None and tone == "within":
        what = f"is within {words.margin(margin)} of {base}"
    text = f"Take {first.name}: it {what} ({words.cost(first.token_cost)})"
    if len(good) == 1:
        return f"{text}, the only such arm."
    if not _share(first):
        return f"{text}, the cheapest of {len(good)} such arms."
    text += f", with {words.share(first.fp4_share)} of the training FLOPs in FP4"
    if sum(_share(arm) >= _share(first) - 1e-6 for arm in good) == 1:
        text += f", the most of {len(good)} such arms"
    cheapest = _cheapest(good)
    fewest = f" Fewest tokens of them: {cheapest.name} ({words.cost(cheapest.token_cost)})."
    return f"{text}.{fewest if cheapest is not first else ''}"


def _least_costly(arms: Sequence[ArmResult]) -> dict[str, ArmResult]:
    """Return the arms with an interval that cost least, by what is said of them; none without such an arm."""
    known = [arm for arm in arms if arm.token_cost.kind == "interval"]
    if not known:
        return {}
    first, cheapest = _foremost(known), _cheapest(known)
    if first is cheapest:
        return {"Least costly": first}
    return {"Most in FP4": first, "fewest tokens": cheapest}


def _without(arms: Sequence[ArmResult], analysis: Analysis) -> str:
    """Say what the least costly arms cost where none is shown to be as good as the baseline."""
    margin, base = analysis.plan.margin, analysis.baseline
    lacking = (
        f"need fewer tokens than {base}" if margin is None else f"be within {words.margin(margin)} of {base}"
    )
    least = _least_costly(arms)
    if not least:
        points = [arm.token_cost for arm in arms if arm.token_cost.kind == "point"]
        if any(cost.reason == ONE_RUN for cost in points):
            return "Nothing is settled yet: without a second seed there is no interval. Run 3 seeds or more."
        if points:
            return f"Nothing is settled yet ({points[0].reason})."
        if not any(arm.n for arm in arms):
            return f"Nothing can be chosen yet: no arm but {base} has a result."
        advice = "Take one that more runs reach, or a larger budget."
        if all(arm.hit == arm.n for arm in arms):  # some at an unknown place, for else there were a cost
            advice = "Runs are at it by their first evaluation: take a lower one, or evaluate earlier."
        return f"Nothing can be chosen yet: no arm has a token cost at this target. {advice}"
    costs = "; ".join(f"{head}: {arm.name}, {words.cost(arm.token_cost)}" for head, arm in least.items())
    return f"No arm is shown to {lacking}. {costs}."


def _next(
    arms: Sequence[ArmResult], first: ArmResult | None, tones: Mapping[str, Tone], analysis: Analysis
) -> str:
    """Say what to run to settle the open arms that could take the place of the first."""
    wanted = {
        arm.name: arm.power.more_seeds or math.inf
        for arm in _in_fp4(arms)
        if arm.power is not None
        and arm.power.more_seeds != 0
        and tones[arm.name] not in ("fewer", "within")
        and (first is None or _share(arm) >= _share(first))
    }
    near = {name: seeds for name, seeds in wanted.items() if seeds <= _MANY_SEEDS}
    far = [name for name in wanted if name not in near]
    parts = []
    if near:
        seeds = words.plural(int(max(near.values())), "more seed")
        parts.append(f"To settle {_names([*near])}, run about {seeds}{' of each' if len(near) > 1 else ''}.")
    if far:
        parts.append(f"To settle {_names(far)} would take more than {_MANY_SEEDS} more seeds.")
        if analysis.plan.margin is None:
            parts.append(
                f"To show that an arm is as good as {analysis.baseline}, name a margin (target.within)."
            )
    return " ".join(parts)


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return words.listed(names)
    return f"the {len(names)} arms that are open"
