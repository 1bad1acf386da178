"""Which runs of a study need not go on: its stop rule, asked again and again while it runs.

The decision is the report's own, from the run store. Only statuses are looked at until enough runs have ended
for another decision to be possible.

How it fails: a run that cannot be read is no result, and nothing is stopped for it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from ablate.reports.analyse import unneeded_runs
from ablate.reports.load import load_frames
from ablate.reports.stopping import read_rule
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.store import State, StudyStore


class Unneeded:
    """Call it for the ids of the runs that are not needed, each with the reason."""

    def __init__(self, store: StudyStore) -> None:
        """Take the rule of the study's plan as it is now."""
        self._store = store
        plan = store.plan()
        self._rule = read_rule(plan)
        self._arms = {arm["name"]: [run["id"] for run in arm["runs"]] for arm in plan["arms"]}
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
