"""Plan → ``plan.lock.json``, from which everything else reads the study."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ablate.models.arithmetic import batches
from ablate.plan.tuning import fingerprint
from ablate.store.lock import LockedArm, LockedPlan, LockedRun, LockedTuning

if TYPE_CHECKING:
    from ablate.plan.found import Tuning
    from ablate.plan.plan import Plan, PlannedArm


def to_lock(plan: Plan) -> LockedPlan:
    """Return the part of a plan that the run store keeps."""
    return LockedPlan(
        study=plan.study,
        description=plan.description,
        baseline=plan.baseline,
        target=plan.target,
        paired_seeds=plan.paired_seeds,
        waive=plan.waive,
        stop=plan.stop,
        training=asdict(plan.training),
        arms=tuple(_lock_arm(arm) for arm in plan.arms),
        dropped=plan.dropped,
        tuning=None if plan.tuning is None else _lock_tuning(plan, plan.tuning),
    )


def _lock_arm(arm: PlannedArm) -> LockedArm:
    return LockedArm(
        name=arm.name,
        description=arm.description,
        again=arm.again,
        recipe=arm.recipe_text,
        tokens=arm.batches.tokens,
        factors=arm.factors,
        differs=arm.differs,
        folded=arm.folded,
        runs=tuple(LockedRun(id=run.id, seed=run.seed) for run in arm.runs),
    )


def _lock_tuning(plan: Plan, tuning: Tuning) -> LockedTuning:
    tune = tuning.tune
    tuned = {arm.tuned_from: arm.name for arm in plan.arms}
    return LockedTuning(
        study=tuning.study,
        done=tuning.is_done,
        fields={name: asdict(field) for name, field in tune.fields.items()},
        sampler=tune.sampler,
        trials=tune.trials,
        at_once=tune.at_once,
        prune=tune.prune,
        tokens=batches(replace(plan.training, tokens=tune.tokens)).tokens,
        seeds=tune.seeds,
        groups=tuple(replace(group, fingerprint=fingerprint(plan, tune, group)) for group in tuning.groups),
        tuned={arm.name: tuned.get(arm.name, arm.name) for arm in plan.arms if arm.tuned_from is None}
        if tuning.is_done
        else {},
    )
