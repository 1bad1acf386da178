"""Studies side by side: the costs of two, or for each arm a straight line over sizes or budgets of several.

Two studies: the ratio of an arm's (1 + token cost) in B over that in A, with a 95 % interval by Welch's
method over the runs of both. Studies that differ in the size of the model or the budget: a line, whose place,
slope and interval ``docs/report.md`` defines. Arms are matched by name. A ratio or line may come from
anything in which the studies differ, so every difference is named for the reader to judge; unknown values are
a dash.

An arm without a ratio says why; an arm without a line is left out, with the reason.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import model_size
from ablate.reports.findings.speed import read_configs
from ablate.results.intervals import (
    TOO_LARGE,
    Interval,
    combination,
    difference,
    exponential,
    t_interval,
)
from ablate.run.config import ModelConfig
from ablate.store.records import RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.cost import Cost
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate
    from ablate.results.losses import LossDifference
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import StopRule, Target

Axis = Literal["parameters", "tokens"]
NOT_TOLD = "–"
"""A value missing in a study's files."""
_BESIDE = ("data_digest", "recipe", "backend")
_TWO = "to set two studies side by side: ablate compare A B"


@dataclass(frozen=True, kw_only=True)
class ComparedArm:
    """One arm in two studies. ``ratio``: (1 + cost in B) / (1 + cost in A), minus one."""

    name: str
    left: Cost | None
    right: Cost | None
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two studies. ``differs`` maps each difference to the values in A and B, as text.

    ``rules``: the studies' stop rules; with a rule the intervals are repeated confidence intervals.
    """

    left: str
    right: str
    arms: tuple[ComparedArm, ...]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]


@dataclass(frozen=True, kw_only=True)
class PlacedStudy:
    """A study: its name, its baseline with parameters and budget in tokens, and its target in words."""

    name: str
    parameters: int
    tokens: int
    baseline: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """An arm's figure in each study (None if the study lacks the arm), and the straight line through them.

    The line is ``intercept`` + ``slope`` · log10 of the place; ``change`` is per tenfold of the place.
    """

    points: tuple[Cost | LossDifference | None, ...]
    change: Interval
    intercept: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class ArmTrend:
    """An arm's token cost and loss gap over the studies, each None without two estimates.

    The line of the costs is through log (1 + token cost); its ``change`` is that of (1 + token cost), as a
    share.
    """

    name: str
    cost: Line | None
    gap: Line | None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Studies by rising place on the ``axis``, and the arms with a line. ``left_out``: other arms, and why.

    ``differs`` maps each difference besides model and target to its value in each study, as text.
    ``rules``: as in ``Comparison``.
    """

    axis: Axis
    studies: tuple[PlacedStudy, ...]
    arms: tuple[ArmTrend, ...]
    left_out: Mapping[str, str]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The studies' parameters or tokens, by the ``axis``."""
        return tuple(getattr(study, self.axis) for study in self.studies)

    @property
    def against(self) -> str:
        """What costs are relative to: the baseline's name if it is the same in all studies, else in words."""
        names = {study.baseline for study in self.studies}
        return names.pop() if len(names) == 1 else "the study's own baseline"


def target_text(target: Target | None) -> str:
    """Say the target in words, with its unit."""
    if target is None:
        return "none (final losses are compared)"
    if target.kind == "perplexity":
        return f"a validation perplexity of {target.value:g} ({target.val_loss:.4f} nats/token)"
    return f"a validation loss of {target.value:g} nats/token"


def cut(text: str, length: int) -> str:
    """Shorten a text to at most ``length`` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def compare(
    left: Analysis,
    right: Analysis,
    frames: tuple[StudyFrames, StudyFrames],
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare study A (``left``) with B (``right``), whose differences are read from ``frames``.

    ``names``: to show in place of the plans' names.
    """
    arms, others = ({arm.name: arm for arm in side.others} for side in (left, right))
    shown = names or (left.plan.study, right.plan.study)
    found = []
    for name in dict.fromkeys((*arms, *others)):
        a, b = arms.get(name), others.get(name)
        found.append(
            ComparedArm(
                name=name,
                left=None if a is None else a.token_cost,
                right=None if b is None else b.token_cost,
                ratio=_ratio(a, b, (left.baseline_arm, right.baseline_arm)),
            )
        )
    return Comparison(
        left=shown[0],
        right=shown[1],
        arms=tuple(found),
        differs=study_differences((left, right), frames),
        rules=(left.plan.stop, right.plan.stop),
    )


def _ratio(a: ArmResult | None, b: ArmResult | None, baselines: tuple[ArmResult, ArmResult]) -> Interval:
    if a is None or b is None:
        return Interval(note="in one study only")
    for pair in (baselines, (a, b)):
        ids = [{run.run_id for run in arm.runs} for arm in pair]
        if ids[0] & ids[1]:
            return Interval(note="runs in common: the two costs are not independent")
    if a.counted_from != b.counted_from:
        return Interval(note="counted from different places: not one question")
    before, after = a.token_cost.log_ratio, b.token_cost.log_ratio
    if before is None or after is None:
        return Interval(note="no estimate in one of the studies")
    alpha = min(a.alpha, b.alpha)  # the stricter one if arms could be stopped early
    return exponential(t_interval(difference(after, before), alpha), minus=1.0)


def trend(
    analyses: Sequence[Analysis], frames: Sequence[StudyFrames], names: Sequence[str] | None = None
) -> Trend:
    """Fit each arm's line over the studies' sizes or, if these are all equal, over their budgets.

    ``names``: to show in place of the plans' names.

    Raises:
        UserError: a size is unknown, sizes and budgets are all equal, studies share runs, or no arm has two
            estimates.
    """
    configs = [read_configs(frame.configs) for frame in frames]
    placed = []
    for i, analysis in enumerate(analyses):
        base = configs[i].get(analysis.baseline)
        name, size = names[i] if names else analysis.plan.study, _parameters(base)
        if base is None or size is None:
            raise UserError(
                f"{name}: the size of its model is not known: it is not built in, or no run has started "
                f"({_TWO})"
            )
        placed.append(
            PlacedStudy(
                name=name,
                parameters=size,
                tokens=base.training.tokens,
                baseline=analysis.baseline,
                target=target_text(analysis.plan.target),
            )
        )
    axis: Axis = "parameters" if len({study.parameters for study in placed}) > 1 else "tokens"
    if len({getattr(study, axis) for study in placed}) == 1:
        raise UserError(
            Problem(
                what=f"all studies have models of {placed[0].parameters:,} parameters and a budget of "
                f"{placed[0].tokens:,} tokens: there is no trend over either",
                hint=_TWO,
            )
        )
    parts = zip(placed, analyses, frames, configs, strict=True)
    studies, analyses, frames, models = zip(
        *sorted(parts, key=lambda one: getattr(one[0], axis)), strict=True
    )
    _need_own_runs(studies, frames)
    places = [getattr(study, axis) for study in studies]
    found, left_out = [], {}
    for name in dict.fromkeys(arm.name for analysis in analyses for arm in analysis.others):
        results = [next((arm for arm in one.others if arm.name == name), None) for one in analyses]
        known = [result for result in results if result is not None]
        one = _lines(name, results, places)
        if any(_has_own_model(own, name, study.baseline) for own, study in zip(models, studies, strict=True)):
            left_out[name] = "it changes the model itself"
        elif any(result.counted_from for result in known):
            left_out[name] = "its cost is counted from a fork"
        elif len(known) == 1:
            left_out[name] = "in one study only"
        elif one.cost is None and one.gap is None:
            left_out[name] = "it has not two estimates at two places"
        else:
            found.append(one)
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(
            Problem(
                what="no arm has a token cost or a loss gap in two of the studies",
                hint=f"arms are matched by name; {cut(why, 300) or 'the studies have a baseline alone'}",
            )
        )
    own = {"target", "training.tokens"} if axis == "tokens" else {"target"}
    differs = {
        key: values
        for key, values in study_differences(analyses, frames).items()
        if key not in own and not key.startswith("model.")
    }
    for arm in found:
        others = _arm_differences(arm.name, analyses, frames)
        differs |= {f"{arm.name}: {key}": values for key, values in others.items()}
    return Trend(
        axis=axis,
        studies=studies,
        arms=tuple(found),
        left_out=left_out,
        differs=differs,
        rules=tuple(analysis.plan.stop for analysis in analyses),
    )


def _need_own_runs(studies: Sequence[PlacedStudy], frames: Sequence[StudyFrames]) -> None:
    """Raise UserError if two studies share a run: their errors would not be independent."""
    owners: dict[str, str] = {}
    for study, frame in zip(studies, frames, strict=True):
        for run_id in frame.runs["run_id"]:
            if owners.setdefault(run_id, study.name) != study.name:
                raise UserError(
                    f"{owners[run_id]} and {study.name} have runs in common: what they show is not "
                    "independent (name one of them)"
                )


def _parameters(config: RunConfig | None) -> int | None:
    """Count the parameters of a built-in model; None for any other."""
    if config is None or config.trainer is not None or not config.model.is_built_in:
        return None
    size = model_size(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    return size.parameters


def _has_own_model(configs: Mapping[str, RunConfig], arm: str, baseline: str) -> bool:
    """Tell whether an arm's model, trainer or number of parameters differs from its baseline's."""
    base, own = configs.get(baseline), configs.get(arm)
    if base is None or own is None:
        return False
    return (own.model, own.trainer) != (base.model, base.trainer) or _parameters(own) != _parameters(base)


def _lines(name: str, results: Sequence[ArmResult | None], places: Sequence[int]) -> ArmTrend:
    """Fit an arm's lines, at the strictest of its levels."""
    alpha = min(result.alpha for result in results if result is not None)
    costs = [None if result is None else result.token_cost for result in results]
    gaps = [None if result is None else result.difference for result in results]
    cost = line_through(costs, [None if one is None else one.log_ratio for one in costs], places, alpha)
    if cost is not None:
        change = exponential(cost.change, minus=1.0)
        if change.note is None and None in (change.estimate, change.low, change.high):
            change = Interval(note=TOO_LARGE)
        cost = replace(cost, change=change)
    gap = line_through(gaps, [None if one is None else one.figure for one in gaps], places, alpha)
    return ArmTrend(name=name, cost=cost, gap=gap)


def line_through(
    points: Sequence[Cost | LossDifference | None],
    figures: Sequence[Estimate | None],
    places: Sequence[int],
    alpha: float,
) -> Line | None:
    """Fit the line by unweighted least squares; None without figures at two places."""
    known = [(math.log10(x), y) for x, y in zip(places, figures, strict=True) if y is not None]
    if len({x for x, _ in known}) < 2:
        return None
    middle = statistics.fmean(x for x, _ in known)
    square = sum((x - middle) ** 2 for x, _ in known)
    slope = combination([((x - middle) / square, figure) for x, figure in known])
    return Line(
        points=tuple(points),
        change=t_interval(slope, alpha),
        intercept=statistics.fmean(figure.value for _, figure in known) - slope.value * middle,
        slope=slope.value,
    )


def study_differences(
    analyses: Sequence[Analysis], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Find what the studies' targets, baselines and training differ in: key → each study's value."""
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
    baselines = [(one.baseline, frame) for one, frame in zip(analyses, frames, strict=True)]
    return _differing(heads) | _settings_differing(baselines)


def _arm_differences(
    arm: str, analyses: Sequence[Analysis], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Find the differences in an arm's settings that the baselines do not have in the same way.

    A study without the arm has a dash.
    """
    having = [i for i, analysis in enumerate(analyses) if any(one.name == arm for one in analysis.arms)]
    own = _settings_differing([(arm, frames[i]) for i in having])
    base = _settings_differing([(analyses[i].baseline, frames[i]) for i in having])
    found = {}
    for key, told in own.items():
        if told != base.get(key):
            by_study = dict(zip(having, told, strict=True))
            found[key] = tuple(by_study.get(i, NOT_TOLD) for i in range(len(analyses)))
    return found


def _settings_differing(pairs: Sequence[tuple[str, StudyFrames]]) -> dict[str, tuple[str, ...]]:
    """Find what the settings of these arms differ in; recipes in words if the words differ as well."""
    sides = []
    for arm, frame in pairs:
        config = frame.configs.get(arm, RecordedConfig())
        sections = {
            "model": ModelConfig.meaningful_fields(config.model or {}),
            "data": config.data or {},
            "training": config.training or frame.plan.training,
        }
        flat = {f"{name}.{key}": one for name, section in sections.items() for key, one in section.items()}
        flat |= {key: config.whole[key] for key in _BESIDE if key in config.whole}
        sides.append({key: _text(value) for key, value in flat.items()})
    found = _differing(sides)
    recipes = tuple(frame.plan.arm(arm).recipe or "" for arm, frame in pairs)
    if "recipe" in found and len(set(recipes)) == len(set(found["recipe"])):
        found["recipe"] = recipes
    return found


def _differing(sides: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for side in sides for key in side)
    found = {key: tuple(side.get(key, NOT_TOLD) for side in sides) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
