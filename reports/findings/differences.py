"""What studies that are set side by side differ in, as their files say it: in text, one value a study.

A ratio or a trend over studies is put down to one thing, and is no more than their whole difference. So all
of it is named, for the reader to judge.

How it fails: it does not raise. What a study's files do not tell (imported logs) is a dash.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ablate.reports.findings.ends import target_text
from ablate.store.records import RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.reports.read.load import StudyFrames

NOT_TOLD = "–"
"""What a study's files do not tell."""
_OTHERS = ("data_digest", "recipe", "backend")


def study_differences(
    analyses: Sequence[Analysis], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Return what the studies' targets, baselines and training differ in, by key."""
    heads = [
        {
            "target": target_text(analysis.target),
            "crossing": analysis.target.crossing,
            "baseline": analysis.baseline,
            "paired seeds": _text(analysis.paired),
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
    found = {}
    for key, values in own.items():
        if values != base.get(key):
            at = dict(zip(having, values, strict=True))
            found[key] = tuple(at.get(i, NOT_TOLD) for i in range(len(analyses)))
    return found


def _settings_differing(pairs: Sequence[tuple[str, StudyFrames]]) -> dict[str, tuple[str, ...]]:
    """Return what the settings of these arms differ in; recipes in words where those tell them apart."""
    found = _differing([_settings(arm, frame) for arm, frame in pairs])
    recipes = tuple(_recipe(arm, frame) for arm, frame in pairs)
    if "recipe" in found and len(set(recipes)) == len(set(found["recipe"])):
        found["recipe"] = recipes
    return found


def _settings(arm: str, frame: StudyFrames) -> dict[str, str]:
    config = frame.configs.get(arm, RecordedConfig())
    sections = {
        "model": config.model, "data": config.data, "training": config.training or frame.plan.training
    }  # fmt: skip
    flat = {
        f"{section}.{key}": value
        for section, content in sections.items()
        for key, value in (content or {}).items()
    }
    flat |= {key: config.whole[key] for key in _OTHERS if key in config.whole}
    return {key: _text(value) for key, value in flat.items()}


def _recipe(arm: str, frame: StudyFrames) -> str:
    """Return the plan's few words on an arm's recipe."""
    return next((entry.recipe or "" for entry in frame.plan.arms if entry.name == arm), "")


def _differing(sides: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for side in sides for key in side)
    found = {key: tuple(side.get(key, NOT_TOLD) for side in sides) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
