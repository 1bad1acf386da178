"""Convergence: each seed thin, the mean thick, the target as a line, and the late part enlarged.

How it fails: an arm far off, or a run that diverged, may leave the enlarged part, for else nothing could be
told apart; the legend has every arm's final loss.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words.format import DASH, loss, plural
from ablate.results.losses import common_grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.results.losses import Curve

_LATE = 0.6
_TARGET = {"color": canvas.INK, "linewidth": 0.9, "linestyle": (0, (5, 3))}


@canvas.drawing("convergence", "Convergence")
def draw_convergence(analysis: Analysis) -> canvas.Picture | None:
    """Draw validation loss over tokens; None where no run has an evaluation after a token.

    Each part of an arm has an id, ``arm0-…`` on, by which the page's script hides it.
    """
    curves = [curve for curve in analysis.curves if len(curve.tokens)]
    if not any(curve.tokens.any() for curve in curves):
        return None
    caption = (
        "Validation loss (nats/token) over training tokens, "
        f"{plural(sum(curve.end != 'missing' for curve in curves), 'result')} of "
        f"{plural(len(analysis.arms), 'arm')}, each with its mean final loss. Thin: each seed; × where a run "
        "diverged; dotted: no result (yet). Thick: the mean over seeds, drawn as far as all runs of the arm "
        "go. Dashed across: the target. Right: the late part, enlarged."
    )
    style = canvas.looks((arm.name for arm in analysis.arms), analysis.baseline)
    places = {name: itertools.count() for name in style}

    def part(name: str) -> str:
        return f"arm{[arm.name for arm in analysis.arms].index(name)}-{next(places[name])}"

    figure = canvas.sheet(11, max(4.4, 1.2 + 0.2 * len(style)))
    axes = figure.subplots(1, 2, width_ratios=(1, 1.15))
    target = None if analysis.plan.target is None else analysis.plan.target.val_loss
    crossings = [run.tokens_to_target for arm in analysis.arms for run in arm.runs if run.tokens_to_target]
    end = max(float(curve.tokens[-1]) for curve in curves)
    start = max(min([_LATE * end, *(0.9 * tokens for tokens in crossings)]), 0.2 * end)
    first = max(float(curve.loss[0]) for curve in curves)
    scales = ((0.0, (_window(curves, 0.0, target)[0], 1.02 * first)), (start, _window(curves, start, target)))
    for i, (axis, (left, (low, high))) in enumerate(zip(axes, scales, strict=True)):
        for curve in curves:
            look = style[curve.arm]
            diverged = curve.end == "diverged"
            axis.plot(
                curve.tokens, np.minimum(curve.loss, high) if diverged else curve.loss, color=look["color"],
                linewidth=0.8, linestyle=(0, (1, 1.5)) if curve.end == "missing" else "-", alpha=0.45,
                marker="x" if diverged else "." * (len(curve.tokens) == 1), markevery=[-1],
                gid=part(curve.arm),
            )  # fmt: skip
        for name, look in reversed(style.items()):  # the baseline on top
            grid = common_grid([curve for curve in curves if curve.arm == name])
            if len(grid.tokens):
                every = max(1, np.count_nonzero(grid.tokens >= left) // 6)
                thick = look | {"markersize": 4.2, "markevery": every, "zorder": 3, "gid": part(name)}
                axis.plot(grid.tokens, grid.mean, **thick)
        if target is not None:
            axis.axhline(target, **_TARGET, zorder=1.5, gid=f"target-{i}")
        axis.set_xlim(left, max(end * 1.01, left + 1))
        axis.set_ylim(low, high)
        canvas.count_ticks(axis)
        axis.set_xlabel("training tokens")
        canvas.shade_decay(axis, analysis.decay_begins)
    axes[0].set_ylabel("validation loss (nats/token)")
    axes[0].set_title("whole run")
    axes[1].set_title("late part, enlarged")
    ends = {arm.name: loss(arm.final_loss.estimate) for arm in analysis.arms}
    named = sorted(ends, key=lambda name: (ends[name] == DASH, ends[name]))
    lines = {f"{ends[name]}  {name}": style[name] for name in named}
    told = canvas.legend(figure, lines | ({f"{target:.4g}  target": _TARGET} if target else {}))
    for name, line, text in zip(named, told.get_lines(), told.get_texts(), strict=False):
        line.set_gid(part(name))
        text.set_gid(part(name))
    alt = f"Line chart of validation loss over training tokens. Mean final losses: {'; '.join(lines)}."
    return figure, caption + canvas.decay_caption(analysis.decay_begins), alt


def _window(curves: Sequence[Curve], start: float, target: float | None) -> tuple[float, float]:
    """Return the losses from ``start`` on that lie near each other, with the target unless it is far off."""
    late = [curve for curve in curves if curve.end != "diverged" and curve.tokens[-1] >= start] or curves
    values = np.concatenate([curve.loss[curve.tokens >= start] for curve in late])
    low, middle, high = (float(value) for value in np.quantile(values, (0, 0.5, 1)))
    high = min(high, middle + 4 * max(middle - low, 0.02))
    if target is not None and target > low - max(high - low, 0.1):
        low, high = min(low, target), max(high, target)
    room = 0.05 * (high - low) or 0.02
    return low - room, high + room
