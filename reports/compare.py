"""Two studies side by side: each arm's token cost in both, and what the two differ in.

The ratio of an arm's (1 + token cost) in B over that in A, with a 95 % interval by Welch's way over the runs
of both studies: does the cost itself differ between two settings? It says nothing if the studies read their
costs at different targets or against different baselines, which is said then.

How it fails: it does not raise. An arm that one study lacks, or that has no estimate there, has no ratio.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.reports import words
from ablate.reports.intervals import Interval, difference, exponential, t_interval
from ablate.reports.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.analyse import Analysis, ArmResult
    from ablate.reports.cost import Cost
    from ablate.reports.load import StudyFrames


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

    ``coverage``: of the intervals, in words; with a stop rule in either study they are repeated ones.
    """

    left: str
    right: str
    arms: tuple[ComparedArm, ...]
    differs: Mapping[str, tuple[str, str]]
    coverage: str


def compare(
    left: Analysis,
    right: Analysis,
    frames: tuple[StudyFrames, StudyFrames],
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare study A (``left``) with B (``right``); ``frames`` tell in what they differ."""
    arms = {arm.name: arm for arm in left.others}
    others = {arm.name: arm for arm in right.others}
    compared = tuple(
        ComparedArm(
            name=name,
            left=arms[name].token_cost if name in arms else None,
            right=others[name].token_cost if name in others else None,
            ratio=_ratio(arms[name], others[name])
            if name in arms and name in others
            else Interval(note="in one study only"),
        )
        for name in dict.fromkeys((*arms, *others))
    )
    shown = names or (left.study, right.study)
    rules = [one.rule for one in (left, right) if one.rule is not None and one.rule.hopeless is not None]
    return Comparison(
        left=shown[0],
        right=shown[1],
        arms=compared,
        differs=_differences(left, right, frames),
        coverage=words.coverage(rules[0] if rules else None),
    )


def compare_table(comparison: Comparison) -> Table:
    """Return the comparison as text in cells."""
    return Table(
        caption=(
            f"Token cost of each arm in both studies, with its {comparison.coverage} interval, and the ratio "
            f"of (1 + token cost) in {comparison.right} over {comparison.left}, minus one: above zero the "
            "arm costs more there."
        ),
        columns=("Arm", comparison.left, comparison.right, "Ratio"),
        rows=tuple(
            (
                arm.name,
                words.DASH if arm.left is None else words.cost(arm.left),
                words.DASH if arm.right is None else words.cost(arm.right),
                words.DASH
                if arm.ratio.estimate is None
                else f"{words.percent(arm.ratio.estimate)} "
                + words.percent_range(arm.ratio.low, arm.ratio.high),
            )
            for arm in comparison.arms
        ),
        numeric=frozenset({1, 2, 3}),
    )


def compare_document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data."""

    def cost(value: Cost | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"estimate": value.estimate, "low": value.low, "high": value.high, "kind": value.kind}

    return {
        "studies": [comparison.left, comparison.right],
        "differ_in": {key: list(pair) for key, pair in comparison.differs.items()},
        "arms": [
            {
                "name": arm.name,
                "token_cost": [cost(arm.left), cost(arm.right)],
                "ratio": {
                    "estimate": arm.ratio.estimate,
                    "low": arm.ratio.low,
                    "high": arm.ratio.high,
                    "note": arm.ratio.note,
                },
            }
            for arm in comparison.arms
        ],
    }


def _ratio(left: ArmResult, right: ArmResult) -> Interval:
    before, after = left.token_cost.log_ratio, right.token_cost.log_ratio
    if before is None or after is None:
        return Interval(note="no estimate in one of the studies")
    alpha = min(left.alpha, right.alpha)  # the stricter one, where arms could be stopped early
    return exponential(t_interval(difference(after, before), alpha), minus=1.0)


def _differences(
    left: Analysis, right: Analysis, frames: tuple[StudyFrames, StudyFrames]
) -> dict[str, tuple[str, str]]:
    """Return what the studies' targets, baselines and training differ in."""
    sides = []
    for analysis, frame in zip((left, right), frames, strict=True):
        config = frame.configs.get(analysis.baseline) or {}
        flat: dict[str, Any] = {
            "target": words.target(analysis.target),
            "crossing": analysis.target.rule,
            "baseline": analysis.baseline,
            "paired seeds": analysis.paired,
            "timing": analysis.timing.kind,
        }
        for section in ("model", "data", "training"):
            content = config.get(section) or (frame.plan.get(section) if section == "training" else None)
            flat |= {f"{section}.{key}": value for key, value in (content or {}).items()}
        flat |= {key: config[key] for key in ("data_digest", "recipe", "backend") if key in config}
        sides.append({key: _text(value) for key, value in flat.items()})
    keys = dict.fromkeys((*sides[0], *sides[1]))
    return {
        key: (sides[0].get(key, words.DASH), sides[1].get(key, words.DASH))
        for key in keys
        if sides[0].get(key) != sides[1].get(key)
    }


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
