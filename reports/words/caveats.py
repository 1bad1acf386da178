"""What stands between the figures and a conclusion: notices (the study is not complete) and warnings.

Each is one line, and each is computed, so that a report never carries a caution that does not apply.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ablate.reports.statistics.cost import is_settled
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis


def notices(analysis: Analysis) -> tuple[str, ...]:
    """Return what a reader must know first: how much of the study is missing."""
    return (*_tuning_pending(analysis), *_missing(analysis))


def _tuning_pending(analysis: Analysis) -> list[str]:
    tuning = analysis.tuning
    if tuning is None or tuning.done:
        return []
    text = (
        f"Tuning has not ended (ablate status '{tuning.study}'): the arms are compared at the study's own "
        f"{' and '.join(tuning.fields)}."
    )
    return [text]


def _missing(analysis: Analysis) -> tuple[str, ...]:
    if not analysis.missing:
        return ()
    states = Counter(run.state for arm in analysis.every_arm for run in arm.runs if run.end == "missing")
    listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    empty = [arm.name for arm in analysis.every_arm if not arm.n]
    text = (
        f"Partial: {analysis.missing} of {words.plural(analysis.planned, 'run')} are no results ({listed})."
    )
    if empty and len(empty) < len(analysis.every_arm):
        text += f" Without any result: {', '.join(empty)}."
    return (text,)


_NO_SETTINGS = ("submission_platform",)
"""In what imported runs may differ without training otherwise."""


def warnings(analysis: Analysis, faults: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cautions that apply to these figures."""
    found: list[str] = []
    found.extend(_resolution(analysis))
    found.extend(_samples(analysis))
    found.extend(_tuning(analysis))
    left = [arm.name for arm in analysis.arms if any(run.left_bound for run in arm.runs)]
    if left:
        found.append(
            f"The first evaluation is already at or under the target ({', '.join(left)}): evaluate earlier "
            "or take a lower target."
        )
    if analysis.training.get("schedule") == "cosine":
        found.append(
            "The cosine schedule is tied to the token budget: a crossing before its end is read at a "
            "learning rate that a shorter run would not have had. Prefer a constant rate or "
            "warm-up–stable–decay."
        )
    found.extend(_decay(analysis))
    found.extend(_growth(analysis))
    if len(analysis.environments) > 1:
        found.append(
            f"The runs come from {len(analysis.environments)} different environments (see Method); "
            "differences between them are part of the error bars at best."
        )
    if analysis.failed_self_tests:
        found.append(
            f"A back end had failed its self-test before {analysis.failed_self_tests} of the runs, and the "
            "study let them train all the same: see their environment.json, and `ablate doctor`."
        )
    found.extend(_set_apart(analysis))
    found.extend(_settings(analysis))
    found.extend(_throughput(analysis))
    found.extend(f"Left out: {fault}" for fault in faults)
    return tuple(found)


def _decay(analysis: Analysis) -> list[str]:
    """Name the arms whose tokens to target were read where the rate already fell."""
    late = []
    for arm in analysis.arms:
        crossings = [run.tokens_to_target for run in arm.runs if run.tokens_to_target is not None]
        count = sum(arm.decay_begins is not None and tokens > arm.decay_begins for tokens in crossings)
        if count:
            late.append(f"{arm.name} {count} of {words.plural(len(crossings), 'crossing')}")
    if not late:
        return []
    text = (
        f"The target was crossed after the learning rate had begun to fall ({', '.join(late)}): there the "
        "loss falls faster, so that an arm which lags is fewer tokens behind, and a shorter run would not "
        "have had that rate. Take a target that is reached before, and the final loss for what is left after."
    )
    return [text]


def _growth(analysis: Analysis) -> list[str]:
    """Name the arms whose cost is shown to depend on how far training goes."""
    settled = [arm for arm in analysis.others if is_settled(arm.cost_growth)]
    if not settled:
        return []
    listed = ", ".join(f"{arm.name} {words.cost(arm.cost_growth)}" for arm in settled)
    text = (
        f"Costs still change at the target: between the loss that {analysis.baseline} reaches after half of "
        f"its tokens to target and the target, (1 + token cost) has changed by {listed}. A token cost "
        "belongs to its target: see Other targets before you rest on one figure."
    )
    return [text]


def _set_apart(analysis: Analysis) -> list[str]:
    """Name the runs that are no results because they differ in what the study does not compare."""
    groups: dict[tuple[str, str, str, str], int] = {}
    for run in analysis.set_apart:
        key = (run.setting, run.arm, run.own, run.others)
        groups[key] = groups.get(key, 0) + 1
    return [
        f"Not pooled: {words.plural(count, 'run')} of {arm}, of other {setting.replace('_', ' ')} ({own}; "
        f"the others: {others}). To pool them all the same: waive: [{setting}] in the study, or "
        f"`ablate report --waive {setting}`."
        for (setting, arm, own, others), count in groups.items()
    ]


def _settings(analysis: Analysis) -> list[str]:
    """Name what arms of imported logs differ in besides their recipe, which no log tells."""
    if analysis.timing.kind != "logged":
        return []
    found = []
    for arm in analysis.others:
        listed = [
            f"{key} ({pair[0]} there, {pair[1]} here)"
            for key, pair in arm.planned.differs.items()
            if key not in _NO_SETTINGS and None not in pair  # what a log does not tell is no difference
        ]
        if listed:
            found.append(
                f"{arm.name} was not trained as {analysis.baseline} was: {', '.join(listed)}. What it costs "
                "is not its recipe's alone."
            )
    return found


def _throughput(analysis: Analysis) -> list[str]:
    """Say for which arms what ``ablate throughput`` measured does not count, and why."""
    record = analysis.throughput
    if record is None or not record.refused:
        return []
    arms: dict[str, list[str]] = {}
    for arm, reason in record.refused.items():
        arms.setdefault(reason, []).append(arm)
    listed = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in arms.items())
    what = f"`ablate throughput` ({words.timed_alone(record)}) gives no speed-up"
    return [f"{what}{' for some arms' if record.rates else ''}: {listed}."]


def _resolution(analysis: Analysis) -> list[str]:
    share = analysis.resolution.share
    if share is None:
        return []
    below = [
        arm.name
        for arm in analysis.others
        if arm.token_cost.estimate is not None and abs(arm.token_cost.estimate) < share
    ]
    if not below:
        return []
    text = (
        f"Smaller than the evaluation interval ({words.share(share)} of the baseline's tokens to target): "
        f"the token cost of {', '.join(below)}. It rests on interpolation between evaluations: evaluate more "
        "often."
    )
    return [text]


def _tuning(analysis: Analysis) -> list[str]:
    """Say on what ground the tuned values stand, and which of them may lie further out."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return []
    text = (
        f"The values found for the arms are from trials of {words.tokens(tuning.tokens)} tokens, "
        f"{words.share(tuning.share)} of a run's, with {words.plural(tuning.seeds, 'seed')} of their own: "
        "what is best on a short budget need not be best on a long one, and the intervals do not hold the "
        "error of the search."
    )
    found = [text]
    outermost: dict[str, list[str]] = {}
    for arm in tuning.arms:
        for field in arm.outermost:
            outermost.setdefault(field, []).append(f"{arm.name} at {words.plain(arm.chosen[field])}")
    found.extend(
        f"The {field} found is the outermost of those tried ({', '.join(places)}): a value beyond it may be "
        "better. Widen the range."
        for field, places in outermost.items()
    )
    return found


def _samples(analysis: Analysis) -> list[str]:
    # An arm that was stopped early has so few results on purpose.
    sizes = [arm.n for arm in analysis.arms if arm.n and arm.stopped is None]
    if not sizes or not analysis.others:
        return []
    if min(sizes) == 1:
        single = [arm.name for arm in analysis.arms if arm.n == 1 and arm.stopped is None]
        return [f"One result only, so no interval: {', '.join(single)}. Add seeds."]
    if min(sizes) == 2:
        return [
            "With 2 results an arm the intervals are wide and lean on the normal distribution: add seeds."
        ]
    return []
