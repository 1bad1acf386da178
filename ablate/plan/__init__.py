"""Planning: a validated study → its runs, with ids; pure, and fast enough for ten thousand of them.

>>> from ablate.plan import build_plan
>>> from ablate.study import load_study
>>> plan = build_plan(load_study("quickstart"))
>>> [arm.name for arm in plan.arms][:2]
['bf16', 'fp8']
"""

from ablate.plan.build import build_plan, warnings_of
from ablate.plan.estimate import PlanCosts, estimate
from ablate.plan.plan import (
    Plan,
    PlannedArm,
    StudyProgress,
    configured_runs,
    read_progress,
)
from ablate.plan.tuning import known_plan

__all__ = [
    "Plan",
    "PlanCosts",
    "PlannedArm",
    "StudyProgress",
    "build_plan",
    "configured_runs",
    "estimate",
    "known_plan",
    "read_progress",
    "warnings_of",
]
