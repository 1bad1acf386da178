"""Which runs of a study need not go on: its stop rule, asked again and again while it runs.

The decision is the report's own, from the run store. Only statuses are looked at until enough runs have ended
for another decision to be possible.

How it fails: a run that cannot be read is no result, and nothing is stopped for it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from ablate.reports.findings.ends import run_ends, stopped_arms, unused_places
from ablate.reports.findings.tuning import split_frames
from ablate.reports.read.comparable import find_set_apart
from ablate.reports.read.load import load_frames
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.read.load import StudyFrames
    from ablate.run.outcome import Outcome
    from ablate.store import State, StudyStore


class Unneeded:
    """Call it for the ids of the runs that are not needed, each with the reason."""

    def __init__(self, store: StudyStore) -> None:
        """Take the rule of the study's plan as it is now."""
        self._store = store
        plan = store.plan()
        self._rule = plan.stop
        self._arms = {arm.name: [run.id for run in arm.runs] for arm in plan.arms}
        self._ended: dict[str, State] = {}
        self._stage: dict[str, tuple[int, int]] = {}
        self._answer: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Return what is not needed by the results there are now."""
        if self._rule is None:
            return {}
        stage = self._stages()
        if stage != self._stage:
            self._answer = unneeded_runs(load_frames(self._store))
            self._stage = stage
        return self._answer

    def _stages(self) -> dict[str, tuple[int, int]]:
        """Return for each arm how many looks are due, and how many of its runs have diverged."""
        assert self._rule is not None
        looks = () if self._rule.hopeless is None else self._rule.hopeless.looks
        for run_id in (run_id for runs in self._arms.values() for run_id in runs):
            if run_id not in self._ended and (state := self._store.run(run_id).status().state) in END_STATES:
                self._ended[run_id] = state
        ahead = {arm: self._ended_in_front(runs) for arm, runs in self._arms.items()}
        return {
            arm: (
                bisect_right(looks, ahead[arm]),
                sum(self._ended.get(run_id) == "diverged" for run_id in runs),
            )
            for arm, runs in self._arms.items()
        }

    def _ended_in_front(self, runs: list[str]) -> int:
        return next((n for n, run_id in enumerate(runs) if run_id not in self._ended), len(runs))


def unneeded_runs(frames: StudyFrames) -> dict[str, str]:
    """Return the ids of the runs that the study's stop rule does not need, each with the reason.

    Of a study whose arms were tuned a run that is in both comparisons is needed if either needs it.
    """
    parts = split_frames(frames) or (frames,)
    found = [(set(part.runs["run_id"]), _unneeded_here(part)) for part in parts]
    reasons = {run_id: reason for _, unneeded in found for run_id, reason in unneeded.items()}
    return {
        run_id: reason
        for run_id, reason in reasons.items()
        if all(run_id in unneeded for ids, unneeded in found if run_id in ids)
    }


def _unneeded_here(frames: StudyFrames) -> dict[str, str]:
    """Return the runs that one comparison does not need, each with the reason."""
    plan = frames.plan
    apart = {found.run_id for found in find_set_apart(frames, plan.waive)}
    outcomes: dict[str, list[Outcome]] = {}
    ids: dict[str, list[str]] = {}
    for row, _, _, end in run_ends(frames, apart):
        outcomes.setdefault(str(row["arm"]), []).append(end)
        ids.setdefault(str(row["arm"]), []).append(str(row["run_id"]))
    return {
        ids[arm][place]: stop.reason
        for arm, stop in stopped_arms(plan, outcomes).items()
        for place in sorted(unused_places(outcomes[arm], stop))
    }
