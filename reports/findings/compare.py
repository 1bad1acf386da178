"""Studies side by side: for each arm a straight line through its figures in them.

Of three studies or more, which differ in the size of the model or the budget, the line goes over that; its
place, slope and interval are defined in ``docs/report.md``. Of two studies it goes from the first, at place
1, to the second, at 10: the change per tenfold is then that from one to the other. Arms are matched by name.
A line may come from anything in which the studies differ, so every difference is named for the reader to
judge; unknown values are a dash.

An arm without a line is left out, with the reason.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import UserError, cut
from ablate.results.claims import has_interval, hold_together, p_of_difference
from ablate.results.cost import Cost
from ablate.results.intervals import (
    TOO_LARGE,
    Interval,
    combination,
    combined_interval,
    exponential,
)
from ablate.results.stop_rule import level_of
from ablate.run.architecture import model_size
from ablate.run.config import ModelConfig
from ablate.store.records import RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate
    from ablate.results.losses import LossDifference
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import LockedPlan, StopRule

Axis = Literal["", "parameters", "tokens"]
NOT_TOLD = "–"
"""A value missing in a study's files."""
_BESIDE = ("data_digest", "recipe", "backend")
_TWO = "to set two studies side by side: ablate compare A B"
_NO_LINE = "not two estimates at two places"


@dataclass(frozen=True, kw_only=True)
class PlacedStudy:
    """A study: its name, its baseline, its target in words; parameters and budget are None if not known."""

    name: str
    baseline: str
    target: str
    parameters: int | None
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """An arm's ``Cost`` or ``LossDifference`` in each study (None if it lacks the arm), and how it changes.

    The straight line is ``intercept`` + ``slope`` · log10 of the place; None without two estimates at two
    places. ``change`` is per tenfold of the place, with its interval; ``figure``: the slope with its variance.
    """

    points: tuple[Cost | LossDifference | None, ...]
    change: Interval
    intercept: float | None = None
    slope: float | None = None
    figure: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedArm:
    """An arm's token cost and loss gap over the studies.

    The line of the costs is through log (1 + token cost); its ``change`` is that of (1 + token cost), as a
    share.
    """

    name: str
    token_cost: Line
    loss_gap: Line


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Studies by rising place: their parameters or tokens; of two, without an ``axis``, 1 and 10.

    ``pairs``: arms over each other, named ``a over b``, as ``arms`` are over the baseline.
    ``holding``: by figure, the arms of which a change is shown beside those of all others. ``left_out``: other
    arms, and why. ``differs`` maps each difference, besides that of the axis, to its value in each
    study, as text. ``rules``: the studies' stop rules; with a rule the intervals are repeated confidence
    intervals. ``loss_unit``: of the losses of all studies.
    """

    studies: tuple[PlacedStudy, ...]
    axis: Axis
    places: tuple[int, ...]
    arms: tuple[ComparedArm, ...]
    pairs: tuple[ComparedArm, ...]
    holding: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]
    loss_unit: str

    @property
    def against(self) -> str:
        """What costs are relative to: the baseline's name if it is the same in all studies, else in words."""
        names = {study.baseline for study in self.studies}
        if len(names) == 1:
            return names.pop()
        return "the study's own baseline"


def target_text(plan: LockedPlan) -> str:
    """Say the target in words, with its unit."""
    target = plan.target
    if target is None:
        return "none (final losses are compared)"
    if target.kind == "perplexity":
        return f"a validation perplexity of {target.value:g} ({target.val_loss:.4f} {plan.unit})"
    return f"a validation loss of {target.value:g} {plan.unit}"


def compare(analyses: Sequence[Analysis], frames: Sequence[StudyFrames]) -> Comparison:
    """Fit each arm's line: of two studies from one to the other, of more over their sizes or budgets.

    Budgets are taken if the sizes are all equal.

    Raises:
        UserError: no arm has two estimates; of more than two studies a size is unknown, or sizes and budgets
            are all equal; losses of two units.
    """
    _refuse_units(analyses)
    placed: Sequence[PlacedStudy] = [_placed(analysis) for analysis in analyses]
    axis: Axis = ""
    places: Sequence[int] = (1, 10)
    if len(placed) > 2:
        axis = _axis(placed)
        places = [getattr(study, axis) for study in placed]
    by_place = sorted(
        zip(places, placed, analyses, frames, strict=True), key=itemgetter(0)
    )
    places, placed, analyses, frames = zip(*by_place, strict=True)
    baselines = [analysis.baseline_arm for analysis in analyses]
    settings = []
    for analysis, frame in zip(analyses, frames, strict=True):
        settings.append(_study_settings(analysis, frame, axis))
    differs = _differing(settings, baselines)
    arms = []
    left_out = {}
    for name, results in _results_by_arm(analyses).items():
        strictest = min(result.alpha for result in results if result is not None)
        arm = _compared_arm(name, results, places, strictest)
        reason = _why_left_out(arm, results, baselines, axis)
        if reason:
            left_out[name] = reason
            continue
        arms.append(arm)
        settings = list(map(_settings, results, frames))
        for key, values in _differing(settings, results).items():
            differs[f"{name}: {key}"] = values
    if not arms:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(
            "no arm has a token cost or a loss gap in two of the studies",
            hint=f"arms are matched by name; {cut(reasons, 300) or 'the studies have a baseline alone'}",
        )
    rules = tuple(analysis.plan.stop for analysis in analyses)
    rule = min(rules, key=level_of)
    return Comparison(
        studies=tuple(placed),
        axis=axis,
        places=tuple(places),
        arms=tuple(arms),
        pairs=_over_each_other(arms, analyses, places, level_of(rule)),
        holding={
            "token_cost": _holding(arms, "token_cost", rule),
            "loss_gap": _holding(arms, "loss_gap", rule),
        },
        left_out=left_out,
        differs=differs,
        rules=rules,
        loss_unit=analyses[0].plan.unit,
    )


def _refuse_units(analyses: Sequence[Analysis]) -> None:
    units = dict.fromkeys(analysis.plan.unit for analysis in analyses)
    if len(units) > 1:
        hint = "name studies whose losses are in one unit"
        raise UserError(
            f"losses in {' and '.join(units)} cannot be compared", hint=hint
        )


def _results_by_arm(
    analyses: Sequence[Analysis],
) -> dict[str, list[ArmResult | None]]:
    """Return each arm's result in each study; None where a study lacks the arm."""
    results: dict[str, list[ArmResult | None]] = {}
    for analysis in analyses:
        for arm in analysis.others:
            results[arm.name] = [study.other(arm.name) for study in analyses]
    return results


def _over_each_other(
    arms: Sequence[ComparedArm],
    analyses: Sequence[Analysis],
    places: Sequence[int],
    alpha: float,
) -> tuple[ComparedArm, ...]:
    pairs = []
    for over, arm in itertools.combinations(arms, 2):
        results = []
        for analysis in analyses:
            rivals = analysis.over_rivals.get(over.name, {})
            results.append(rivals.get(arm.name))
        name = f"{arm.name} over {over.name}"
        pairs.append(_compared_arm(name, results, places, alpha))
    return tuple(pairs)


def _compared_arm(
    name: str,
    results: Sequence[ArmResult | None],
    places: Sequence[int],
    alpha: float,
) -> ComparedArm:
    costs = [None if result is None else result.token_cost for result in results]
    gaps = [None if result is None else result.difference for result in results]
    return ComparedArm(
        name=name,
        token_cost=line_through(costs, places, alpha),
        loss_gap=line_through(gaps, places, alpha),
    )


def _holding(
    arms: Sequence[ComparedArm], field: str, rule: StopRule | None
) -> tuple[str, ...]:
    """Return the arms whose change of this figure is shown beside those of all others."""
    p_values = {}
    for arm in arms:
        change = getattr(arm, field).figure
        if has_interval(change):
            p_values[arm.name] = p_of_difference(change)
    return tuple(sorted(hold_together(p_values, partial(level_of, rule))))


def _placed(analysis: Analysis) -> PlacedStudy:
    config = analysis.baseline_arm.config
    return PlacedStudy(
        name=analysis.plan.study,
        baseline=analysis.baseline,
        target=target_text(analysis.plan),
        parameters=None if config is None else parameter_count(config),
        tokens=None if config is None else config.training.tokens,
    )


def _axis(studies: Sequence[PlacedStudy]) -> Axis:
    for study in studies:
        if study.parameters is None:
            raise UserError(
                f"{study.name}: the size of its model is not known: it is not built in, or no run has "
                "started",
                hint=_TWO,
            )
    if len({study.parameters for study in studies}) > 1:
        return "parameters"
    if len({study.tokens for study in studies}) > 1:
        return "tokens"
    raise UserError(
        f"all studies have models of {studies[0].parameters:,} parameters and a budget of "
        f"{studies[0].tokens:,} tokens: there is no trend over either",
        hint=_TWO,
    )


def _why_left_out(
    arm: ComparedArm,
    results: Sequence[ArmResult | None],
    baselines: Sequence[ArmResult],
    axis: Axis,
) -> str:
    """Say why an arm has no line; empty if it has one."""
    known = []
    changes_model = False
    for result, base in zip(results, baselines, strict=True):
        if result is not None:
            known.append(result)
            changes_model |= _model(result) not in (None, _model(base))
    if axis and changes_model:
        return "it changes the model itself"
    if len(known) == 1:
        return "in one study only"
    run_ids = [run.run_id for side in (*baselines, *known) for run in side.runs]
    if len(set(run_ids)) < len(run_ids):
        return "runs in common: what the studies show is not independent"
    if len({result.counted_from for result in known}) > 1:
        return "counted from different places: not one question"
    if arm.token_cost.slope is None and arm.loss_gap.slope is None:
        return f"it has {_NO_LINE}"
    return ""


def parameter_count(config: RunConfig) -> int | None:
    """Count the parameters of a built-in model; None for any other."""
    if config.trainer is not None or not config.model.is_built_in:
        return None
    size = model_size(
        config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len
    )
    return size.parameters


def _model(arm: ArmResult) -> object:
    """Return what makes the arm's model; None if no run has started."""
    return arm.config and (
        arm.config.model,
        arm.config.trainer,
        parameter_count(arm.config),
    )


def line_through(
    points: Sequence[Cost | LossDifference | None], places: Sequence[int], alpha: float
) -> Line:
    """Fit the line by unweighted least squares, where there are figures at two places."""
    figures = []
    for point, place in zip(points, places, strict=True):
        if point is not None and point.figure is not None:
            figures.append((math.log10(place), point.figure))
    if len({x for x, _ in figures}) < 2:
        return Line(points=tuple(points), change=Interval(note=_NO_LINE))
    middle = statistics.fmean(x for x, _ in figures)
    square = sum((x - middle) ** 2 for x, _ in figures)
    parts = [((x - middle) / square, figure) for x, figure in figures]
    slope = combination(parts)
    change = combined_interval(parts, alpha)
    if any(isinstance(point, Cost) for point in points):
        change = exponential(change, minus=1.0)
        if change.note is None and None in (change.estimate, change.low, change.high):
            change = Interval(note=TOO_LARGE)
    return Line(
        points=tuple(points),
        change=change,
        intercept=statistics.fmean(figure.value for _, figure in figures)
        - slope.value * middle,
        slope=slope.value,
        figure=slope,
    )


def _study_settings(
    analysis: Analysis, frame: StudyFrames, axis: Axis
) -> dict[str, str]:
    """Return what a study and its baseline can differ in from others, besides the target and the ``axis``."""
    plan = analysis.plan
    config = frame.configs.get(analysis.baseline, RecordedConfig())
    settings = {
        "crossing": NOT_TOLD if plan.target is None else plan.target.crossing,
        "baseline": analysis.baseline,
        "paired seeds": plan.paired_seeds,
        "timing": analysis.timing.kind,
    }
    sections = {
        "model": ModelConfig.meaningful_fields(config.model or {}),
        "data": config.data or {},
        "training": config.training or frame.plan.training,
    }
    if axis == "parameters":
        del sections["model"]
    for section, values in sections.items():
        for key, value in values.items():
            settings[f"{section}.{key}"] = value
    if axis == "tokens":
        settings.pop("training.tokens", None)
    for key in _BESIDE:
        if key in config.whole:
            settings[key] = config.whole[key]
    return _texts(settings)


def _settings(arm: ArmResult | None, frame: StudyFrames) -> dict[str, str]:
    """Return how an arm differs from its baseline, and its recipe, which another version may resolve."""
    if arm is None:
        return {}
    settings = {}
    for key, (_, value) in arm.planned.differs.items():
        settings[key] = value
    config = frame.configs.get(arm.name, RecordedConfig())
    if "recipe" in config.whole:
        settings["recipe"] = config.whole["recipe"]
    return _texts(settings)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Write values as JSON, but texts as they are."""
    texts = {}
    for key, value in settings.items():
        texts[key] = value
        if not isinstance(value, str):
            texts[key] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return texts


def _differing(
    sides: Sequence[Mapping[str, str]], arms: Sequence[ArmResult | None]
) -> dict[str, tuple[str, ...]]:
    """Keep the keys whose values differ; a side without an arm has a dash and no difference.

    The recipes of the ``arms`` are in words if the words differ as well.
    """
    differing = {}
    for key in dict.fromkeys(itertools.chain(*sides)):
        values = tuple(side.get(key, NOT_TOLD) for side in sides)
        known = {value for value, arm in zip(values, arms, strict=True) if arm}
        if len(known) > 1:
            differing[key] = values
    words = tuple(NOT_TOLD if arm is None else arm.recipe for arm in arms)
    if "recipe" in differing and len(set(words)) == len(set(differing["recipe"])):
        differing["recipe"] = words
    return differing
