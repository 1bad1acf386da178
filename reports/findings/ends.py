"""How each run of a study has ended, which arms its stop rule has stopped, and which runs need not go on.

While a study runs, the driver asks the report's own decision again and again, from the run store. Only
statuses are looked at until enough runs have ended for another decision to be possible.

How it fails: it does not raise; a run without a result, or one that cannot be read, is ``missing``.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablate.reports.findings.tuning import split_frames
from ablate.reports.read.comparable import find_set_apart
from ablate.reports.read.load import load_frames
from ablate.reports.statistics.losses import Curve
from ablate.reports.statistics.stopping import Stopped, decide
from ablate.run.outcome import Outcome, outcome
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.reports.read.load import StudyFrames
    from ablate.store import State, StudyStore
    from ablate.store.lock import LockedPlan, Target


def target_text(target: Target) -> str:
    """Return the target with its unit."""
    if target.kind == "perplexity":
        return f"a validation perplexity of {target.value:g} ({target.val_loss:.4f} nats/token)"
    return f"a validation loss of {target.value:g} nats/token"


def run_ends(
    frames: StudyFrames, apart: Collection[str], origin: int = 0
) -> Iterator[tuple[dict[str, Any], Curve, Outcome]]:
    """Yield each run's row, its curve (without a point before the first evaluation), and how it ended.

    ``origin``: the tokens from which those to target are counted; what lies before is left out.
    """
    target = frames.plan.target
    evals = {str(run_id): group for run_id, group in frames.evals.groupby("run_id", sort=False)}
    for row in frames.runs.to_dict("records"):
        run_id = str(row["run_id"])
        group = evals.get(run_id)
        tokens = np.empty(0, dtype=np.int64) if group is None else group["tokens"].to_numpy(dtype=np.int64)
        loss = np.empty(0) if group is None else group["val_loss"].to_numpy(dtype=float)
        tokens, loss = tokens[tokens >= origin], loss[tokens >= origin]
        end = outcome(
            seed=int(row["seed"]),
            state="set apart" if run_id in apart else str(row["state"]),
            tokens=tokens,
            loss=loss,
            target=target.val_loss,
            rule=target.crossing,
            budget_tokens=number_in(row["budget_tokens"]) or 0.0,
        ).after(origin)
        curve = Curve(
            run_id=run_id,
            arm=str(row["arm"]),
            seed=end.seed,
            end=end.end,
            tokens=tokens,
            loss=loss,
            origin=origin,
        )
        yield {str(key): value for key, value in row.items()}, curve, end


def origins(plan: LockedPlan) -> dict[int, frozenset[str]]:
    """Return the tokens from which costs are counted, 0 among them, with the arms that are compared so."""
    found: dict[int, set[str]] = {0: set()}
    for arm in plan.arms:
        found.setdefault(plan.counted_from(arm.name), set()).add(arm.name)
    return {origin: frozenset(names) for origin, names in found.items()}


def is_paired(plan: LockedPlan, origin: int) -> bool:
    """Whether arms are compared seed by seed: as declared, and always where runs share their beginning."""
    return plan.paired_seeds or origin > 0


def stopped_arms(
    plan: LockedPlan, outcomes: Mapping[str, Sequence[Outcome]], origin: int = 0
) -> dict[str, Stopped]:
    """Return the arms counted from ``origin`` that the plan's rule stops, given how each run has ended."""
    if plan.stop is None:
        return {}
    never = {arm.name for arm in plan.arms if arm.again or plan.counted_from(arm.name) != origin}
    paired = is_paired(plan, origin)
    return decide(outcomes, plan.stop, baseline=plan.baseline, never=frozenset(never), paired=paired)


def unused_places(outcomes: Sequence[Outcome], stop: Stopped) -> frozenset[int]:
    """Return the places of a stopped arm's runs that count for nothing."""
    if stop.seeds is not None:
        return frozenset(range(stop.seeds, len(outcomes)))
    return frozenset(i for i, run in enumerate(outcomes) if run.end == "missing")


def number_in(value: Any) -> float | None:
    """Return a number out of a data frame's cell, None where it is empty."""
    return None if value is None or pd.isna(value) else float(value)


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
        if self._plan.stop is None:
            return {}
        stage = self._stages()
        if stage != self._stage:
            self._answer = unneeded_runs(load_frames(self._store))
            self._stage = stage
        return self._answer

    def _stages(self) -> dict[str, tuple[int, int]]:
        """Return for each arm how many looks are due, and how many of its runs have diverged."""
        stop = self._plan.stop
        looks = () if stop is None or stop.hopeless is None else stop.hopeless.looks
        for _, run in self._plan.runs():
            if run.id not in self._ended and (state := self._store.run(run.id).status().state) in END_STATES:
                self._ended[run.id] = state
        stages = {}
        for arm in self._plan.arms:
            ended = [self._ended.get(run.id) for run in arm.runs]
            in_front = ended.index(None) if None in ended else len(ended)
            stages[arm.name] = (bisect_right(looks, in_front), ended.count("diverged"))
        return stages


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


def _unneeded_here(frames: StudyFrames) -> dict[str, str]:
    """Return the runs that one comparison does not need, each with the reason."""
    plan = frames.plan
    apart = {found.run for found in find_set_apart(frames, plan.waive)}
    unneeded: dict[str, str] = {}
    for origin in origins(plan):
        outcomes: dict[str, list[Outcome]] = {}
        ids: dict[str, list[str]] = {}
        for _, curve, end in run_ends(frames, apart, origin):
            outcomes.setdefault(curve.arm, []).append(end)
            ids.setdefault(curve.arm, []).append(curve.run_id)
        for arm, stop in stopped_arms(plan, outcomes, origin).items():
            places = sorted(unused_places(outcomes[arm], stop))
            unneeded |= {ids[arm][place]: stop.reason for place in places}
    return unneeded
