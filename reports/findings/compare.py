"""Studies side by side: each arm's token cost in two of them, and all that studies differ in, as text.

The ratio of an arm's (1 + token cost) in B over that in A, with a 95 % interval by Welch's way over the runs
of both studies: does the cost itself differ between two settings? It is no more than the studies' whole
difference, so all of that is named, for the reader to judge.

An arm that one study lacks, or that has no estimate there, has no ratio. What a study's files do not tell
(imported logs) is a dash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.results.intervals import Interval, difference, exponential, t_interval
from ablate.run.config import ModelConfig
from ablate.store.records import RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.cost import Cost
    from ablate.results.frames import StudyFrames
    from ablate.store.plan_file import StopRule, Target


NOT_TOLD = "–"
"""What a study's files do not tell."""
_OTHERS = ("data_digest", "recipe", "backend")


def target_text(target: Target | None) -> str:
    """Return the target with its unit."""
    if target is None:
        return "none (final losses are compared)"
    if target.kind == "perplexity":
        return f"a validation perplexity of {target.value:g} ({target.val_loss:.4f} nats/token)"
    return f"a validation loss of {target.value:g} nats/token"


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
    arms, others = ({arm.name: arm for arm in side.others} for side in (left, right))
    shared = _share_runs(left.baseline_arm, right.baseline_arm)
    shown = names or (left.plan.study, right.plan.study)
    return Comparison(
        left=shown[0],
        right=shown[1],
        arms=tuple(
            ComparedArm(
                name=name,
                left=arms[name].token_cost if name in arms else None,
                right=others[name].token_cost if name in others else None,
                ratio=_ratio(arms.get(name), others.get(name), shared=shared),
            )
            for name in dict.fromkeys((*arms, *others))
        ),
        differs=study_differences((left, right), frames),
        rules=(left.plan.stop, right.plan.stop),
    )


def _share_runs(left: ArmResult, right: ArmResult) -> bool:
    """Tell whether a run counts in both, as where one study took the results of another."""
    return not {run.run_id for run in left.runs}.isdisjoint(run.run_id for run in right.runs)


def _ratio(left: ArmResult | None, right: ArmResult | None, *, shared: bool) -> Interval:
    if left is None or right is None:
        return Interval(note="in one study only")
    if shared or _share_runs(left, right):
        return Interval(note="runs in common: the two costs are not independent")
    if left.counted_from != right.counted_from:
        return Interval(note="counted from different places: not one question")
    before, after = left.token_cost.log_ratio, right.token_cost.log_ratio
    if before is None or after is None:
        return Interval(note="no estimate in one of the studies")
    alpha = min(left.alpha, right.alpha)  # the stricter one, where arms could be stopped early
    return exponential(t_interval(difference(after, before), alpha), minus=1.0)


def study_differences(
    analyses: Sequence[Analysis], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Return what the studies' targets, baselines and training differ in, by key."""
    heads = [
        {
            "target": target_text(analysis.plan.target),
            "crossing": NOT_TOLD if analysis.plan.target is None else analysis.plan.target.crossing,
            "baseline": analysis.baseline,
            "paired seeds": _text(analysis.plan.paired_seeds),
            "timing": analysis.timing.kind,
        }
        for analysis in analyses
    ]
    pairs = zip((one.baseline for one in analyses), frames, strict=True)
    return _differing(heads) | _settings_differing(list(pairs))


def arm_differences(
    arm: str, analyses: Sequence[Analysis], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Return what an arm's own settings differ in where the baselines' do not, or do otherwise.

    A study without the arm has a dash.
    """
    having = [i for i, analysis in enumerate(analyses) if any(one.name == arm for one in analysis.arms)]
    own = _settings_differing([(arm, frames[i]) for i in having])
    base = _settings_differing([(analyses[i].baseline, frames[i]) for i in having])
    by_study = {
        key: dict(zip(having, told, strict=True)) for key, told in own.items() if told != base.get(key)
    }
    return {key: tuple(at.get(i, NOT_TOLD) for i in range(len(analyses))) for key, at in by_study.items()}


def _settings_differing(pairs: Sequence[tuple[str, StudyFrames]]) -> dict[str, tuple[str, ...]]:
    """Return what the settings of these arms differ in; recipes in words where those tell them apart."""
    found = _differing([_settings(arm, frame) for arm, frame in pairs])
    recipes = tuple(frame.plan.arm(arm).recipe or "" for arm, frame in pairs)
    if "recipe" in found and len(set(recipes)) == len(set(found["recipe"])):
        found["recipe"] = recipes
    return found


def _settings(arm: str, frame: StudyFrames) -> dict[str, str]:
    config = frame.configs.get(arm, RecordedConfig())
    training = config.training or frame.plan.training
    model = ModelConfig.meaningful_fields(config.model or {})
    flat = {
        f"{section}.{key}": value
        for section, content in (("model", model), ("data", config.data), ("training", training))
        for key, value in (content or {}).items()
    }
    flat |= {key: config.whole[key] for key in _OTHERS if key in config.whole}
    return {key: _text(value) for key, value in flat.items()}


def _differing(sides: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for side in sides for key in side)
    found = {key: tuple(side.get(key, NOT_TOLD) for side in sides) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
