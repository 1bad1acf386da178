"""``plan.lock.json``: what belongs to a study, for those who read its run store. See docs/architecture.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.plan.tuning import tuning_to_lock

if TYPE_CHECKING:
    from ablate.plan.plan import Plan, PlannedArm

LOCK_FORMAT = 1


def to_lock(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; the same plan gives the same bytes."""
    lock = {
        "format": LOCK_FORMAT,
        "study": plan.study,
        "description": plan.description,
        "baseline": plan.baseline,
        "target": {"kind": plan.target.kind, "value": plan.target.value, "crossing": plan.target.crossing},
        "paired_seeds": plan.paired_seeds,
        "waive": list(plan.waive),
        "stop": plan.stop,
        "training": asdict(plan.training),
        "arms": [arm_to_lock(arm) for arm in plan.arms],
        "dropped": [{"name": cell.name, "reason": cell.reason} for cell in plan.dropped],
    }
    return lock if plan.tuning is None else lock | {"tuning": tuning_to_lock(plan, plan.tuning)}


def arm_to_lock(arm: PlannedArm) -> dict[str, Any]:
    """Return one arm as the lock file holds it."""
    return {
        "name": arm.name,
        "description": arm.description,
        "again": arm.again,
        "recipe": arm.recipe_text,
        "tokens": arm.batches.tokens,
        "factors": arm.factors,
        "differs": {field: list(pair) for field, pair in arm.differs.items()},
        "folded": list(arm.folded),
        "runs": [{"id": run.id, "seed": run.seed} for run in arm.runs],
    }
