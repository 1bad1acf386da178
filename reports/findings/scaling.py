"""Which losses of several studies go into the scaling law: final ones, or readings at a constant rate.

A final loss belongs to its budget, whatever the schedule, as long as all studies have schedules of one
shape. Where the learning rate is known to be constant, an evaluation is the final loss of a run of that
budget, to the bit: where final losses are too few to tell size from budget, runs are read at five token
counts, from the end of the constant rate down to a quarter of it. Then a run has several losses, and the
bootstrap moves them together.

How it fails: studies whose losses do not belong together give a sentence that says why. ``UserError`` where a
size and budget is asked for, and the losses cannot carry a law over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ablate.base.errors import UserError
from ablate.reports.read.losses import LossPoint
from ablate.reports.statistics.law_fit import CROSSED, DISTINCT
from ablate.reports.statistics.losses import common_grid
from ablate.reports.statistics.scaling import Scaling, fit_scaling
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.statistics.losses import Curve
    from ablate.run.config import RunConfig, TrainingConfig

FINAL = "final losses"
READ = "readings at a constant learning rate, each the final loss of a run of so many tokens"
_READINGS, _STEP = 5, 2**0.5
_SLACK = 0.005
"""Of the budget, that an evaluation may lie behind the start of the decay: steps are whole."""
_WHOLE = 0.98
"""Of its budget, that a run's last evaluation must have."""


def fit_law(
    points: Sequence[LossPoint],
    baseline: str,
    what: str,
    left_out: Mapping[str, str],
    *,
    paired: bool,
    at: Sequence[tuple[int, int]],
) -> Scaling | str:
    """Fit the scaling law, or say what is missing for one.

    Raises:
        UserError: ``at`` asks for a size and budget, and there is no law over both.
    """
    found = fit_scaling(points, baseline, paired=paired, at=at)
    if at and (isinstance(found, str) or len(found.axes) < 2):
        why = found if isinstance(found, str) else found.why_not
        raise UserError(f"--at: these losses cannot carry a law over sizes and budgets: {why}")
    if isinstance(found, str):
        return found
    return replace(found, of=what, left_out={**left_out, **found.left_out})


def law_of_table(
    points: Sequence[LossPoint],
    left_out: Mapping[str, str],
    name: str,
    baseline: str,
    *,
    paired: bool,
    at: Sequence[tuple[int, int]],
) -> Scaling:
    """Fit the law to a table of final losses.

    Raises:
        UserError: no such arm, or losses that cannot carry a law.
    """
    arms = list(dict.fromkeys(point.arm for point in points))
    if baseline not in arms:
        why = f" ({left_out[baseline]})" if baseline in left_out else ""
        raise UserError(f"--baseline: no arm '{baseline}' in {name}{why} (arms: {', '.join(arms)})")
    several = len({(point.arm, point.parameters, point.run) for point in points}) < len(points)
    what = f"{'losses of runs with several budgets' if several else FINAL} in {name}"
    found = fit_law(points, baseline, what, left_out, paired=paired, at=at)
    if isinstance(found, str):
        raise UserError(f"--losses: no scaling law: {found}")
    return found


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A study's size, and its arms that can be used, with their training and their curves."""

    size: int
    training: Mapping[str, TrainingConfig]
    curves: Sequence[Curve]
    budgets: Mapping[str, int]


def study_points(
    sizes: Sequence[int],
    analyses: Sequence[Analysis],
    configs: Sequence[Mapping[str, RunConfig]],
    own_model: Collection[str],
) -> tuple[list[LossPoint], str, dict[str, str]] | str:
    """Return the losses, what they are, and what is left out with the reason; or why there are none.

    ``own_model``: arms to leave out, because their model is not the baseline's.
    """
    left_out: dict[str, str] = {}
    sides = []
    for size, analysis, known in zip(sizes, analyses, configs, strict=True):
        study = analysis.plan.study
        if analysis.plan.imported:
            return (
                f"the logs of {study} do not tell its budgets and schedule (give final losses as a table: "
                "--losses FILE)"
            )
        if own := next((one.trainer for one in known.values() if one.trainer), None):
            return f"{study}: what schedule '{own}' follows is not known"
        found = {arm.name: _unfit(arm) for arm in analysis.arms if arm.name not in own_model}
        left_out |= {f"{name} in {study}": why for name, why in found.items() if why}
        fit = {name for name, why in found.items() if why is None and name in known}
        finished = [run for arm in analysis.arms for run in arm.runs if run.state == "finished"]
        sides.append(
            _Side(
                size=size,
                training={name: known[name].training for name in fit},
                curves=[curve for curve in analysis.curves if curve.arm in fit and len(curve.tokens)],
                budgets={run.run_id: run.budget for run in finished},
            )
        )
    shapes = {_shape(training) for side in sides for training in side.training.values()}
    final = _once(point for side in sides for point in _final(side))
    cells = {(point.parameters, point.tokens) for point in final}
    distinct = min(len({size for size, _ in cells}), len({budget for _, budget in cells}))
    if len(shapes) == 1 and distinct >= DISTINCT and len(cells) >= CROSSED:
        return final, FINAL, left_out
    if {shape[0] for shape in shapes} <= {"constant", "wsd"}:
        return _once(point for side in sides for point in _read(side)), READ, left_out
    if len(shapes) == 1:
        return final, FINAL, left_out
    return "the learning rates follow schedules of several shapes, and their losses are no one law's"


def _unfit(arm: ArmResult) -> str | None:
    if arm.diverged:
        return f"{arm.diverged} of {arm.n} runs diverged"
    return None if arm.stopped is None else "stopped early, by its results"


def _shape(training: TrainingConfig) -> tuple[object, ...]:
    """Return what must be alike for final losses to be one law's: schedule, depth and share of the decay."""
    if training.schedule == "constant":
        return ("constant",)
    begins = decay_begins(training)
    share = None if begins is None else round(1 - begins / training.tokens, 2)
    return (training.schedule, training.final_lr_ratio, share)


def _final(side: _Side) -> Iterator[LossPoint]:
    """Yield the last losses of the runs that used their whole budget."""
    for curve in side.curves:
        budget = side.budgets.get(curve.run_id)
        if budget and curve.tokens[-1] >= _WHOLE * budget:
            yield _point(side, curve, budget, -1)


def _read(side: _Side) -> Iterator[LossPoint]:
    """Yield the losses of runs with a result at five places of the constant rate, the same of all arms."""
    known = common_grid(side.curves).tokens
    for training in side.training.values():
        ends = decay_begins(training)
        last = training.tokens if ends is None else ends
        known = known[(known > training.warmup_tokens) & (known <= last + _SLACK * training.tokens)]
    if not len(known):
        return
    wanted = known[-1] / _STEP ** np.arange(_READINGS)
    places = {int(known[np.abs(np.log(known / place)).argmin()]) for place in wanted}
    for curve in side.curves:
        for at in sorted(places) if curve.end != "missing" else ():
            yield _point(side, curve, at, int(np.searchsorted(curve.tokens, at)))


def _point(side: _Side, curve: Curve, tokens: int, place: int) -> LossPoint:
    return LossPoint(
        arm=curve.arm,
        parameters=side.size,
        tokens=tokens,
        seed=curve.seed,
        loss=float(curve.loss[place]),
        run=curve.run_id,
    )


def _once(points: Iterable[LossPoint]) -> list[LossPoint]:
    """Count a seed once where two studies have it at one size and budget: it is the same run."""
    return list({(one.arm, one.parameters, one.tokens, one.seed): one for one in points}.values())
