"""Studies side by side: the costs of two, or for each arm a straight line over sizes or budgets of several.

Two studies: the ratio of an arm's (1 + token cost) in B over that in A, with a 95 % interval by Welch's
method over the runs of both. Studies that differ in the size of the model or the budget: a line, whose place,
slope and interval ``docs/report.md`` defines. Arms are matched by name. A ratio or line may come from
anything in which the studies differ, so every difference is named for the reader to judge; unknown values are
a dash.

An arm without a ratio says why; an arm without a line is left out, with the reason.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import UserError
from ablate.reports.findings.speed import read_configs
from ablate.results.cost import Cost
from ablate.results.intervals import (
    TOO_LARGE,
    Interval,
    combination,
    difference,
    exponential,
    t_interval,
)
from ablate.run.architecture import model_size
from ablate.run.config import ModelConfig
from ablate.store.records import RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.frames import StudyFrames
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import StopRule, Target

Axis = Literal["", "parameters", "tokens"]
NOT_TOLD = "–"
"""A value missing in a study's files."""
_BESIDE = ("data_digest", "recipe", "backend")
_TWO = "to set two studies side by side: ablate compare A B"


@dataclass(frozen=True, kw_only=True)
class PlacedStudy:
    """A study: its name, its baseline, and its target in words; in a trend the parameters and the budget."""

    name: str
    baseline: str
    target: str
    parameters: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Line:
    """An arm's ``Cost`` or ``LossDifference`` in each study (None if it lacks the arm), and how it changes.

    Of two studies ``change`` is (1 + cost in B) / (1 + cost in A) minus one. Of more, the straight line is
    ``intercept`` + ``slope`` · log10 of the place, and ``change`` is per tenfold of the place.
    """

    points: tuple[Any, ...]
    change: Interval
    intercept: float = math.nan
    slope: float = math.nan


@dataclass(frozen=True, kw_only=True)
class ComparedArm:
    """An arm's token cost and loss gap over the studies; each None in a trend without two estimates.

    The line of the costs is through log (1 + token cost); its ``change`` is that of (1 + token cost), as a
    share.
    """

    name: str
    cost: Line | None
    gap: Line | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two studies or, with an ``axis``, several by rising place on it. ``left_out``: other arms, and why.

    ``differs`` maps each difference, in a trend besides model and target, to its value in each study, as
    text. ``rules``: the studies' stop rules; with a rule the intervals are repeated confidence intervals.
    """

    studies: tuple[PlacedStudy, ...]
    axis: Axis = ""
    arms: tuple[ComparedArm, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The studies' parameters or tokens, by the ``axis``."""
        return tuple(getattr(study, self.axis or "tokens") for study in self.studies)

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


def compare(analyses: Sequence[Analysis], frames: Sequence[StudyFrames]) -> Comparison:
    """Compare two studies."""
    bases = [one.baseline_arm for one in analyses]
    return Comparison(
        studies=tuple(map(_placed, analyses)),
        arms=tuple(
            ComparedArm(name=name, cost=Line(points=_costs(pair), change=_ratio(pair, bases)))
            for name, pair in _arms(analyses).items()
        ),
        differs=study_differences(analyses, frames),
        rules=tuple(one.plan.stop for one in analyses),
    )


def _placed(one: Analysis) -> PlacedStudy:
    return PlacedStudy(name=one.plan.study, baseline=one.baseline, target=target_text(one.plan.target))


def _arms(analyses: Sequence[Analysis]) -> dict[str, list[ArmResult | None]]:
    """Map each arm but the baselines to its result in every study."""
    sides = [{arm.name: arm for arm in one.others} for one in analyses]
    return {name: [side.get(name) for side in sides] for name in dict.fromkeys(itertools.chain(*sides))}


def _costs(results: Sequence[ArmResult | None]) -> tuple[Any, ...]:
    return tuple(result and result.token_cost for result in results)


def _ratio(pair: Sequence[ArmResult | None], bases: Sequence[ArmResult]) -> Interval:
    a, b = pair
    if a is None or b is None:
        return Interval(note="in one study only")
    for left, right in (bases, (a, b)):
        if {run.run_id for run in left.runs} & {run.run_id for run in right.runs}:
            return Interval(note="runs in common: the two costs are not independent")
    if a.counted_from != b.counted_from:
        return Interval(note="counted from different places: not one question")
    before, after = a.token_cost.log_ratio, b.token_cost.log_ratio
    if before is None or after is None:
        return Interval(note="no estimate in one of the studies")
    alpha = min(a.alpha, b.alpha)  # the stricter one if arms could be stopped early
    return exponential(t_interval(difference(after, before), alpha), minus=1.0)


def trend(analyses: Sequence[Analysis], frames: Sequence[StudyFrames]) -> Comparison:
    """Fit each arm's line over the studies' sizes or, if these are all equal, over their budgets.

    Raises:
        UserError: a size is unknown, sizes and budgets are all equal, studies share runs, or no arm has two
            estimates.
    """
    models = [read_configs(frame.configs) for frame in frames]
    placed = []
    for study, configs in zip(map(_placed, analyses), models, strict=True):
        base = configs.get(study.baseline)
        if base is None or (size := _parameters(base)) is None:
            raise UserError(
                f"{study.name}: the size of its model is not known: it is not built in, or no run has "
                "started",
                hint=_TWO,
            )
        placed.append(replace(study, parameters=size, tokens=base.training.tokens))
    axis: Axis = "parameters" if len({study.parameters for study in placed}) > 1 else "tokens"
    rows = zip(placed, models, analyses, frames, strict=True)
    by_place = sorted(rows, key=lambda row: getattr(row[0], axis))
    studies, models, analyses, frames = (list(one) for one in zip(*by_place, strict=True))
    places = [getattr(study, axis) for study in studies]
    if places[0] == places[-1]:
        raise UserError(
            f"all studies have models of {studies[0].parameters:,} parameters and a budget of "
            f"{studies[0].tokens:,} tokens: there is no trend over either",
            hint=_TWO,
        )
    owners: dict[str, str] = {}
    for study, frame in zip(studies, frames, strict=True):
        for run_id in frame.runs:
            if (owner := owners.setdefault(run_id, study.name)) != study.name:
                raise UserError(
                    f"{owner} and {study.name} have runs in common: what they show is not independent "
                    "(name one of them)"
                )
    found, left_out = [], {}
    for name, results in _arms(analyses).items():
        known = [result for result in results if result is not None]
        own = [
            (configs[name], configs[study.baseline])
            for configs, study in zip(models, studies, strict=True)
            if name in configs
        ]
        alpha = min(result.alpha for result in known)  # the strictest
        cost = line_through(_costs(results), places, alpha)
        gap = line_through([result and result.difference for result in results], places, alpha)
        if any(
            (arm.model, arm.trainer, _parameters(arm)) != (base.model, base.trainer, _parameters(base))
            for arm, base in own
        ):
            left_out[name] = "it changes the model itself"
        elif any(result.counted_from for result in known):
            left_out[name] = "its cost is counted from a fork"
        elif len(known) == 1:
            left_out[name] = "in one study only"
        elif cost is None and gap is None:
            left_out[name] = "it has not two estimates at two places"
        else:
            found.append(ComparedArm(name=name, cost=cost, gap=gap))
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(
            "no arm has a token cost or a loss gap in two of the studies",
            hint=f"arms are matched by name; {cut(why, 300) or 'the studies have a baseline alone'}",
        )
    usual = {"target", "training.tokens"} if axis == "tokens" else {"target"}
    differs = {
        key: values
        for key, values in study_differences(analyses, frames).items()
        if key not in usual and not key.startswith("model.")
    }
    for name in (arm.name for arm in found):
        # A study without the arm has a dash.
        having = [any(arm.name == name for arm in one.arms) for one in analyses]
        base_differs = _settings_differing(
            [one.baseline if has else None for one, has in zip(analyses, having, strict=True)], frames
        )
        arm_differs = _settings_differing([name if has else None for has in having], frames)
        differs |= {
            f"{name}: {key}": told for key, told in arm_differs.items() if told != base_differs.get(key)
        }
    return Comparison(
        axis=axis,
        studies=tuple(studies),
        arms=tuple(found),
        left_out=left_out,
        differs=differs,
        rules=tuple(one.plan.stop for one in analyses),
    )


def _parameters(config: RunConfig) -> int | None:
    """Count the parameters of a built-in model; None for any other."""
    if config.trainer is not None or not config.model.is_built_in:
        return None
    size = model_size(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    return size.parameters


def line_through(points: Sequence[Any], places: Sequence[int], alpha: float) -> Line | None:
    """Fit the line by unweighted least squares; None without figures at two places."""
    are_costs = any(isinstance(point, Cost) for point in points)
    figures = [point and (point.log_ratio if are_costs else point.figure) for point in points]
    known = [(math.log10(x), y) for x, y in zip(places, figures, strict=True) if y is not None]
    if len({x for x, _ in known}) < 2:
        return None
    middle = statistics.fmean(x for x, _ in known)
    square = sum((x - middle) ** 2 for x, _ in known)
    slope = combination([((x - middle) / square, figure) for x, figure in known])
    change = t_interval(slope, alpha)
    if are_costs:
        change = exponential(change, minus=1.0)
        if change.note is None and None in (change.estimate, change.low, change.high):
            change = Interval(note=TOO_LARGE)
    return Line(
        points=tuple(points),
        change=change,
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
    return _differing(heads) | _settings_differing([one.baseline for one in analyses], frames)


def _settings_differing(
    arms: Sequence[str | None], frames: Sequence[StudyFrames]
) -> dict[str, tuple[str, ...]]:
    """Find what the settings of each study's arm differ in; recipes in words if the words differ as well."""
    sides: list[dict[str, str] | None] = []
    for arm, frame in zip(arms, frames, strict=True):
        if arm is None:
            sides.append(None)
            continue
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
    pairs = zip(arms, frames, strict=True)
    recipes = tuple(frame.plan.arm(arm).recipe or "" if arm else NOT_TOLD for arm, frame in pairs)
    if "recipe" in found and len(set(recipes)) == len(set(found["recipe"])):
        found["recipe"] = recipes
    return found


def _differing(sides: Sequence[Mapping[str, str] | None]) -> dict[str, tuple[str, ...]]:
    """Keep the keys whose values differ; a side that is None has a dash and no difference."""
    known = [side for side in sides if side is not None]
    keys = dict.fromkeys(itertools.chain(*known))
    return {
        key: tuple((side or {}).get(key, NOT_TOLD) for side in sides)
        for key in keys
        if len({side.get(key, NOT_TOLD) for side in known}) > 1
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
