"""Losses over tokens, each seed and the mean, and the trials' final loss over the learning rate.

The late part of convergence is enlarged. Arms far off and diverged runs may leave that part, because the
lines would not be distinct otherwise; the legend has every arm's final loss. A trial has a cross at the top,
in place of a loss, if a run diverged in it, and a triangle if it was ended early.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words.format import DASH, loss, plural, tokens
from ablate.results.losses import common_grids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.results.losses import Curve
    from ablate.store.plan_file import TrialRecord

_LATE = 0.6
_RATE = "learning_rate"
_TARGET = {"color": canvas.INK, "linewidth": 0.9, "linestyle": (0, (5, 3))}


@canvas.drawing
def draw_convergence(analysis: Analysis) -> canvas.Picture | None:
    """Draw validation loss over tokens; None if no run has an evaluation after 0 tokens.

    Each part of the figure has the id ``armI-…`` of its arm, by which the page's script hides it.
    """
    curves = [curve for curve in analysis.curves if len(curve.tokens)]
    if not any(curve.tokens.any() for curve in curves):
        return None
    caption = (
        f"Validation loss ({analysis.plan.unit}) over training tokens, "
        f"{plural(sum(curve.end != 'missing' for curve in curves), 'result')} of "
        f"{plural(len(analysis.arms), 'arm')}, each with its mean final loss. Thin: each seed; × where a run "
        "diverged; dotted: no result (yet). Thick: the mean over seeds, drawn as far as all runs of the arm "
        "go. Dashed across: the target. Right: the late part, enlarged."
    )
    style, parts = canvas.looks_of(analysis), itertools.count()
    figure = canvas.sheet(11, max(4.4, 1.2 + 0.2 * len(style)))
    axes = figure.subplots(1, 2, width_ratios=(1, 1.15))
    target = None if analysis.plan.target is None else analysis.plan.target.val_loss
    crossings = [run.tokens_to_target for arm in analysis.arms for run in arm.runs if run.tokens_to_target]
    end = max(float(curve.tokens[-1]) for curve in curves)
    start = max(min([_LATE * end, *(0.9 * at for at in crossings)]), 0.2 * end)
    # The late part holds all final losses and the target.
    late = [curve for curve in curves if curve.end != "diverged" and curve.tokens[-1] >= start] or curves
    edges = np.concatenate([curve.loss[curve.tokens >= start] for curve in late])
    low, top = canvas.limits([*(curve.loss[-1] for curve in late), target or np.nan], edges, least=0.05)
    scales = ((0.0, 1.02 * max(float(curve.loss[0]) for curve in curves)), (start, top))
    for i, (axis, (left, high)) in enumerate(zip(axes, scales, strict=True)):
        _draw(axis, analysis, curves, parts, left, high)
        if target is not None:
            axis.axhline(target, **_TARGET, zorder=1.5, gid=f"target-{i}")
        axis.set_xlim(left, max(end * 1.01, left + 1))
        axis.set_ylim(low, high)
        canvas.token_axis(axis, analysis.tokens_per_step)
        canvas.shade_decay(axis, analysis.decay_begins)
    axes[0].set_ylabel(f"validation loss ({analysis.plan.unit})")
    axes[0].set_title("whole run")
    axes[1].set_title("late part, enlarged")
    ends = {arm.name: loss(arm.final_loss.estimate) for arm in analysis.arms}
    named = sorted(ends, key=lambda name: (ends[name] == DASH, ends[name]))
    lines = {f"{ends[name]}  {name}": style[name] for name in named}
    canvas.legend(figure, lines | ({f"{target:.4g}  target": _TARGET} if target else {}))
    return "convergence", "Convergence", figure, caption + canvas.decay_caption(analysis.decay_begins)


def _draw(
    axis: Any,
    analysis: Analysis,
    curves: Sequence[Curve],
    parts: Iterator[int],
    left: float,
    high: float,
) -> None:
    """Draw each seed thin, with diverged ones cut at ``high``, and each arm's mean thick."""
    style = canvas.looks_of(analysis)
    places = {arm.name: f"arm{i}" for i, arm in enumerate(analysis.arms)}
    for curve in curves:
        diverged = curve.end == "diverged"
        axis.plot(
            curve.tokens, np.minimum(curve.loss, high) if diverged else curve.loss,
            color=style[curve.arm]["color"], linewidth=0.8, alpha=0.45,
            linestyle=(0, (1, 1.5)) if curve.end == "missing" else "-",
            marker="x" if diverged else "." * (len(curve.tokens) == 1), markevery=[-1],
            gid=f"{places[curve.arm]}-{next(parts)}",
        )  # fmt: skip
    for name, look in reversed(style.items()):  # the baseline on top
        (grid,) = common_grids([curve for curve in curves if curve.arm == name])
        if len(grid.tokens):
            every = max(1, np.count_nonzero(grid.tokens >= left) // 6)
            thick = look | {"markersize": 4.2, "markevery": every, "zorder": 3}
            axis.plot(grid.tokens, grid.mean, **thick, gid=f"{places[name]}-{next(parts)}")


@canvas.drawing
def draw_trials(analysis: Analysis) -> canvas.Picture | None:
    """Draw the trials of a tuned study; None if no learning rate was tuned."""
    from matplotlib.ticker import LogLocator

    tuning = analysis.tuning
    if tuning is None or not tuning.plan.done or _RATE not in tuning.plan.fields:
        return None
    groups = [one for one in tuning.plan.groups if any(_has_loss(trial) for trial in one.trials)]
    if not groups:
        return None
    base = next(arm.group for arm in tuning.arms if arm.tuned == analysis.baseline)
    style = canvas.looks((group.name for group in groups), base)
    figure = canvas.sheet(8, 3.6)
    axis = figure.subplots()
    for group in groups:
        look = style[group.name] | ({} if len(tuning.plan.fields) == 1 else {"linestyle": "none"})
        known = sorted((trial.values[_RATE], trial.loss) for trial in group.trials if _has_loss(trial))
        axis.plot(*zip(*known, strict=True), **look, markersize=5)
        for trial in group.trials:
            if not _has_loss(trial):
                axis.plot(
                    trial.values[_RATE], 0.97, color=look["color"], marker="x" if trial.diverged else "v",
                    markersize=7, fillstyle="none", transform=axis.get_xaxis_transform(),
                )  # fmt: skip
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel(f"final validation loss ({analysis.plan.unit})")
    canvas.legend(figure, style)
    found = "; ".join({f"{arm.group} at {float(arm.chosen[_RATE]):g}": None for arm in tuning.arms})
    runs = max(len(trial.runs) for group in groups for trial in group.trials)
    caption = (
        "Final validation loss of the trials over the peak learning rate, "
        f"{tokens(tuning.plan.tokens)} tokens each ({plural(runs, 'run')} a point); points are joined where "
        "the rate alone varies. Crosses at the top: a run diverged; triangles: ended early. The rates found: "
        f"{found}."
    )
    return "trials", "Trials", figure, caption


def _has_loss(trial: TrialRecord) -> bool:
    """Tell whether it ended with a loss of its own: a diverged run counts with that of divergence."""
    return trial.loss is not None and not trial.diverged
