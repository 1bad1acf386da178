"""Which arms a study's stop rule has stopped, and which runs need not go on.

The driver asks again and again while a study runs. Only statuses are looked at until enough runs have ended
for another decision to be possible. The report decides by the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.results.ends import is_paired, origins, run_ends, split_frames
from ablate.results.frames import load_frames
from ablate.results.intervals import ALPHA
from ablate.results.losses import final_differences
from ablate.results.pooling import find_set_apart
from ablate.results.stop_rule import Decision, Stopped, decide
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate
    from ablate.results.losses import Curve
    from ablate.run.outcome import Outcome
    from ablate.store import State, StudyStore
    from ablate.store.plan_file import LockedPlan


def decide_stops(
    plan: LockedPlan, runs: Mapping[str, Sequence[tuple[Outcome, Curve]]], origin: int = 0
) -> Decision:
    """Return the arms counted from ``origin`` that the plan's rule stops, given how each run has ended."""
    if plan.stop is None:
        return Decision(stopped={})
    paired, here = is_paired(plan, origin), {plan.baseline, *origins(plan)[origin]}
    runs = {arm: own for arm, own in runs.items() if arm in here}

    def differences(n: int, arms: Sequence[str]) -> dict[str, Estimate]:
        curves = {arm: [curve for _, curve in own[:n]] for arm, own in runs.items()}
        found = final_differences(
            {arm: (curves[arm], curves[plan.baseline]) for arm in arms},
            dict.fromkeys(arms, ALPHA),
            paired=paired,
            moderated=plan.is_moderated,
        )
        return {arm: one.figure for arm, one in found.items() if one.figure is not None}

    margin = plan.margin
    return decide(
        {arm: [end for end, _ in own] for arm, own in runs.items()},
        plan.stop,
        baseline=plan.baseline,
        never=frozenset(arm.name for arm in plan.arms if arm.again),
        paired=paired,
        moderated=plan.is_moderated,
        margin=margin,
        differences=differences if margin is not None and margin.kind == "loss" else None,
    )


def unused_places(outcomes: Sequence[Outcome], stop: Stopped) -> frozenset[int]:
    """Return the places of a stopped arm's runs that count for nothing."""
    if stop.seeds is not None:
        return frozenset(range(stop.seeds, len(outcomes)))
    return frozenset(i for i, run in enumerate(outcomes) if run.end == "missing")


class Unneeded:
    """Call it for the ids of the runs that are not needed, each with the reason."""

    def __init__(self, store: StudyStore) -> None:
        """Take the rule of the study's plan as it is now."""
        self._store = store
        self._plan = store.plan()
        self._ended: dict[str, State] = {}
        self._stage: dict[str, tuple[int, int]] = {}
        self._answer: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Return what is not needed by the results there are now."""
        if (rule := self._plan.stop) is None:
            return {}
        failed = {}
        for _, run in self._plan.runs():
            if run.id not in self._ended:
                state = self._store.run(run.id).status().state
                if state in END_STATES:
                    self._ended[run.id] = state
                elif state == "failed":  # nothing is to come of it, unless somebody asks for it again
                    failed[run.id] = state
        stage = {}
        for arm in self._plan.arms:
            ended = [(self._ended | failed).get(run.id) for run in arm.runs]
            # A look is due after so many runs in front.
            in_front = 0 if rule.settled is None else [*ended, None].index(None)
            stage[arm.name] = (in_front, ended.count("diverged"))
        if stage != self._stage:
            self._answer = unneeded_runs(load_frames(self._store))
            self._stage = stage
        return self._answer


def unneeded_runs(frames: StudyFrames) -> dict[str, str]:
    """Return the ids of runs that no comparison needs under the stop rule, each with the reason."""
    parts = split_frames(frames) or (frames,)
    found = [(set(part.runs["run_id"]), _unneeded_here(part)) for part in parts]
    reasons = {run_id: reason for _, unneeded in found for run_id, reason in unneeded.items()}
    return {
        run_id: reason
        for run_id, reason in reasons.items()
        if all(run_id in unneeded for ids, unneeded in found if run_id in ids)
    }


def seeds_to_begin(frames: StudyFrames) -> int | None:
    """Return how many runs of each arm may be begun by the results there are; None for all of them."""
    decided = [one for part in split_frames(frames) or (frames,) for one, _ in _decisions(part)]
    allowed = [one.seeds for one in decided]
    return None if None in allowed else max(seeds for seeds in allowed if seeds is not None)


def _decisions(frames: StudyFrames) -> list[tuple[Decision, dict[str, list[tuple[Outcome, Curve]]]]]:
    """Return what the rule decides of the arms counted from each place, and the runs of each arm."""
    plan = frames.plan
    apart = {found.run for found in find_set_apart(frames, plan.waive)}
    found = []
    for origin, names in origins(plan).items():
        if len(origins(plan)) > 1 and not names - {plan.baseline}:
            continue
        runs: dict[str, list[tuple[Outcome, Curve]]] = {}
        for _, curve, end in run_ends(frames, apart, origin):
            runs.setdefault(curve.arm, []).append((end, curve))
        found.append((decide_stops(plan, runs, origin), runs))
    return found


def _unneeded_here(frames: StudyFrames) -> dict[str, str]:
    """Return the runs that one comparison does not need, each with the reason."""
    baseline = frames.plan.baseline
    unneeded: dict[str, str] = {}
    of_baseline: list[dict[str, str]] = []
    for decision, runs in _decisions(frames):
        of_baseline.append({})
        for arm, stop in decision.stopped.items():
            places = sorted(unused_places([end for end, _ in runs[arm]], stop))
            reasons = {runs[arm][place][1].run_id: stop.reason for place in places}
            if arm == baseline:
                of_baseline[-1] = reasons
            else:
                unneeded |= reasons
    # A run of the baseline is needed as long as the arms counted from any place need it.
    shared = set.intersection(*map(set, of_baseline)) if of_baseline else set()
    return unneeded | {run_id: of_baseline[0][run_id] for run_id in shared}
