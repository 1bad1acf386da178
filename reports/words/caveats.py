"""What stands between the figures and a conclusion: notices (the study is not complete) and warnings.

Each is one line, and each is computed, so that a report never carries a caution that does not apply.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ablate.reports.read.imported import PRECISION
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis, ArmResult

_WHOLE = 0.98
"""Share of the budget from which on a loss is that of its end."""
_NO_SETTINGS = ("submission_platform", "number_of_nodes", "hardware", *PRECISION)
"""In what imported runs may differ without training otherwise, but for the recipe."""


def notices(analysis: Analysis) -> Iterator[str]:
    """Yield what a reader must know first: how much of the study is missing."""
    tuning = analysis.tuning
    if tuning is not None and not tuning.plan.done:
        yield (
            f"Tuning has not ended (ablate status '{tuning.plan.study}'): the arms are compared at the "
            f"study's own {' and '.join(tuning.plan.fields)}."
        )
    if analysis.missing:
        apart = {one.run: f"of other {one.setting.replace('_', ' ')}" for one in analysis.set_apart}
        states = Counter(
            apart.get(run.run_id, run.state)
            for arm in analysis.every_arm
            for run in arm.runs
            if run.end == "missing"
        )
        listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        empty = [arm.name for arm in analysis.every_arm if not arm.n]
        some = 0 < len(empty) < len(analysis.every_arm)
        without = f" Without any result: {', '.join(empty)}." if some else ""
        yield (
            f"Partial: {analysis.missing} of {words.plural(analysis.planned, 'run')} are no results "
            f"({listed}).{without}"
        )


def warnings(analysis: Analysis, faults: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cautions that apply to these figures."""
    parts = (_resolution, _samples, _budgets, _tuning, _schedule, _runs, _settings, _throughput)
    found = [warning for part in parts for warning in part(analysis)]
    return (*found, *(f"Left out: {fault}" for fault in faults))


def _resolution(analysis: Analysis) -> Iterator[str]:
    share = analysis.resolution.share_of_tokens_to_target
    if share is None:
        return
    base = analysis.baseline_arm
    whole = (base.tokens_to_target.estimate or 0.0) + base.counted_from
    below = []
    for arm in analysis.others:
        # After a fork the same interval is a larger share of the tokens that are left.
        left = whole - arm.counted_from
        own = (analysis.resolution.tokens or 0.0) / left if left > 0 else share
        cost = arm.token_cost.estimate
        if cost is not None and abs(cost) < own:
            below.append(f"{arm.name} ({words.share(own)} after its fork)" if arm.counted_from else arm.name)
    if below:
        yield (
            f"Smaller than the evaluation interval ({words.share(share)} of the baseline's tokens to "
            f"target): the token cost of {', '.join(below)}. It rests on interpolation between evaluations: "
            "evaluate more often."
        )


def _samples(analysis: Analysis) -> Iterator[str]:
    # An arm that was stopped early has so few results on purpose.
    sizes = {arm.name: arm.n for arm in analysis.arms if arm.n and arm.stopped is None}
    least = min(sizes.values(), default=0) if analysis.others else 0
    if least == 1:
        single = [name for name, n in sizes.items() if n == 1]
        yield f"One result only, so no interval: {', '.join(single)}. Add seeds."
    if least == 2 and analysis.is_moderated and analysis.plan.paired_seeds:
        yield (
            "With 2 results an arm the intervals are mostly of the other arms' spread: an arm that spreads "
            "otherwise is hardly seen. Add seeds."
        )
    elif least == 2:
        yield "With 2 results an arm the intervals are wide and lean on the normal distribution: add seeds."


def early_difference(arm: ArmResult, analysis: Analysis) -> int | None:
    """Return the tokens at which an arm's loss difference is read, where that is not at the end of both."""
    budgets = [
        max((run.budget for run in one.runs if run.end not in ("missing", "unused")), default=0)
        for one in (arm, analysis.baseline_arm)
    ]
    at = arm.difference.tokens
    return at if at is not None and at < _WHOLE * min(budgets) else None


def _budgets(analysis: Analysis) -> Iterator[str]:
    """Name differences that are read early, and costs that unequal budgets alone may make."""
    early = {arm.name: at for arm in analysis.others if (at := early_difference(arm, analysis)) is not None}
    if early:
        listed = ", ".join(f"{name} at {words.tokens(at)}" for name, at in early.items())
        yield (
            f"Not the final loss difference: {listed}, the last evaluation that all runs of both have. What "
            "came after is left out."
        )
    schedule = analysis.plan.training.get("schedule")
    known = schedule in ("constant", "wsd")
    base = analysis.baseline_arm
    unequal = []
    for arm in () if known else analysis.others:
        ratio = _budget(arm) / _budget(base) if _budget(base) and _budget(arm) else 1.0
        cost = arm.token_cost.estimate
        if cost is None or abs(ratio - 1) <= 1 - _WHOLE:
            continue
        if abs(math.log1p(cost)) <= abs(math.log(ratio)):
            shown = f"{words.percent(ratio - 1)} of budget, {words.percent(cost)} of cost"
            unequal.append(f"{arm.name} ({shown})")
    if unequal:
        yield (
            f"The budgets differ and the cost is no greater than that: {', '.join(unequal)}. A schedule that "
            f"is tied to the budget{' (unknown here)' if schedule is None else ''} stretches the curve by as "
            "much, whatever the recipe."
        )


def _budget(arm: ArmResult) -> int:
    return max((run.budget for run in arm.runs if run.end in ("hit", "censored")), default=0)


def _tuning(analysis: Analysis) -> Iterator[str]:
    """Say what the tuned values rest on, and which of them may lie further out."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return
    yield (
        f"The values found for the arms are from trials of {words.tokens(tuning.plan.tokens)} tokens, "
        f"{words.share(tuning.share)} of a run's, with {words.plural(len(tuning.plan.seeds), 'seed')} of "
        "their own: what is best on a short budget need not be best on a long one, and the intervals do not "
        "hold the error of the search."
    )
    outermost: dict[str, list[str]] = {}
    for arm in tuning.arms:
        for field in arm.outermost:
            outermost.setdefault(field, []).append(f"{arm.name} at {words.plain(arm.chosen[field])}")
    for field, places in outermost.items():
        yield (
            f"The {field} found is the outermost of those tried ({', '.join(places)}): a value beyond it may "
            "be better. Widen the range."
        )


def _schedule(analysis: Analysis) -> Iterator[str]:
    """Name the arms whose target was met before the first evaluation, or where the rate already fell."""
    left = [
        arm.name for arm in analysis.arms if not arm.counted_from and any(run.left_bound for run in arm.runs)
    ]
    before = [
        arm.name
        for arm in analysis.others
        if arm.counted_from
        and any(run.left_bound for run in arm.runs)
        | any(0 < (run.tokens_to_target or 0) <= arm.counted_from for run in analysis.baseline_arm.runs)
    ]
    if before:
        yield (
            f"The target is reached before the fork, or by the first evaluation after it "
            f"({', '.join(before)}): take a lower target, or an earlier fork."
        )
    if left:
        yield (
            f"The first evaluation is already at or under the target ({', '.join(left)}): evaluate earlier "
            "or take a lower target."
        )
    told = analysis.plan.training
    known = analysis.plan.target is None or any("schedule" in key for key in told)
    if analysis.timing.kind == "logged" and not known:
        yield (
            "The learning rate's schedule is not known: where it falls towards the end of the budget, a "
            "crossing belongs to that budget alone. Where it is constant, say so: `ablate import "
            "--constant-from TOKENS`."
        )
    if told.get("schedule") == "cosine":
        yield (
            "The cosine schedule is tied to the token budget: a crossing before its end is read at a "
            "learning rate that a shorter run would not have had. Prefer a constant rate or "
            "warm-up–stable–decay."
        )
    late = []
    for arm in analysis.arms:
        crossings = [run.tokens_to_target for run in arm.runs if run.tokens_to_target is not None]
        falls = None if arm.decay_begins is None else arm.decay_begins - arm.counted_from
        count = sum(falls is not None and tokens > falls for tokens in crossings)
        if count:
            late.append(f"{arm.name} {count} of {words.plural(len(crossings), 'crossing')}")
    if late:
        yield (
            f"The target was crossed after the learning rate had begun to fall ({', '.join(late)}): there "
            "the loss falls faster, so that an arm which lags is fewer tokens behind, and a shorter run "
            "would not have had that rate. Take a target that is reached before, and the final loss for what "
            "is left after."
        )


def _runs(analysis: Analysis) -> Iterator[str]:
    """Say what runs differ in: where they ran, a self-test that failed, settings that are not compared."""
    if len(analysis.environments) > 1:
        yield (
            f"The runs come from {len(analysis.environments)} different environments (see Method); "
            "differences between them are part of the error bars at best."
        )
    if analysis.failed_self_tests:
        yield (
            f"A back end had failed its self-test before {analysis.failed_self_tests} of the runs, and the "
            "study let them train all the same: see their environment.json, and `ablate check cuda`."
        )
    groups = Counter((run.setting, run.arm, run.own, run.others) for run in analysis.set_apart)
    for (setting, arm, own, others), count in groups.items():
        yield (
            f"Not pooled: {words.plural(count, 'run')} of {arm}, of other {setting.replace('_', ' ')} "
            f"({own}; the others: {others}). To pool them all the same: waive: [{setting}] in the study, or "
            f"`ablate report --waive {setting}`."
        )


def _settings(analysis: Analysis) -> Iterator[str]:
    """Name what arms of imported logs differ in besides their recipe, which no log tells."""
    for arm in analysis.others if analysis.timing.kind == "logged" else ():
        listed = [
            f"{key} ({pair[0]} there, {pair[1]} here)"
            for key, pair in arm.planned.differs.items()
            if key not in _NO_SETTINGS and None not in pair  # what a log does not tell is no difference
        ]
        if listed:
            yield (
                f"{arm.name} was not trained as {analysis.baseline} was: {', '.join(listed)}. What it costs "
                "is not its recipe's alone."
            )


def _throughput(analysis: Analysis) -> Iterator[str]:
    """Say for which arms what ``ablate throughput`` measured does not count, and why."""
    record = analysis.throughput
    if record is None or not record.not_used:
        return
    arms: dict[str, list[str]] = {}
    for arm, reason in record.not_used.items():
        arms.setdefault(reason, []).append(arm)
    listed = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in arms.items())
    which = " for some arms" if record.tokens_per_sec else ""
    yield f"`ablate throughput` ({words.timed_alone(record)}) gives no speed-up{which}: {listed}."
