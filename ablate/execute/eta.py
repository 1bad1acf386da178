"""When a study will end, from the pace of its runs so far: ended ones, and those that are being trained.

A run's pace is taken from its rows, so it has its evaluations and the other runs beside it in it. Until a run
has been evaluated there is no pace, and nothing is said.
"""

from __future__ import annotations

import heapq
from statistics import fmean
from typing import TYPE_CHECKING

from ablate.execute.progress import Pace, RunProgress

if TYPE_CHECKING:
    from collections.abc import Iterable

_LEFT = ("pending", "interrupted", "damaged")


def seconds_to_end(runs: Iterable[RunProgress]) -> float | None:
    """Return the time until all these runs have ended, as many at once as now; None while it is unknown.

    An arm whose pace is unknown has the mean of the others. Runs that failed or were stopped are not waited
    for.
    """
    runs = list(runs)
    going = [run for run in runs if run.state == "running"]
    by_arm: dict[str, list[Pace]] = {}
    for run in runs:
        if run.pace is not None:
            by_arm.setdefault(run.arm, []).append(run.pace)
    if not going or not by_arm:
        return None
    paces = {arm: _mean(own) for arm, own in by_arm.items()}
    usual = _mean(paces.values())
    free = []
    for run in going:
        pace = run.pace or paces.get(run.arm, usual)
        free.append(pace.seconds(max(0, run.budget - run.tokens), begun=run.tokens > 0))
    heapq.heapify(free)
    for run in sorted((run for run in runs if run.state in _LEFT), key=lambda run: run.seed):
        pace = paces.get(run.arm, usual)
        heapq.heapreplace(free, free[0] + pace.seconds(max(0, run.budget - run.tokens), begun=False))
    return max(free)


def _mean(paces: Iterable[Pace]) -> Pace:
    paces = list(paces)
    return Pace(
        sec_to_begin=fmean(pace.sec_to_begin for pace in paces),
        sec_per_token=fmean(pace.sec_per_token for pace in paces),
    )
