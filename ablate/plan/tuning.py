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
    from collections.abc import Mapping, Sequence

    from ablate.plan.plan import Plan, PlannedArm
    from ablate.store import StudyStore
    from ablate.store.plan_file import GroupTuning
    from ablate.study.search_space import Choices, Tune


def fingerprint(plan: Plan, tune: Tune, group: GroupTuning) -> str:
    """Hash a group's search: the ids of its first trial's runs, the values that it may try, and how."""
    ids = trial_ids(plan, tune, group, group.shared)
    fields = {name: [type(field).__name__, asdict(field)] for name, field in tune.fields.items()}
    content = [ids, fields, tune.sampler, tune.at_once, tune.prune]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def trial_ids(plan: Plan, tune: Tune, group: GroupTuning, values: dict[str, Any]) -> list[str]:
    """List the ids of a group's runs in the trial with these values."""
    return [run.id for _, run in trial_plan(plan, tune, [(group.name, 0, values)]).runs()]


def trial_plan(plan: Plan, tuning: Tune, trials: Sequence[tuple[str, int, dict[str, Any]]]) -> Plan:
    """Plan the trials' study: for each trial (group, number, values) the arms of its group.

    They have these values, and the trials' budget and seeds.
    """
    members, arms = {group.name: group.arms for group in tuning.groups}, []
    for group, number, values in trials:
        for arm in map(plan.arm, members[group]):
            own = {field: getattr(arm.config.training, field) for field in values}
            trial = {"name": f"{arm.name} trial {number}", "description": values_text(values), "factors": {}}
            arms.append(_at_values(arm, own, values, tuning.seeds, {"tokens": tuning.budget}, **trial))
    return replace(
        plan,
        study=tuning.study,
        description=f"The trials in which the arms of {plan.study} are tuned.",
        baseline=arms[0].name,
        training=plan.training | {"tokens": tuning.budget},
        paired_seeds=False,
        stop=None,
        diagnostics=None,
        keep_weights=False,
        arms=tuple(arms),
        folded={},
        dropped=(),
        tuning=None,
    )


def tuned_plan(plan: Plan, tune: Tune) -> Plan:
    """Add its search to a plan, and arms at the best values once these are known."""
    shared = tune.group_of(plan.baseline, plan.baseline).shared
    added: dict[str, PlannedArm] = {}
    for arm in plan.arms if tune.done else ():
        group = tune.group_of(arm.name, plan.baseline)
        chosen = group.chosen
        assert chosen is not None
        if chosen != group.shared:
            said = f"{arm.name} at the values found for it: {values_text(chosen)}"
            own = {"name": tuned_name(arm.name), "description": said}
            added[arm.name] = _at_values(arm, shared, chosen, [run.seed for run in arm.runs], {}, **own)
    training = TrainingConfig(**plan.training | {"tokens": tune.budget})
    tuning = replace(
        tune,
        tokens=plan_steps(training).tokens,
        groups=tuple(replace(group, fingerprint=fingerprint(plan, tune, group)) for group in tune.groups),
        tuned={arm.name: added.get(arm.name, arm).name for arm in plan.arms} if tune.done else {},
    )
    return replace(plan, tuning=tuning, arms=(*plan.arms, *added.values()))


def known_plan(plan: Plan, store: StudyStore) -> Plan:
    """Add tuned values to the plan, if the store has them from the same search of every group."""
    tune = plan.tuning
    try:
        written = None if tune is None else store.plan().tuning
    except (OSError, UserError):
        return plan
    if tune is None or written is None or not written.done or written.trials != tune.trials:
        return plan
    found = {(group.name, group.fingerprint): group for group in written.groups}
    asked = [(group.name, group.fingerprint) for group in tune.groups]
    if not found.keys() >= set(asked):
        return plan
    return tuned_plan(plan, replace(tune, done=True, groups=tuple(found[one] for one in asked)))


def _at_values(
    arm: PlannedArm,
    base: Mapping[str, Any],
    values: Mapping[str, Any],
    seeds: Sequence[int],
    budget: Mapping[str, Any],
    **changes: Any,
) -> PlannedArm:
    """Change an arm's values of training, and with them its runs; ``base``: the baseline's values."""
    section = replace(arm.config.training, **values, **budget)
    config = replace(arm.config, training=section)
    batches = plan_steps(section, arm.resources.devices_per_run)
    return replace(
        arm,
        differs=arm.differs_at(base, values),
        folded=(),
        config=config,
        batches=batches,
        tokens=batches.tokens,
        runs=planned_runs(config, seeds),
        **changes,
    )


def values_text(values: Mapping[str, Any]) -> str:
    """Return values as text: ``learning_rate 0.00283, weight_decay 0.1``."""
    return ", ".join(f"{field} {_text(value)}" for field, value in values.items())


def range_text(field: Range | Choices) -> str:
    """Return the values to try as text: ``0.0005 to 0.016 (log)``, or ``0 or 0.1``."""
    if isinstance(field, Range):
        return f"{_text(field.low)} to {_text(field.high)}{' (log)' if field.log else ''}"
    return " or ".join(_text(value) for value in field.values)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "off" if value is None else f"{value:,}"
