"""The state of a plan in the run store: the state of each run, and the speed of finished runs.

How it fails: a missing or incomplete store raises nothing. A run with an unreadable status counts as pending;
a run with unreadable metrics is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.plan.tuning import found_before

if TYPE_CHECKING:
    from ablate.plan.plan import Plan
    from ablate.store import RunDir, State, StudyStore

_MEASURED_RUNS_PER_ARM = 3


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
    try:
        there = {path.name for path in (store.path / "runs").iterdir()}
    except OSError:
        there = set()
    states: dict[str, State] = {}
    speeds: dict[str, list[float]] = {}
    for arm, run in plan.runs():
        if run.id not in there:
            continue
        run_dir = store.run(run.id)
        try:
            state = run_dir.status().state
        except OSError:
            continue
        if state != "pending":
            states[run.id] = state
        known = speeds.setdefault(arm.name, [])
        if state == "finished" and len(known) < _MEASURED_RUNS_PER_ARM:
            speed = _mean_tokens_per_sec(run_dir)
            known += [speed] if speed else []
    measured = {arm: sum(values) / len(values) for arm, values in speeds.items() if values}
    return StudyProgress(states=states, tokens_per_sec=measured)


def _mean_tokens_per_sec(run_dir: RunDir) -> float | None:
    try:
        rows = [row for row in run_dir.metrics() if row.get("kind") == "train"]
    except (OSError, ValueError, AttributeError):
        return None
    speeds = [row["tokens_per_sec"] for row in rows if isinstance(row.get("tokens_per_sec"), int | float)]
    return sum(speeds) / len(speeds) if speeds and sum(speeds) > 0 else None
