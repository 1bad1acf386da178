"""A plan and the run store: the part that ``plan.lock.json`` keeps, and the states and speeds of its runs.

How it fails: a missing or incomplete store raises nothing. A run with an unreadable status counts as pending;
a run with unreadable metrics is not measured.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.plan.tuning import fingerprint, found_before
from ablate.run.schedule import plan_steps
from ablate.store import StudyStore
from ablate.store.plan_file import LockedArm, LockedFork, LockedPlan, LockedTuning

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.plan.plan import Plan, PlannedArm
    from ablate.store import RunDir, State
    from ablate.study import Study
    from ablate.study.search_space import Tune

_MEASURED_RUNS_PER_ARM = 3
_QUESTION = ("baseline", "target", "paired_seeds", "intervals", "waive", "stop")


def to_lock(plan: Plan) -> LockedPlan:
    """Return the part of a plan that the run store keeps."""
    return LockedPlan(
        study=plan.study,
        description=plan.description,
        baseline=plan.baseline,
        target=plan.target,
        paired_seeds=plan.paired_seeds,
        intervals=plan.intervals,
        waive=plan.waive,
        stop=plan.stop,
        training=asdict(plan.training),
        arms=tuple(_lock_arm(arm) for arm in plan.arms),
        dropped=plan.dropped,
        tuning=None if plan.tuning is None else _lock_tuning(plan, plan.tuning),
        settings=plan.settings,
    )


def asks_otherwise(study: Study | Plan, plan: LockedPlan) -> list[str]:
    """Return the keys of a study that ask something else of the runs than the plan that ran last."""
    return [name for name in _QUESTION if getattr(study, name) != getattr(plan, name)]


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
        fork=None if arm.fork is None else LockedFork(arm=arm.fork.parent, tokens=arm.fork.at),
        runs=arm.runs,
    )


def _lock_tuning(plan: Plan, tune: Tune) -> LockedTuning:
    tuned = {arm.tuned_from: arm.name for arm in plan.arms}
    return LockedTuning(
        study=tune.study,
        done=tune.is_done,
        fields={name: asdict(field) for name, field in tune.fields.items()},
        sampler=tune.sampler,
        trials=tune.trials,
        at_once=tune.at_once,
        prune=tune.prune,
        tokens=plan_steps(replace(plan.training, tokens=tune.tokens)).tokens,
        seeds=tune.seeds,
        groups=tuple(replace(group, fingerprint=fingerprint(plan, tune, group)) for group in tune.groups),
        tuned={arm.name: tuned.get(arm.name, arm.name) for arm in plan.arms if arm.tuned_from is None}
        if tune.is_done
        else {},
    )


def runs_lost_by(plan: Plan, folder: Path) -> int:
    """Return how many runs that have begun a study's folder loses by taking this plan for its own.

    Raises:
        UserError: values of ``--set`` would take the place of a plan with other ones. An edited file is
            adopted; these stand nowhere, and the earlier results would be gone from the study's pages.
    """
    store = StudyStore(folder)
    try:
        there = store.plan()
    except (OSError, UserError):
        return 0
    begun, kept = store.begun(), {run.id for _, run in plan.runs()}
    lost = sum(run.id in begun and run.id not in kept for _, run in there.runs())
    if plan.settings and (lost or asks_otherwise(plan, there)):
        name = shlex.quote(f"name={plan.study}-2")
        raise UserError(
            f"--set: {store.path} holds this study with other settings (give this one a name of its own, "
            f"such as --set {name})"
        )
    return lost


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """States by run id (pending runs are left out), and measured tokens per second by arm."""

    states: dict[str, State]
    tokens_per_sec: dict[str, float]

    def state(self, run_id: str) -> State:
        """Return the state of a run."""
        return self.states.get(run_id, "pending")


def known_plan(plan: Plan, store: StudyStore) -> Plan:
    """Return the plan with its tuned values, if the store has them."""
    if plan.tuning is None:
        return plan
    try:
        return found_before(plan, store.plan())
    except (OSError, UserError):
        return plan


def read_progress(plan: Plan, store: StudyStore) -> StudyProgress:
    """Look up the runs of a plan in the store."""
    there = store.begun()
    states: dict[str, State] = {}
    speeds: dict[str, list[float]] = defaultdict(list)
    for arm, run in plan.runs():
        if run.id not in there:
            continue
        run_dir = store.run(run.id)
        try:
            state = run_dir.state()
        except OSError:
            continue
        if state != "pending":
            states[run.id] = state
        if state == "finished" and len(speeds[arm.name]) < _MEASURED_RUNS_PER_ARM:
            speed = _mean_tokens_per_sec(run_dir, 0 if arm.fork is None else arm.fork.at)
            speeds[arm.name] += [speed] if speed else []
    measured = {arm: sum(values) / len(values) for arm, values in speeds.items() if values}
    return StudyProgress(states=states, tokens_per_sec=measured)


def _mean_tokens_per_sec(run_dir: RunDir, forked: int) -> float | None:
    """Return the mean speed of a run, after its fork, where it has one."""
    try:
        rows = [row for row in run_dir.metrics() if row.get("kind") == "train" and row["tokens"] > forked]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    speeds = [row["tokens_per_sec"] for row in rows if isinstance(row.get("tokens_per_sec"), int | float)]
    return sum(speeds) / len(speeds) if speeds and sum(speeds) > 0 else None
