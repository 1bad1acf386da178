"""Token cost over the size of the model: of studies that are alike but for it, one straight line an arm.

Beside it the scaling law of their losses, where they can carry one. ``docs/analysis.md`` defines size, slope,
interval and law. Arms are matched by name. Other differences of the
studies are named, not refused.

How it fails: ``UserError`` for studies of one size, studies with runs in common, a size that neither files
nor user tell (a model that is not built in, logs of others), or no arm with two estimates. An arm without a
trend is left out, with the reason.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import model_size
from ablate.reports.findings.compare import arm_differences, study_differences
from ablate.reports.findings.ends import target_text
from ablate.reports.findings.scaling import fit_law, study_points
from ablate.reports.findings.speed import read_configs
from ablate.reports.statistics.intervals import TOO_LARGE, Interval, combination, exponential, t_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.read.load import StudyFrames
    from ablate.reports.read.losses import LossPoint
    from ablate.reports.statistics.cost import Cost
    from ablate.reports.statistics.scaling import Scaling
    from ablate.run.config import RunConfig
    from ablate.store.lock import StopRule


NO_TARGET = "the studies have no target (to read them at one place: --after TOKENS)"


@dataclass(frozen=True, kw_only=True)
class SizedStudy:
    """A study, the ``parameters`` of its baseline's model, that baseline, and its target in words."""

    name: str
    parameters: int
    baseline: str
    target: str


@dataclass(frozen=True, kw_only=True)
class ArmTrend:
    """An arm's token cost in each study, None where it is not, and its line through them.

    ``per_tenfold``: (1 + token cost) at ten times the parameters over that before, minus one. The line is
    log(1 + token cost) = ``intercept`` + ``slope`` · log10 of the parameters.
    """

    name: str
    costs: tuple[Cost | None, ...]
    per_tenfold: Interval
    intercept: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Studies by rising size, and the arms with a line. ``left_out``: the other arms, and why.

    ``differs`` maps what the studies differ in besides model and target to each one's value, as text.
    ``rules``: the studies' stop rules, with one of which intervals are repeated ones.
    """

    studies: tuple[SizedStudy, ...]
    arms: tuple[ArmTrend, ...]
    left_out: Mapping[str, str]
    differs: Mapping[str, tuple[str, ...]]
    rules: tuple[StopRule | None, ...]

    @property
    def against(self) -> str:
        """What costs are told against: the baseline's name, where the studies have one of one name."""
        names = {study.baseline for study in self.studies}
        return names.pop() if len(names) == 1 else "the study's own baseline"

    @property
    def span(self) -> float:
        """The largest model's parameters over the smallest's."""
        return self.studies[-1].parameters / self.studies[0].parameters


def trend(
    analyses: Sequence[Analysis],
    frames: Sequence[StudyFrames],
    names: Sequence[str] | None = None,
    parameters: Sequence[int] | None = None,
) -> Trend:
    """Return each arm's trend over the studies' sizes; ``names`` stand for the studies where two have one.

    ``parameters``: of each study, in place of what its files tell.

    Raises:
        UserError: a size cannot be told, all are one, runs are shared, or no arm has two estimates.
    """
    shown = names or [analysis.plan.study for analysis in analyses]
    configs = [read_configs(frame.configs) for frame in frames]
    sized = _all_sized(shown, analyses, configs, parameters)
    order = sorted(range(len(sized)), key=lambda i: sized[i].parameters)
    studies = tuple(sized[i] for i in order)
    analyses, frames = [analyses[i] for i in order], [frames[i] for i in order]
    if studies[0].parameters == studies[-1].parameters:
        raise UserError(
            Problem(
                what=f"all studies have models of {studies[0].parameters:,} parameters: there is no trend "
                "over the size",
                hint="to set two of them side by side: ablate compare A B",
            )
        )
    _need_own_runs(studies, frames)
    found: dict[str, ArmTrend] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(arm.name for analysis in analyses for arm in analysis.others):
        results = [next((arm for arm in one.others if arm.name == name), None) for one in analyses]
        if any(_has_own_model(configs[i], name, sized[i].baseline) for i in order):
            left_out[name] = "it changes the model itself"
            continue
        if any(one is not None and one.counted_from for one in results):
            left_out[name] = "its cost is counted from a fork"
            continue
        line = _line(name, results, [study.parameters for study in studies])
        if isinstance(line, str):
            left_out[name] = line
        else:
            found[name] = line
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(
            Problem(
                what="no arm has an estimate of its token cost in two of the studies",
                hint=f"arms are matched by name; {cut(why, 300) or 'the studies have a baseline alone'}",
            )
        )
    differs = study_differences(analyses, frames)
    more = {key: values for key, values in differs.items() if key != "target" and key[:6] != "model."}
    for name in found:
        own = arm_differences(name, analyses, frames)
        more |= {f"{name}: {key}": values for key, values in own.items()}
    return Trend(
        studies=studies,
        arms=tuple(found.values()),
        left_out=left_out,
        differs=more,
        rules=tuple(analysis.plan.stop for analysis in analyses),
    )


def trend_and_law(
    analyses: Sequence[Analysis],
    frames: Sequence[StudyFrames],
    names: Sequence[str],
    *,
    parameters: Sequence[int] | None = None,
    at: Sequence[tuple[int, int]] = (),
) -> tuple[Trend | None, Scaling | str]:
    """Return the trends over size, and the scaling law or why there is none.

    The trends are None for studies of one size or without a target. ``parameters``: of each study, in place
    of what its files tell. ``at``: as ``fit_law`` takes it.

    Raises:
        UserError: as ``trend`` and ``fit_law`` do; or there is neither a trend nor a law.
    """
    configs = [read_configs(frame.configs) for frame in frames]
    sized = _all_sized(names, analyses, configs, parameters)
    _need_own_runs(sized, frames)
    order = sorted(range(len(sized)), key=lambda i: sized[i].parameters)
    law = _law([sized[i] for i in order], [analyses[i] for i in order], [configs[i] for i in order], at)
    if len({study.parameters for study in sized}) == 1 and not isinstance(law, str):
        return None, law
    if all(analysis.plan.target is None for analysis in analyses):
        if isinstance(law, str):
            raise UserError(f"no trend: {NO_TARGET}; and no scaling law: {law}")
        return None, law
    return trend(analyses, frames, names, parameters), law


def _law(
    sized: Sequence[SizedStudy],
    analyses: Sequence[Analysis],
    configs: Sequence[Mapping[str, RunConfig]],
    at: Sequence[tuple[int, int]],
) -> Scaling | str:
    baselines = sorted({study.baseline for study in sized})
    own_model = {
        arm.name
        for known, analysis in zip(configs, analyses, strict=True)
        for arm in analysis.others
        if _has_own_model(known, arm.name, analysis.baseline)
    }
    found: tuple[list[LossPoint], str, dict[str, str]] | str
    if len(baselines) > 1:
        found = f"the studies' baselines have several names ({', '.join(baselines)}): name one by --baseline"
    else:
        found = study_points([study.parameters for study in sized], analyses, configs, own_model)
    if isinstance(found, str):
        if at:
            raise UserError(f"--at: no scaling law: {found}")
        return found
    points, what, left_out = found
    paired = all(analysis.plan.paired_seeds for analysis in analyses)
    return fit_law(points, baselines[0], what, left_out, paired=paired, at=at)


def _need_own_runs(studies: Sequence[SizedStudy], frames: Sequence[StudyFrames]) -> None:
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


def _all_sized(
    names: Sequence[str],
    analyses: Sequence[Analysis],
    configs: Sequence[Mapping[str, RunConfig]],
    parameters: Sequence[int] | None,
) -> list[SizedStudy]:
    """Return the studies with their sizes; ``parameters`` go before what the files tell."""
    if parameters is not None and len(parameters) != len(analyses):
        raise UserError(
            f"--parameters: expected {len(analyses)} numbers, one a study in the order named, got "
            f"{len(parameters)}"
        )
    told: Sequence[int | None] = parameters or [None] * len(analyses)
    return [_sized(*each) for each in zip(names, analyses, configs, told, strict=True)]


def _sized(
    name: str, analysis: Analysis, configs: Mapping[str, RunConfig], parameters: int | None
) -> SizedStudy:
    """Return a study with the size of its baseline's model, or raise ``UserError`` where it is not known."""
    baseline = analysis.baseline
    if parameters is not None:
        return SizedStudy(
            name=name, parameters=parameters, baseline=baseline, target=target_text(analysis.plan.target)
        )
    config = configs.get(baseline)
    if config is None:
        raise UserError(
            f"{name}: the size of its model is not known: baseline '{baseline}' has no configuration here "
            "(no run of it has started, or the logs are of others): name all sizes by --parameters"
        )
    if config.trainer is not None or not config.model.is_built_in:
        what = config.trainer or config.model.hf or config.model.function
        raise UserError(
            f"{name}: the size of its model is not known: '{what}' is not built in: name all sizes by "
            "--parameters"
        )
    return SizedStudy(
        name=name, parameters=_parameters(config), baseline=baseline, target=target_text(analysis.plan.target)
    )


def _parameters(config: RunConfig) -> int:
    size = model_size(config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len)
    return size.parameters


def _has_own_model(configs: Mapping[str, RunConfig], arm: str, baseline: str) -> bool:
    """Tell whether an arm is of another model than its baseline, or of another number of parameters."""
    base, own = configs.get(baseline), configs.get(arm)
    if base is None or own is None:
        return False
    if (own.model, own.trainer) != (base.model, base.trainer):
        return True
    return base.model.is_built_in and base.trainer is None and _parameters(own) != _parameters(base)


def _line(name: str, results: Sequence[ArmResult | None], sizes: Sequence[int]) -> ArmTrend | str:
    """Return an arm's line, or why there is none."""
    if sum(result is not None for result in results) == 1:
        return "in one study only"
    known = [
        (math.log10(size), result.token_cost.log_ratio, result.alpha)
        for size, result in zip(sizes, results, strict=True)
        if result is not None and result.token_cost.log_ratio is not None
    ]
    if len(known) < 2:
        return "an estimate in one study only" if known else "no estimate in any study"
    places = [x for x, _, _ in known]
    if len(set(places)) == 1:
        return "estimates at one size only"
    middle = statistics.fmean(places)
    square = sum((x - middle) ** 2 for x in places)
    slope = combination([((x - middle) / square, log_ratio) for x, log_ratio, _ in known])
    # The strictest level, where arms could be stopped early.
    change = exponential(t_interval(slope, min(alpha for _, _, alpha in known)), minus=1.0)
    if change.note is None and None in (change.estimate, change.low, change.high):
        change = Interval(note=TOO_LARGE)
    return ArmTrend(
        name=name,
        costs=tuple(None if result is None else result.token_cost for result in results),
        per_tenfold=change,
        intercept=statistics.fmean(log_ratio.value for _, log_ratio, _ in known) - slope.value * middle,
        slope=slope.value,
    )


def cut(text: str, length: int) -> str:
    """Return a text of that many characters at most."""
    return text if len(text) <= length else text[: length - 1] + "…"
