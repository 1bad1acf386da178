"""Cautions before a conclusion from the figures: notices (the study is not complete) and warnings.

Each is one line, and is computed, so that a report has only the cautions that apply.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ablate.reports.read.imported import PRECISION
from ablate.reports.words.format import (
    grouped,
    listed,
    percent,
    plural,
    setting,
    share,
    timed_alone,
    tokens,
)
from ablate.run.command import lacks_proof

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    if not analysis.missing:
        return
    reasons = {}
    for apart in analysis.set_apart:
        reasons[apart.run] = f"of other {apart.setting.replace('_', ' ')}"
    states: Counter[str] = Counter()
    for arm in analysis.every_arm:
        for run in arm.runs:
            if run.end == "missing":
                states[reasons.get(run.run_id, run.state)] += 1
    missing = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    text = f"Partial: {analysis.missing} of {plural(analysis.planned, 'run')} are no results ({missing})."
    if empty := [arm.name for arm in analysis.every_arm if not arm.n]:
        text += f" Without any result: {', '.join(empty)}."
    yield text


def warnings(analysis: Analysis, faults: tuple[str, ...]) -> tuple[str, ...]:
    """List the cautions that apply to these figures. ``faults``: of files, each becomes a line."""
    return (
        *_of_evaluations(analysis),
        *_of_budgets(analysis),
        *_of_trials(analysis),
        *_of_crossings(analysis),
        *_of_schedules(analysis),
        *_of_runs(analysis),
        *(f"Left out: {fault}" for fault in faults),
    )


def early_difference(arm: ArmResult, analysis: Analysis) -> int | None:
    """Return the tokens at which an arm's loss difference is read, if that is before the end; else None."""
    tokens_read = arm.difference.tokens
    budget = min(_budget(arm), _budget(analysis.baseline_arm))
    if tokens_read is None or tokens_read >= _WHOLE * budget:
        return None
    return tokens_read


def coarse_share(arm: ArmResult, analysis: Analysis) -> float | None:
    """Return the evaluation interval as a share of the baseline's tokens, if the arm's cost is smaller."""
    base = analysis.baseline_arm
    cost = arm.token_cost.estimate
    interval = analysis.resolution.tokens
    if cost is None or interval is None or base.tokens_to_target.estimate is None:
        return None
    # After a fork the same interval is a larger share of the tokens that are left.
    fork = arm.counted_from - base.counted_from
    share_of_tokens = interval / (base.tokens_to_target.estimate - fork)
    return share_of_tokens if abs(cost) < share_of_tokens else None


def _budget(arm: ArmResult) -> int:
    return max(
        (run.budget for run in arm.runs if run.end not in ("missing", "unused")),
        default=0,
    )


def _of_evaluations(analysis: Analysis) -> Iterator[str]:
    """Warn of coarse evaluations, of few results, and of loss differences before the end."""
    coarse = [arm.name for arm in analysis.others if coarse_share(arm, analysis)]
    if coarse:
        yield (
            f"The token cost of {listed(coarse)} is smaller than the evaluation interval. It rests on "
            "interpolation between evaluations: evaluate more often."
        )
    # An arm that was stopped early has few results on purpose.
    scarce = [
        arm.name for arm in analysis.arms if 0 < arm.n < 3 and arm.stopped is None
    ]
    if scarce and analysis.others:
        yield (
            f"Only one or two results: {', '.join(scarce)}. One result gives no interval. The interval of "
            "two leans on the normal distribution and, where it is moderated, on the other arms' spread: it "
            "hardly shows an arm that spreads otherwise. Add seeds."
        )
    places = []
    for arm in analysis.others:
        place = early_difference(arm, analysis)
        if place is not None:
            places.append(f"{arm.name} at {tokens(place)}")
    if places:
        yield (
            f"Not the final loss difference: {', '.join(places)}, the last evaluation that all runs of both "
            "have. What came after is left out."
        )


def _of_budgets(analysis: Analysis) -> Iterator[str]:
    """Warn of budgets that differ by more than a cost, where the schedule follows the budget."""
    if analysis.plan.training.get("schedule") in ("constant", "wsd"):
        return
    unequal = []
    for arm in analysis.others:
        cost = arm.token_cost.estimate
        ratio = _budget(arm) / (_budget(analysis.baseline_arm) or math.inf)
        if cost is None or ratio == 0 or abs(ratio - 1) <= 1 - _WHOLE:
            continue
        if abs(math.log1p(cost)) <= abs(math.log(ratio)):
            unequal.append(
                f"{arm.name} ({percent(ratio - 1)} of budget, {percent(cost)} of cost)"
            )
    if unequal:
        yield (
            f"The budgets differ by as much as the cost or more: {', '.join(unequal)}. A schedule that "
            "is tied to the budget, or is not known, stretches the curve by as much, whatever the recipe."
        )


def _of_trials(analysis: Analysis) -> Iterator[str]:
    """Warn of short trials, and of values at the end of the range that was tried."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return
    yield (
        f"The values found for the arms are from trials of {tokens(tuning.plan.tokens)} tokens, "
        f"{share(tuning.share)} of a run's, with {plural(len(tuning.plan.seeds), 'seed')} of their own: what "
        "is best on a short budget need not be best on a long one, and the intervals do not hold the error "
        "of the search."
    )
    outermost = []
    for arm in tuning.arms:
        for field in arm.outermost:
            value = setting(arm.chosen[field])
            outermost.append(f"{field} of {arm.name} at {value}")
    if outermost:
        yield (
            f"The best value is the outermost that was tried: {', '.join(outermost)}. A value beyond it may "
            "be better. Widen the range."
        )


def _of_crossings(analysis: Analysis) -> Iterator[str]:
    """Warn of targets that were reached too early, or in the decay."""
    early = []
    late = []
    where = "by the first evaluation"
    remedy = "evaluate earlier, or take a lower target"
    if any(arm.counted_from for arm in analysis.arms):
        where += ", or before the fork"
        remedy += ", or an earlier fork"
    changed = []
    for arm in analysis.arms:
        crossings = [
            run.tokens_to_target for run in arm.runs if run.tokens_to_target is not None
        ]
        # A crossing of the baseline before the arm's fork is early for that arm.
        of_base = [] if arm.name == analysis.baseline else analysis.baseline_arm.runs
        before_fork = any(
            0 < (run.tokens_to_target or 0) <= arm.counted_from for run in of_base
        )
        if before_fork or any(run.left_bound for run in arm.runs):
            early.append(arm.name)
        if any(run.at_change for run in arm.runs):
            changed.append(arm.name)
        if arm.decay_begins is not None:
            decay = arm.decay_begins - arm.counted_from
            if in_decay := sum(crossing > decay for crossing in crossings):
                late.append(
                    f"{arm.name} {in_decay} of {plural(len(crossings), 'crossing')}"
                )
    if changed:
        yield (
            f"Schedule or recipe changed between the two evaluations around a crossing ({', '.join(changed)}): "
            "the cost is a bound. Evaluate more often, or take a target that is reached before."
        )
    if early:
        yield f"The target is already reached {where} ({', '.join(early)}): {remedy}."
    if late:
        yield (
            f"The target was crossed after the learning rate had begun to fall ({', '.join(late)}). There "
            "the loss falls faster, so an arm that lags is fewer tokens behind, and a shorter run would not "
            "have had that rate. Take a target that is reached earlier, and compare what comes later by the "
            "final loss."
        )


def _of_schedules(analysis: Analysis) -> Iterator[str]:
    """Warn of what a schedule that is not constant means, and of arms that were trained otherwise."""
    training = analysis.plan.training
    is_logged = analysis.timing.kind == "logged"
    is_known = any("schedule" in key for key in training)
    if is_logged and analysis.plan.target is not None and not is_known:
        yield (
            "The learning rate's schedule is not known: where it falls towards the end of the budget, a "
            "crossing belongs to that budget alone. Where it is constant, say so: `ablate import "
            "--constant-from TOKENS`."
        )
    if training.get("schedule") == "cosine":
        yield (
            "The cosine schedule is tied to the token budget: a crossing before its end is read at a "
            "learning rate that a shorter run would not have had. Prefer a constant rate or "
            "warm-up–stable–decay."
        )
    if not is_logged:
        return
    for arm in analysis.others:
        differences = []
        for key, (base_value, value) in arm.planned.differs.items():
            # A value missing in a log is no difference.
            if key not in _NO_SETTINGS and base_value is not None and value is not None:
                differences.append(f"{key} ({base_value} there, {value} here)")
        if differences:
            yield (
                f"{arm.name} was not trained as {analysis.baseline} was: {', '.join(differences)}. What it "
                "costs is not its recipe's alone."
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
        yield (
            "The devices add products of these arms in accumulators of different width: "
            f"{_reasons(analysis.accumulators)}. A part of the difference between them may be the "
            "accumulator's, not the recipe's."
        )
    groups = Counter(
        (run.setting, run.arm, run.own, run.others) for run in analysis.set_apart
    )
    for (name, arm_name, own_value, others), count in groups.items():
        yield (
            f"Not pooled: {plural(count, 'run')} of {arm_name}, of other {name.replace('_', ' ')} ({own_value}; "
            f"the others: {others}). To pool them all the same: waive: [{name}] in the study."
        )
    record = analysis.throughput
    if record is not None and record.not_used:
        reasons = _reasons(grouped(record.not_used.items()))
        yield f"`ablate check steps STUDY` ({timed_alone(record)}) gives no speed-up: {reasons}."


def _reasons(arms: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{reason} ({', '.join(names)})" for reason, names in arms.items())
