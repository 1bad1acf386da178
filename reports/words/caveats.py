"""Cautions before a conclusion from the figures: notices (the study is not complete) and warnings.

Each is one line, and is computed, so that a report has only the cautions that apply.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ablate.reports.read.imported import PRECISION
from ablate.reports.words.format import listed, percent, plural, setting, share, timed_alone, tokens
from ablate.run.command import lacks_proof

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis, ArmResult

_WHOLE = 0.98
"""A loss after this share of the budget or later counts as the final one."""
_NO_SETTINGS = ("submission_platform", "number_of_nodes", "hardware", *PRECISION)
"""Settings of imported runs that do not change the training, and those that are the recipe."""


def notices(analysis: Analysis) -> Iterator[str]:
    """Say what a reader must know first: what is missing of the study."""
    tuning = analysis.tuning
    if tuning is not None and not tuning.plan.done:
        yield (
            f"Tuning has not ended (ablate status '{tuning.plan.study}'): the arms are compared at the "
            f"study's own {listed([*tuning.plan.fields])}."
        )
    if analysis.missing:
        apart = {one.run: f"of other {one.setting.replace('_', ' ')}" for one in analysis.set_apart}
        runs = [run for arm in analysis.every_arm for run in arm.runs if run.end == "missing"]
        states = Counter(apart.get(run.run_id, run.state) for run in runs)
        found = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        empty = ", ".join(arm.name for arm in analysis.every_arm if not arm.n)
        yield (
            f"Partial: {analysis.missing} of {plural(analysis.planned, 'run')} are no results ({found})."
            + (f" Without any result: {empty}." if empty else "")
        )


def warnings(analysis: Analysis, faults: tuple[str, ...]) -> tuple[str, ...]:
    """List the cautions that apply to these figures. ``faults``: of files, each becomes a line."""
    found = [*_of_costs(analysis), *_of_crossings(analysis), *_of_runs(analysis)]
    return (*found, *(f"Left out: {fault}" for fault in faults))


def early_difference(arm: ArmResult, analysis: Analysis) -> int | None:
    """Return the tokens at which an arm's loss difference is read, if that is before the end; else None."""
    at = arm.difference.tokens
    budget = min(_budget(arm), _budget(analysis.baseline_arm))
    return at if at is not None and at < _WHOLE * budget else None


def _budget(arm: ArmResult) -> int:
    return max((run.budget for run in arm.runs if run.end not in ("missing", "unused")), default=0)


def _of_costs(analysis: Analysis) -> Iterator[str]:
    """Warn of coarse evaluations, few results, unequal budgets and short trials."""
    part = analysis.resolution.share_of_tokens_to_target
    base = analysis.baseline_arm
    whole = (base.tokens_to_target.estimate or 0.0) + base.counted_from
    below = [
        arm.name
        for arm in analysis.others
        if part is not None
        and arm.token_cost.estimate is not None
        # After a fork the same interval is a larger share of the tokens that are left.
        and abs(arm.token_cost.estimate) * (whole - arm.counted_from) < (analysis.resolution.tokens or 0.0)
    ]
    if below:
        yield (
            f"Smaller than the evaluation interval ({share(part)} of the baseline's tokens to target, more "
            f"of those left after a fork): the token cost of {', '.join(below)}. It rests on interpolation "
            "between evaluations: evaluate more often."
        )
    # An arm that was stopped early has few results on purpose.
    few = [arm.name for arm in analysis.arms if 0 < arm.n < 3 and arm.stopped is None and analysis.others]
    if few:
        yield (
            f"One or two results only: {', '.join(few)}. One gives no interval; with two, intervals lean on "
            "the normal distribution and, where moderated, on the other arms' spread: an arm that spreads "
            "otherwise is hardly seen. Add seeds."
        )
    early = [
        f"{arm.name} at {tokens(at)}" for arm in analysis.others if (at := early_difference(arm, analysis))
    ]
    if early:
        yield (
            f"Not the final loss difference: {', '.join(early)}, the last evaluation that all runs of both "
            "have. What came after is left out."
        )
    unequal = []
    tied = analysis.plan.training.get("schedule") not in ("constant", "wsd")
    for arm in analysis.others if tied else ():
        cost, ratio = arm.token_cost.estimate, _budget(arm) / (_budget(base) or math.inf)
        apart = math.log(ratio) if abs(ratio - 1) > 1 - _WHOLE and ratio else 0.0
        if cost is not None and apart and abs(math.log1p(cost)) <= abs(apart):
            unequal.append(f"{arm.name} ({percent(ratio - 1)} of budget, {percent(cost)} of cost)")
    if unequal:
        yield (
            f"The budgets differ and the cost is no greater than that: {', '.join(unequal)}. A schedule that "
            "is tied to the budget, or is not known, stretches the curve by as much, whatever the recipe."
        )
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return
    yield (
        f"The values found for the arms are from trials of {tokens(tuning.plan.tokens)} tokens, "
        f"{share(tuning.share)} of a run's, with {plural(len(tuning.plan.seeds), 'seed')} of their own: what "
        "is best on a short budget need not be best on a long one, and the intervals do not hold the error "
        "of the search."
    )
    found = [
        f"{field} of {arm.name} at {setting(arm.chosen[field])}"
        for arm in tuning.arms
        for field in arm.outermost
    ]
    if found:
        yield (
            f"The outermost of the values tried was found best: {', '.join(found)}. A value beyond it may be "
            "better. Widen the range."
        )


def _of_crossings(analysis: Analysis) -> Iterator[str]:
    """Warn of targets that were reached too early or in the decay, and of what the schedule means."""
    early, late = [], []
    base = analysis.baseline_arm
    for arm in analysis.arms:
        crossings = [run.tokens_to_target for run in arm.runs if run.tokens_to_target is not None]
        # A crossing of the baseline before the arm's fork is early for that arm.
        others = base.runs if arm is not base else ()
        forked = any(0 < (run.tokens_to_target or 0) <= arm.counted_from for run in others)
        early += [arm.name] * (forked or any(run.left_bound for run in arm.runs))
        falls = math.inf if arm.decay_begins is None else arm.decay_begins - arm.counted_from
        if count := sum(at > falls for at in crossings):
            late.append(f"{arm.name} {count} of {plural(len(crossings), 'crossing')}")
    if early:
        yield (
            f"The target is already reached by the first evaluation, or before the fork ({', '.join(early)})"
            ": evaluate earlier, take a lower target, or an earlier fork."
        )
    if late:
        yield (
            f"The target was crossed after the learning rate had begun to fall ({', '.join(late)}): there "
            "the loss falls faster, so that an arm which lags is fewer tokens behind, and a shorter run "
            "would not have had that rate. Take a target that is reached before, and the final loss for what "
            "is left after."
        )
    told, logged = analysis.plan.training, analysis.timing.kind == "logged"
    if logged and analysis.plan.target is not None and not any("schedule" in key for key in told):
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
    for arm in analysis.others if logged else ():
        differs = [
            f"{key} ({pair[0]} there, {pair[1]} here)"
            for key, pair in arm.planned.differs.items()
            if key not in _NO_SETTINGS and None not in pair  # a value missing in a log is no difference
        ]
        if differs:
            yield (
                f"{arm.name} was not trained as {analysis.baseline} was: {', '.join(differs)}. What it costs "
                "is not its recipe's alone."
            )


def _of_runs(analysis: Analysis) -> Iterator[str]:
    """Warn of several environments, failed self-tests, runs not pooled, and timing that does not count."""
    if len(analysis.environments) > 1:
        yield (
            f"The runs come from {len(analysis.environments)} different environments (see Method); "
            "differences between them are part of the error bars at best."
        )
    unproven = [
        arm.name
        for arm in analysis.arms
        if arm.config is not None and lacks_proof(arm.config.trainer, arm.config.recipe)
    ]
    if unproven:
        yield (
            f"Not proven: nothing in the log of {listed(unproven)} had to show that low precision ran "
            "(trainer.expect). Flags may be accepted and have no effect."
        )
    if analysis.resumed_differently:
        yield (
            f"Resumed differently: in {plural(analysis.resumed_differently, 'run')} the command logged other "
            "values for steps that it trained once more after an interruption. The first values stand; what "
            "follows may differ from an undisturbed run (see environment.json)."
        )
    if analysis.log_notes:
        yield f"As the logs were read: {'; '.join(analysis.log_notes)}."
    if analysis.failed_self_tests:
        yield (
            f"A back end had failed its self-test before {analysis.failed_self_tests} of the runs, and the "
            "study let them train all the same: see their environment.json, and `ablate check device cuda`."
        )
    if len(analysis.accumulators) > 1:
        kept = "; ".join(f"{detail} ({', '.join(arms)})" for detail, arms in analysis.accumulators.items())
        yield (
            f"The devices add products of these arms in accumulators of different width: {kept}. A part of "
            "the difference between them may be the accumulator's, not the recipe's."
        )
    groups = Counter((run.setting, run.arm, run.own, run.others) for run in analysis.set_apart)
    for (name, arm, own, others), count in groups.items():
        yield (
            f"Not pooled: {plural(count, 'run')} of {arm}, of other {name.replace('_', ' ')} ({own}; the "
            f"others: {others}). To pool them all the same: waive: [{name}] in the study."
        )
    record = analysis.throughput
    if record is not None and record.not_used:
        arms = defaultdict(list)
        for unused, reason in record.not_used.items():
            arms[reason].append(unused)
        why = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in arms.items())
        yield f"`ablate check steps STUDY` ({timed_alone(record)}) gives no speed-up: {why}."
