"""Convergence: each seed thin, the mean thick, the target as a line, and the late part enlarged.

How it fails: a line that lies outside the enlarged part (an arm far off, a run that diverged) is named at its
edge with its value instead of stretching the scale until nothing else can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words import words
from ablate.results.losses import Curve, CurveGrid, common_grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.reports.findings.results import Analysis

_LATE = 0.6
_LABEL_POINTS = 12.5


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The enlarged part."""

    start: float
    end: float
    low: float
    high: float


@canvas.drawing("convergence", "Convergence")
def draw_convergence(analysis: Analysis) -> canvas.Picture | None:
    """Draw validation loss over tokens; None where no run has an evaluation after a token."""
    curves = [curve for curve in analysis.curves if len(curve.tokens)]
    if not any(curve.tokens.any() for curve in curves):
        return None
    results = sum(curve.end != "missing" for curve in curves)
    target = "" if analysis.plan.target is None else "Dashed across: the target. "
    caption = (
        f"Validation loss (nats/token) over training tokens, {words.plural(results, 'result')} of "
        f"{words.plural(len(analysis.arms), 'arm')}. Thin: each seed. Thick: the mean over seeds, drawn "
        f"as far as all runs of the arm go. {target}Right: the late part, enlarged."
    )
    caption += canvas.decay_caption(analysis.decay_begins)
    if any(curve.end == "diverged" for curve in curves):
        caption += " × marks where a run diverged."
    if any(curve.end == "missing" for curve in curves):
        caption += " Dotted: runs that are no results (yet)."
    losses = ((arm.name, arm.final_loss.estimate) for arm in analysis.arms)
    lasts = ", ".join(f"{name} {words.loss(loss)}" for name, loss in losses if loss is not None)
    alt = f"Line chart of validation loss over training tokens. Mean final losses: {lasts or 'none yet'}."
    return _draw(analysis, curves), caption, alt


def _draw(analysis: Analysis, curves: list[Curve]) -> Any:
    names = [arm.name for arm in analysis.arms]
    target = _target(analysis)
    style = canvas.looks(names, analysis.baseline)
    grids = {name: common_grid([curve for curve in curves if curve.arm == name]) for name in names}
    height = max(4.4, 1.6 + 0.2 * len(names))
    figure = canvas.sheet(
        11, height, left=0.065, right=0.772, wspace=0.17, top=1 - 0.35 / height, bottom=0.55 / height
    )
    full, zoom = figure.subplots(1, 2, width_ratios=(1, 1.15))
    window = _window(analysis, curves, grids)
    part = canvas.part_names(names)
    for i, axis in enumerate((full, zoom)):
        for curve in curves:
            _thin(axis, curve, style[curve.arm]).set_gid(part(curve.arm))
        for name in (*[n for n in names if n != analysis.baseline], analysis.baseline):
            for mean in _thick(axis, grids[name], style[name], window if axis is zoom else None):
                mean.set_gid(part(name))
        if target is not None:
            axis.axhline(
                target, color=canvas.INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1.5, gid=f"target-{i}"
            )
    largest = max(float(curve.tokens[-1]) for curve in curves)
    first = max(float(curve.loss[0]) for curve in curves)
    least = min(float(curve.loss.min()) for curve in curves)
    least = least if target is None else min(target, least)
    room = 0.05 * (first - least) or 0.05
    full.set_xlim(0, largest * 1.01)
    full.set_ylim(least - room, first + room)
    full.set_ylabel("validation loss (nats/token)")
    full.set_title("whole run")
    zoom.set_xlim(window.start, window.end)
    zoom.set_ylim(window.low, window.high)
    zoom.set_title("late part, enlarged")
    for i, axis in enumerate((full, zoom)):
        canvas.token_axis(axis, largest)
        canvas.shade_decay(axis, analysis.decay_begins)
        _crosses(axis, curves, style, part)
        if target is not None:
            _name_target(axis, target, f"target-name-{i}")
    _label_ends(zoom, curves, grids, style, window, part)
    return figure


def _thin(axis: Any, curve: Curve, look: canvas.Look) -> Any:
    dotted = curve.end == "missing"
    (line,) = axis.plot(
        curve.tokens, curve.loss, color=look.color, linewidth=0.8, alpha=0.45, zorder=2,
        linestyle=(0, (1, 1.5)) if dotted else "-",
        marker="." if len(curve.tokens) == 1 else "",  # a single point has no line
    )  # fmt: skip
    return line


def _crosses(
    axis: Any, curves: list[Curve], style: dict[str, canvas.Look], part: Callable[[str], str]
) -> None:
    """Mark where runs diverged, at the upper edge if their last loss is above it."""
    start, end = axis.get_xlim()
    top = axis.get_ylim()[1]
    for curve in curves:
        if curve.end == "diverged" and start <= curve.tokens[-1] <= end:
            axis.plot(
                curve.tokens[-1:], [min(float(curve.loss[-1]), top)], color=style[curve.arm].color,
                marker="x", markersize=6.5, markeredgewidth=1.8, linestyle="", clip_on=False, zorder=4,
                gid=part(curve.arm),
            )  # fmt: skip


def _thick(axis: Any, grid: CurveGrid, look: canvas.Look, window: _Window | None) -> list[Any]:
    """Draw the mean; markers, some six of them, only where the lines lie far enough apart: in the window."""
    if not len(grid.tokens):
        return []
    late = int(np.count_nonzero(grid.tokens >= window.start)) if window else 0
    line = look.line if window or len(grid.tokens) == 1 else look.line | {"marker": ""}
    return list(
        axis.plot(grid.tokens, grid.mean, **line, markersize=4.2, markevery=max(1, late // 6), zorder=3)
    )


def _window(analysis: Analysis, curves: list[Curve], grids: dict[str, CurveGrid]) -> _Window:
    """Choose the late part: it holds the crossings, and the arms whose ends lie near each other."""
    end = max(float(curve.tokens[-1]) for curve in curves)
    crossings = [run.tokens_to_target for arm in analysis.arms for run in arm.runs if run.tokens_to_target]
    start = min([_LATE * end, *(0.9 * tokens for tokens in crossings)])
    start = max(start, 0.2 * end)
    ends = [float(grid.mean[-1]) for grid in grids.values() if len(grid.tokens) and grid.tokens[-1] >= start]
    lasts = ends or [float(curve.loss[-1]) for curve in curves]
    near = _without_outliers(lasts)
    target = _target(analysis)
    # The target belongs in the picture, unless it lies so far off that nothing else could be told apart.
    if target is not None and (crossings or target > min(near) - max(max(near) - min(near), 0.1)):
        near.append(target)
    values = [
        value
        for curve in curves
        if curve.end != "diverged" and float(curve.loss[-1]) <= max(near)
        for value in (*curve.loss[curve.tokens >= start].tolist(), float(curve.loss[-1]))
    ]
    low, high = min([*values, min(near)]), max([*values, max(near)])
    # A steep early part must not press the ends together.
    high = min(high, max(near) + 2.0 * (max(near) - low)) if max(near) > low else high
    room = 0.05 * (high - low) or 0.02
    return _Window(start=start, end=end * 1.005 if end > start else end + 1, low=low - room, high=high + room)


def _without_outliers(values: list[float]) -> list[float]:
    """Keep the values near the lower middle, so that one arm far off does not set the scale."""
    middle = float(np.median(values))
    reach = 4 * max(middle - min(values), 0.02)
    return [value for value in values if value <= middle + reach]


def _target(analysis: Analysis) -> float | None:
    return None if analysis.plan.target is None else analysis.plan.target.val_loss


def _name_target(axis: Any, loss: float, gid: str) -> None:
    low, high = axis.get_ylim()
    if low < loss < high:
        axis.annotate(
            # Curves fall from the upper left: under the line at the left is free.
            f"target {loss:.4g}", (0.01, loss), xycoords=axis.get_yaxis_transform(), xytext=(0, -3),
            textcoords="offset points", ha="left", va="top", fontsize=8, color=canvas.INK, zorder=5,
            bbox={"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}, gid=gid,
        )  # fmt: skip


def _label_ends(
    axis: Any,
    curves: list[Curve],
    grids: dict[str, CurveGrid],
    style: dict[str, canvas.Look],
    window: _Window,
    part: Callable[[str], str],
) -> None:
    """Name every line at its right end, moved apart, with a leader from the line to its name."""
    ends: dict[str, tuple[float, float]] = {}
    for name, grid in grids.items():
        own = [curve for curve in curves if curve.arm == name]
        if len(grid.tokens) and grid.tokens[-1] >= window.start:
            ends[name] = float(grid.tokens[-1]), float(grid.mean[-1])
        elif own:
            longest = max(own, key=lambda curve: float(curve.tokens[-1]))
            ends[name] = float(longest.tokens[-1]), float(longest.loss[-1])
    height = axis.get_position().height * axis.figure.get_figheight() * 72

    def share(value: float) -> float:
        return (min(max(value, window.low), window.high) - window.low) / (window.high - window.low)

    names = sorted(ends, key=lambda name: ends[name][1])
    places = canvas.spread([share(ends[name][1]) for name in names], _LABEL_POINTS / height, 0.0, 1.0)
    for name, place in zip(names, places, strict=True):
        tokens, loss = ends[name]
        look = style[name]
        more, near = "", 1.0
        if tokens < window.start:
            more = f"  (ends at {loss:.2f})"
        else:
            near = min((tokens - window.start) / (window.end - window.start), 1.0)
            more = f"  ↑ {loss:.2f}" if loss > window.high else ""
        text = canvas.short(name, 26 - len(more)) + more
        draw = partial(axis.plot, transform=axis.transAxes, color=look.color, clip_on=False)
        draw([near, 1.025, 1.045], [share(loss), place, place], linewidth=0.8, zorder=1, gid=part(name))
        draw([1.045, 1.115], [place, place], linewidth=look.width, linestyle=look.dash, gid=part(name))
        draw([1.08], [place], marker=look.marker, markersize=4.2, gid=part(name))
        axis.annotate(
            text, (1.125, place), xycoords="axes fraction", va="center", ha="left", fontsize=8.5,
            color=canvas.INK if window.start <= tokens and loss <= window.high else canvas.FAINT,
            annotation_clip=False, gid=part(name),
        )  # fmt: skip
