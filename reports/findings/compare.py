"""Two studies side by side: each arm's token cost in both, and what the two differ in.

The ratio of an arm's (1 + token cost) in B over that in A, with a 95 % interval by Welch's way over the runs
of both studies: does the cost itself differ between two settings? It says nothing if the studies read their
costs at different targets or against different baselines, which is said then.

How it fails: it does not raise. An arm that one study lacks, or that has no estimate there, has no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.reports.findings.differences import study_differences
from ablate.reports.statistics.intervals import Interval, difference, exponential, t_interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.read.load import StudyFrames
    from ablate.reports.statistics.cost import Cost
    from ablate.store.lock import StopRule


@dataclass(frozen=True, kw_only=True)
class ComparedArm:
    """One arm in two studies. ``ratio``: (1 + cost in B) / (1 + cost in A), minus one."""

    name: str
    left: Cost | None
    right: Cost | None
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two studies. ``differs`` maps what they differ in to (A's, B's) value, as text.

    ``rules``: the studies' stop rules, with one of which intervals are repeated ones.
    """

    left: str
    right: str
    arms: tuple[ComparedArm, ...]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]


def compare(
    left: Analysis,
    right: Analysis,
    frames: tuple[StudyFrames, StudyFrames],
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare study A (``left``) with B (``right``); ``frames`` tell in what they differ."""
    arms = {arm.name: arm for arm in left.others}
    others = {arm.name: arm for arm in right.others}
    baselines_share = _share_runs(left.baseline_arm, right.baseline_arm)
    compared = tuple(
        ComparedArm(
            name=name,
            left=arms[name].token_cost if name in arms else None,
            right=others[name].token_cost if name in others else None,
            ratio=Interval(note="in one study only")
            if name not in arms or name not in others
            else Interval(note="runs in common: the two costs are not independent")
            if baselines_share or _share_runs(arms[name], others[name])
            else _ratio(arms[name], others[name]),
        )
        for name in dict.fromkeys((*arms, *others))
    )
    shown = names or (left.study, right.study)
    return Comparison(
        left=shown[0],
        right=shown[1],
        arms=compared,
        differs=study_differences((left, right), frames),
        rules=(left.rule, right.rule),
    )


def _share_runs(left: ArmResult, right: ArmResult) -> bool:
    """Tell whether a run counts in both, as where one study took the results of another."""
    return not {run.run_id for run in left.runs}.isdisjoint(run.run_id for run in right.runs)


def _ratio(left: ArmResult, right: ArmResult) -> Interval:
    before, after = left.token_cost.log_ratio, right.token_cost.log_ratio
    if before is None or after is None:
        return Interval(note="no estimate in one of the studies")
    alpha = min(left.alpha, right.alpha)  # the stricter one, where arms could be stopped early
    return exponential(t_interval(difference(after, before), alpha), minus=1.0)
