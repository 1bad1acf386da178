"""Several studies that are alike but for the size of the model or the budget: a straight line an arm.

``docs/report.md`` defines place, slope and interval. Arms are matched by name. Other differences of the
studies are named, not refused.

How it fails: ``UserError`` for studies of one size and budget, studies with runs in common, a size that the
files do not tell (a model that is not built in, logs of others), or no arm with two estimates. An arm without
a line is left out, with the reason.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import model_size
from ablate.reports.findings.compare import arm_differences, study_differences, target_text
from ablate.reports.findings.speed import read_configs
from ablate.results.intervals import TOO_LARGE, Interval, combination, exponential, t_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.cost import Cost
    from ablate.results.frames import StudyFrames
    from ablate.results.intervals import Estimate
    from ablate.results.losses import LossDifference
    from ablate.run.config import RunConfig
    from ablate.store.plan_file import StopRule

Axis = Literal["parameters", "tokens"]


@dataclass(frozen=True, kw_only=True)
class PlacedStudy:
    """A study, the parameters and the budget of its baseline, that baseline, and its target in words."""

    name: str
    parameters: int | None
    tokens: int
    baseline: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """An arm's figure in each study, None where it is not, and the straight line through them.

    The line is ``intercept`` + ``slope`` · log10 of the place; ``change`` is for each tenfold of the place.
    """

    points: tuple[Cost | LossDifference | None, ...]
    change: Interval
    intercept: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class ArmTrend:
    """An arm's token cost and loss gap over the studies, each None without two estimates.

    The line of the costs is one of log (1 + token cost), and its change that of (1 + token cost), as a share.
    """

    name: str
    cost: Line | None
    gap: Line | None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Studies by rising place on the ``axis``, and the arms with a line. ``left_out``: the others, and why.

    ``differs`` maps what the studies differ in besides model and target to each one's value, as text.
    ``rules``: the studies' stop rules, with one of which intervals are repeated ones.
    """

    axis: Axis
    studies: tuple[PlacedStudy, ...]
    arms: tuple[ArmTrend, ...]
    left_out: Mapping[str, str]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The studies' places on the axis."""
        return tuple(_place(study, self.axis) for study in self.studies)

    @property
    def against(self) -> str:
        """What costs are told against: the baseline's name, where the studies have one of one name."""
        names = {study.baseline for study in self.studies}
        return names.pop() if len(names) == 1 else "the study's own baseline"

    @property
    def span(self) -> float:
        """The last place over the first."""
        return self.places[-1] / self.places[0]


def trend(
    analyses: Sequence[Analysis], frames: Sequence[StudyFrames], names: Sequence[str] | None = None
) -> Trend:
    """Return each arm's trend over the studies' sizes or, if these are all one, over their budgets.

    ``names`` stand for the studies where two have one.

    Raises:
        UserError: a size cannot be told, sizes and budgets are all one, runs are shared, or no arm has two
            estimates.
    """
    shown = names or [analysis.plan.study for analysis in analyses]
    configs = [read_configs(frame.configs) for frame in frames]
    placed = [_placed(*each) for each in zip(shown, analyses, configs, strict=True)]
    axis = _axis(placed)
    order = sorted(range(len(placed)), key=lambda i: _place(placed[i], axis))
    studies = tuple(placed[i] for i in order)
    analyses, frames = [analyses[i] for i in order], [frames[i] for i in order]
    _need_own_runs(studies, frames)
    places = [_place(study, axis) for study in studies]
    found: dict[str, ArmTrend] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(arm.name for analysis in analyses for arm in analysis.others):
        results = [next((arm for arm in one.others if arm.name == name), None) for one in analyses]
        if any(_has_own_model(configs[i], name, placed[i].baseline) for i in order):
            left_out[name] = "it changes the model itself"
        elif any(one is not None and one.counted_from for one in results):
            left_out[name] = "its cost is counted from a fork"
        elif sum(result is not None for result in results) == 1:
            left_out[name] = "in one study only"
        else:
            one = _arm(name, results, places)
            if one.cost is None and one.gap is None:
                left_out[name] = "it has not two estimates at two places"
            else:
                found[name] = one
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(
            Problem(
                what="no arm has a token cost or a loss gap in two of the studies",
                hint=f"arms are matched by name; {cut(why, 300) or 'the studies have a baseline alone'}",
            )
        )
    differs = study_differences(analyses, frames)
    own = {"target"} if axis == "parameters" else {"target", "training.tokens"}
    more = {key: values for key, values in differs.items() if key not in own and key[:6] != "model."}
    for name in found:
        others = arm_differences(name, analyses, frames)
        more |= {f"{name}: {key}": values for key, values in others.items()}
    return Trend(
        axis=axis,
        studies=studies,
        arms=tuple(found.values()),
        left_out=left_out,
        differs=more,
        rules=tuple(analysis.plan.stop for analysis in analyses),
    )


def _placed(name: str, analysis: Analysis, configs: Mapping[str, RunConfig]) -> PlacedStudy:
    config = configs.get(analysis.baseline)
    return PlacedStudy(
        name=name,
        parameters=None if config is None else _parameters(config),
        tokens=0 if config is None else config.training.tokens,
        baseline=analysis.baseline,
        target=target_text(analysis.plan.target),
    )


def _place(study: PlacedStudy, axis: Axis) -> int:
    place = study.parameters if axis == "parameters" else study.tokens
    assert place is not None
    return place


def _axis(studies: Sequence[PlacedStudy]) -> Axis:
    """Return what the studies differ in; raise ``UserError`` for neither, or for a size that is not known."""
    sizes, budgets = ({getattr(study, key) for study in studies} for key in ("parameters", "tokens"))
    unknown = next((study.name for study in studies if study.parameters is None), None)
    if unknown is not None:
        raise UserError(
            f"{unknown}: the size of its model is not known: it is not built in, or no run has started (to "
            "set two studies side by side: ablate compare A B)"
        )
    if len(sizes) > 1:
        return "parameters"
    if len(budgets) > 1:
        return "tokens"
    raise UserError(
        Problem(
            what=f"all studies have models of {sizes.pop():,} parameters and a budget of {budgets.pop():,} "
            "tokens: there is no trend over either",
            hint="to set two of them side by side: ablate compare A B",
        )
    )


def _need_own_runs(studies: Sequence[PlacedStudy], frames: Sequence[StudyFrames]) -> None:
    """Raise ``UserError`` where a run counts in two studies: their errors would be one and the same."""
    owners: dict[str, str] = {}
    for study, frame in zip(studies, frames, strict=True):
        ids = [str(run_id) for run_id in frame.runs["run_id"]]
        if other := next((owners[run_id] for run_id in ids if run_id in owners), None):
            raise UserError(
                f"{other} and {study.name} have runs in common: what they show is not independent "
                "(name one of them)"
            )
        owners |= dict.fromkeys(ids, study.name)


def _parameters(config: RunConfig) -> int | None:
    """Return the parameters of a model that is built in, None of another."""
    if config.trainer is not None or not config.model.is_built_in:
        return None
    size = model_size(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    return size.parameters


def _has_own_model(configs: Mapping[str, RunConfig], arm: str, baseline: str) -> bool:
    """Tell whether an arm is of another model than its baseline, or of another number of parameters."""
    base, own = configs.get(baseline), configs.get(arm)
    if base is None or own is None:
        return False
    return (own.model, own.trainer) != (base.model, base.trainer) or _parameters(own) != _parameters(base)


def _arm(name: str, results: Sequence[ArmResult | None], places: Sequence[int]) -> ArmTrend:
    """Return an arm with its lines, at the strictest level, where arms could be stopped early."""
    alpha = min(result.alpha for result in results if result is not None)
    costs = [None if result is None else result.token_cost for result in results]
    gaps = [None if result is None else result.difference for result in results]
    cost = _line(costs, [None if one is None else one.log_ratio for one in costs], places, alpha)
    if cost is not None:
        change = exponential(cost.change, minus=1.0)
        if change.note is None and None in (change.estimate, change.low, change.high):
            change = Interval(note=TOO_LARGE)
        cost = replace(cost, change=change)
    gap = _line(gaps, [None if one is None else one.figure for one in gaps], places, alpha)
    return ArmTrend(name=name, cost=cost, gap=gap)


def _line(
    points: Sequence[Cost | LossDifference | None],
    figures: Sequence[Estimate | None],
    places: Sequence[int],
    alpha: float,
) -> Line | None:
    """Return the line by unweighted least squares, None without figures at two places."""
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


def cut(text: str, length: int) -> str:
    """Return a text of that many characters at most."""
    return text if len(text) <= length else text[: length - 1] + "…"
