"""Losses over tokens, each seed and the mean, and the trials' final loss over the learning rate.

The late part of convergence is enlarged. Arms far off and diverged runs may leave that part, because the
lines would not be distinct otherwise; the legend has every arm's final loss. A trial has a cross at the top,
in place of a loss, if a run diverged in it, and a triangle if it was ended early.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.colours import INK
from ablate.reports.figures import canvas
from ablate.reports.words.format import loss, plural, tokens
from ablate.results.losses import common_grids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.losses import Curve
    from ablate.store.plan_file import TrialRecord

_LATE = 0.6
_RATE = "learning_rate"
_TARGET = {"color": INK, "linewidth": 0.9, "linestyle": (0, (5, 3))}


@canvas.drawing
def draw_convergence(analysis: Analysis) -> canvas.Picture | None:
    """Draw validation loss over tokens; None if no run has an evaluation after 0 tokens.

    Each part of the figure has the id ``armI-…`` of its arm, by which the page's script hides it.
    """
    curves = [curve for curve in analysis.curves if len(curve.tokens)]
    end = max((float(curve.tokens[-1]) for curve in curves), default=0.0)
    if end == 0:
        return None
    looks = canvas.looks_of(analysis)
    target = None if analysis.plan.target is None else analysis.plan.target.val_loss
    figure = canvas.sheet(canvas.WIDTH, 3.6)
    whole, late = figure.subplots(1, 2, width_ratios=(1, 1.15))
    whole.set_ylabel(f"validation loss ({analysis.plan.unit})")
    whole.set_title("whole run")
    late.set_title("late part, enlarged")
    numbers = itertools.count()
    start = _late_start(analysis, end)
    low, high = _late_scale(curves, start, target)
    highest = 1.02 * max(float(curve.loss[0]) for curve in curves)
    for i, (axis, left, top) in enumerate([(whole, 0.0, highest), (late, start, high)]):
        _draw_arms(axis, analysis, curves, (left, top), numbers)
        if target is not None:
            axis.axhline(target, **_TARGET, zorder=1.5, gid=f"target-{i}")
        axis.set_xlim(left, max(end * 1.01, left + 1))
        axis.set_ylim(low, top)
        canvas.token_axis(axis, analysis.tokens_per_step)
        canvas.shade_decay(axis, analysis.decay_begins)
    lines = {}
    for arm in sorted(analysis.arms, key=_final_loss):
        lines[f"{loss(arm.final_loss.estimate)}  {arm.name}"] = looks[arm.name]
    if target is not None:
        lines[f"{target:.4g}  target"] = _TARGET
    canvas.legend(figure, lines)
    results = sum(curve.end != "missing" for curve in curves)
    caption = (
        f"Validation loss ({analysis.plan.unit}) over training tokens, {plural(results, 'result')} of "
        f"{plural(len(analysis.arms), 'arm')}, each with its mean final loss. Thin: each seed; × where a run "
        "diverged; dotted: no result (yet). Thick: the mean over seeds, drawn as far as all runs of the arm "
        "go. Dashed across: the target. Right: the late part, enlarged."
    )
    caption += canvas.decay_caption(analysis.decay_begins)
    return "convergence", "Convergence", figure, caption


def _final_loss(arm: ArmResult) -> float:
    if arm.final_loss.estimate is None:
        return math.inf
    return round(arm.final_loss.estimate, 4)


def _late_start(analysis: Analysis, end: float) -> float:
    """Choose where the late part begins: before every run reaches the target."""
    places = [_LATE * end]
    for arm in analysis.arms:
        places += [
            0.9 * run.tokens_to_target for run in arm.runs if run.tokens_to_target
        ]
    return max(min(places), 0.2 * end)


def _late_scale(
    curves: Sequence[Curve], start: float, target: float | None
) -> tuple[float, float]:
    """Choose the ends of a scale that holds the target and all final losses of the late part."""
    late = [
        curve
        for curve in curves
        if curve.end != "diverged" and curve.tokens[-1] >= start
    ]
    points = [] if target is None else [target]
    edges: list[float] = []
    for curve in late or curves:
        points.append(curve.loss[-1])
        edges += [*curve.loss[curve.tokens >= start]]
    return canvas.limits(points, edges, 0.05)


def _draw_arms(
    axis: Any,
    analysis: Analysis,
    curves: Sequence[Curve],
    corner: tuple[float, float],
    numbers: Iterator[int],
) -> None:
    """Draw each seed thin, and each arm's mean thick, the baseline on top.

    ``corner``: the left and the upper end of the axes. Diverged seeds are cut there.
    """
    left, top = corner
    looks = canvas.looks_of(analysis)
    ids = {arm.name: f"arm{i}" for i, arm in enumerate(analysis.arms)}
    for curve in curves:
        marker = "." if len(curve.tokens) == 1 else ""
        losses = curve.loss
        if curve.end == "diverged":
            marker = "x"
            losses = np.minimum(losses, top)
        axis.plot(
            curve.tokens,
            losses,
            color=looks[curve.arm]["color"],
            linewidth=0.8,
            alpha=0.45,
            linestyle=(0, (1, 1.5)) if curve.end == "missing" else "-",
            marker=marker,
            markevery=[-1],
            gid=f"{ids[curve.arm]}-{next(numbers)}",
        )
    for name, look in reversed(looks.items()):
        (grid,) = common_grids([curve for curve in curves if curve.arm == name])
        if len(grid.tokens):
            axis.plot(
                grid.tokens,
                grid.mean,
                **look,
                markersize=4.2,
                markevery=max(1, np.count_nonzero(grid.tokens >= left) // 6),
                zorder=3,
                gid=f"{ids[name]}-{next(numbers)}",
            )


@canvas.drawing
def draw_trials(analysis: Analysis) -> canvas.Picture | None:
    """Draw the trials of a tuned study; None if no learning rate was tuned."""
    from matplotlib.ticker import LogLocator

    tuning = analysis.tuning
    if tuning is None or not tuning.plan.done or _RATE not in tuning.plan.fields:
        return None
    groups = [
        group for group in tuning.plan.groups if any(map(_has_loss, group.trials))
    ]
    if not groups:
        return None
    base = next(arm.group for arm in tuning.arms if arm.tuned == analysis.baseline)
    looks = canvas.looks((group.name for group in groups), base)
    figure = canvas.sheet(canvas.WIDTH, 3.6)
    axis = figure.subplots()
    for group in groups:
        look = looks[group.name]
        if len(tuning.plan.fields) > 1:
            look = look | {"linestyle": "none"}
        known = filter(_has_loss, group.trials)
        points = sorted((trial.values[_RATE], trial.loss) for trial in known)
        axis.plot(*zip(*points, strict=True), **look, markersize=5)
        for trial in itertools.filterfalse(_has_loss, group.trials):
            axis.plot(
                trial.values[_RATE],
                0.97,
                color=look["color"],
                marker="x" if trial.diverged else "v",
                markersize=7,
                fillstyle="none",
                transform=axis.get_xaxis_transform(),
            )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel(f"final validation loss ({analysis.plan.unit})")
    canvas.legend(figure, looks)
    rates = dict.fromkeys(
        f"{arm.group} at {float(arm.chosen[_RATE]):g}" for arm in tuning.arms
    )
    runs = max(len(trial.runs) for group in groups for trial in group.trials)
    caption = (
        "Final validation loss of the trials over the peak learning rate, "
        f"{tokens(tuning.plan.tokens)} tokens each ({plural(runs, 'run')} a point); points are joined where "
        "the rate alone varies. Crosses at the top: a run diverged; triangles: ended early. The rates found: "
        f"{'; '.join(rates)}."
    )
    return "trials", "Trials", figure, caption


def _has_loss(trial: TrialRecord) -> bool:
    """Tell whether it ended with a loss of its own: a diverged run counts with that of divergence."""
    return trial.loss is not None and not trial.diverged
