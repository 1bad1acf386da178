"""Which arms a study's stop rule has stopped, and which runs are no longer needed.

The driver asks repeatedly while a study runs; the report uses the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.results.ends import comparisons, find_set_apart, origins, run_ends
from ablate.results.frames import load_frames
from ablate.results.stop_rule import Decision, Stopped, decide, method_of
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.results.ends import RunResult
    from ablate.results.frames import StudyFrames
    from ablate.store import State, StudyStore
    from ablate.store.plan_file import LockedPlan

    Runs = dict[str, list[RunResult]]
    """Each arm's, in the order of the study's seeds."""


def decide_stops(
    plan: LockedPlan, runs: Mapping[str, Sequence[RunResult]], origin: int = 0
) -> Decision:
    """Apply the plan's stop rule to the baseline and the arms whose tokens are counted from ``origin``."""
    if plan.stop is None:
        return Decision(stopped={})
    return decide(
        runs,
        plan.stop,
        method_of(plan, origin),
        baseline=plan.baseline,
        never=frozenset(arm.name for arm in plan.arms if arm.again),
        margin=plan.margin,
    )


def is_unused(place: int, run: RunResult, stop: Stopped | None) -> bool:
    """Tell whether the run at this place in its arm does not count, because the arm was stopped."""
    if stop is None:
        return False
    if stop.seeds is None:
        return run.end == "missing"
    return place >= stop.seeds


class Unneeded:
    """Call it for the ids of the runs that the results so far make unnecessary, each with the reason."""

    def __init__(self, store: StudyStore) -> None:
        """Take the rule of the study's plan as it is now."""
        self._store = store
        self._plan = store.plan()
        self._known: dict[str, State] = {}
        self._answer: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Return ids and reasons; decided anew only after another run has ended."""
        known: dict[str, State] = {}
        for _, run in self._plan.runs():
            state = self._known.get(run.id)
            if state not in END_STATES:
                state = self._store.run(run.id).status().state
            # A failed run gives no result unless somebody starts it again.
            if state == "failed" or state in END_STATES:
                known[run.id] = state
        if known != self._known:
            self._known = known
            self._answer = unneeded_runs(load_frames(self._store))
        return self._answer


def unneeded_runs(frames: StudyFrames) -> dict[str, str]:
    """Map the ids of runs that no comparison needs under the stop rule to the reason."""
    needed: set[str] = set()
    reasons: dict[str, str] = {}
    for decision, runs in decisions(frames):
        for arm, arm_runs in runs.items():
            stop = decision.stopped.get(arm)
            for place, run in enumerate(arm_runs):
                if stop is not None and is_unused(place, run, stop):
                    reasons.setdefault(run.run_id, stop.reason)
                else:
                    needed.add(run.run_id)
    return {
        run_id: reason for run_id, reason in reasons.items() if run_id not in needed
    }


def seeds_to_begin(frames: StudyFrames) -> int | None:
    """Return how many runs of each arm the results so far allow to begin; None for all of them."""
    most = 0
    for decision, _ in decisions(frames):
        if decision.seeds is None:
            return None
        most = max(most, decision.seeds)
    return most


def decisions(frames: StudyFrames) -> Iterator[tuple[Decision, Runs]]:
    """Yield, for each comparison and each origin of its arms, the rule's decision and the runs."""
    for comparison in comparisons(frames):
        plan = comparison.plan
        arms_of_origins = origins(plan)
        apart = {run.run for run in find_set_apart(comparison)}
        for origin, arms in arms_of_origins.items():
            # The baseline alone is compared with nothing, unless there is nothing else.
            if not origin and arms <= {plan.baseline} and len(arms_of_origins) > 1:
                continue
            runs: Runs = {}
            for run in run_ends(comparison, apart, origin):
                if run.arm in arms | {plan.baseline}:
                    runs.setdefault(run.arm, []).append(run)
            yield decide_stops(plan, runs, origin), runs
