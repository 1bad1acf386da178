"""Tuning as arms and runs: the trials before the seeds, and the arms at their best values.

A trial is an ordinary arm with the trials' budget and seeds, in a separate study (``<name> tune``). If an
arm's best values differ from the study's, a second arm ``<arm> tuned`` runs with them; if not, the arm itself
counts as tuned. The lock file holds all of it, under ``tuning``.

How it fails: results in an earlier lock are reused only for a group with the same fingerprint, which hashes
the ids of the group's first runs and the values that the search may try.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.plan.plan import planned_runs
from ablate.run.config import TrainingConfig
from ablate.run.schedule import plan_steps
from ablate.study.search_space import Range, tuned_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ablate.plan.plan import Plan, PlannedArm
    from ablate.store import StudyStore
    from ablate.store.plan_file import GroupTuning
    from ablate.study.search_space import Choices, Tune


def with_search(plan: Plan, tune: Tune) -> Plan:
    """Add to a plan the search before its seeds."""
    training = TrainingConfig(**plan.training | {"tokens": tune.budget})
    tokens = plan_steps(training).tokens
    groups = [
        replace(group, fingerprint=_fingerprint(plan, tune, group))
        for group in tune.groups
    ]
    return replace(plan, tuning=replace(tune, tokens=tokens, groups=tuple(groups)))


def _fingerprint(plan: Plan, tune: Tune, group: GroupTuning) -> str:
    """Hash a group's search: the ids of its first trial's runs, the values that it may try, and how."""
    first_trial = trial_arms(plan, tune, group, 0, group.shared)
    ids = [run.id for arm in first_trial for run in arm.runs]
    fields = {
        name: [type(field).__name__, asdict(field)]
        for name, field in tune.fields.items()
    }
    content = [ids, fields, tune.sampler, tune.at_once, tune.prune]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def trial_arms(
    plan: Plan, tune: Tune, group: GroupTuning, number: int, values: dict[str, Any]
) -> list[PlannedArm]:
    """Plan a trial: the arms of its group at these values, and at the trials' budget and seeds."""
    arms = []
    for arm in map(plan.arm, group.arms):
        untuned = {field: getattr(arm.config.training, field) for field in values}
        trial = _changed(
            arm,
            values | {"tokens": tune.budget},
            tune.seeds,
            name=f"{arm.name} trial {number}",
            description=values_text(values),
            factors={},
            differs=arm.differs_at(untuned, values),
        )
        arms.append(trial)
    return arms


def trials_plan(plan: Plan, tune: Tune, arms: Iterable[PlannedArm]) -> Plan:
    """Plan the trials' study. ``arms``: of its trials."""
    arms = tuple(arms)
    return replace(
        plan,
        study=tune.study,
        description=f"The trials in which the arms of {plan.study} are tuned.",
        baseline=arms[0].name,
        training=plan.training | {"tokens": tune.budget},
        paired_seeds=False,
        stop=None,
        diagnostics=None,
        keep_weights=False,
        arms=arms,
        folded={},
        dropped=(),
        tuning=None,
    )


def tuned_plan(plan: Plan, tune: Tune) -> Plan:
    """Add the search as it ended, and the arms at the best values; ``tune``: the plan's own search, done."""
    shared = tune.group_of(plan.baseline, plan.baseline).shared
    tuned_arms: dict[str, PlannedArm] = {}
    for arm in plan.arms:
        group = tune.group_of(arm.name, plan.baseline)
        assert group.chosen is not None
        if group.chosen != group.shared:
            tuned_arms[arm.name] = _changed(
                arm,
                group.chosen,
                [run.seed for run in arm.runs],
                name=tuned_name(arm.name),
                description=f"{arm.name} at the values found for it: {values_text(group.chosen)}",
                differs=arm.differs_at(shared, group.chosen),
            )
    names = {arm.name: tuned_arms.get(arm.name, arm).name for arm in plan.arms}
    return replace(
        plan, tuning=replace(tune, tuned=names), arms=(*plan.arms, *tuned_arms.values())
    )


def known_plan(plan: Plan, store: StudyStore) -> Plan:
    """Add tuned values to the plan, if the store has them from the same search of every group."""
    tune = plan.tuning
    if tune is None:
        return plan
    try:
        known = store.plan().tuning
    except (OSError, UserError):
        return plan
    if known is None or not known.done or known.trials != tune.trials:
        return plan
    known_groups = {(group.name, group.fingerprint): group for group in known.groups}
    groups = []
    for group in tune.groups:
        key = (group.name, group.fingerprint)
        if key not in known_groups:
            return plan
        groups.append(known_groups[key])
    return tuned_plan(plan, replace(tune, done=True, groups=tuple(groups)))


def _changed(
    arm: PlannedArm, values: dict[str, Any], seeds: Sequence[int], **words: Any
) -> PlannedArm:
    """Change an arm's values of training, and with them its runs, and how it is called."""
    training = replace(arm.config.training, **values)
    config = replace(arm.config, training=training)
    batches = plan_steps(training, arm.resources.devices_per_run)
    return replace(
        arm,
        folded=(),
        config=config,
        batches=batches,
        tokens=batches.tokens,
        runs=planned_runs(config, seeds),
        **words,
    )


def values_text(values: Mapping[str, Any]) -> str:
    """Return values as text: ``learning_rate 0.00283, weight_decay 0.1``."""
    return ", ".join(f"{field} {_text(value)}" for field, value in values.items())


def range_text(field: Range | Choices) -> str:
    """Return the values to try as text: ``0.0005 to 0.016 (log)``, or ``0 or 0.1``."""
    if isinstance(field, Range):
        return (
            f"{_text(field.low)} to {_text(field.high)}{' (log)' if field.log else ''}"
        )
    return " or ".join(_text(value) for value in field.values)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "off" if value is None else f"{value:,}"
