"""Token cost over the target, one small panel an arm, with its 95 % band.

How it fails: an arm without a range in common with the baseline is left out, and the caption says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.figures.canvas import (
    FAINT,
    INK,
    SHADE,
    Drawing,
    drawing_style,
    looks,
    panels,
    short,
    to_bytes,
)
from ablate.reports.statistics.losses import common_grid
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.reports.statistics.sweep import Sweep


def draw_sweep(analysis: Analysis) -> Drawing | None:
    """Draw the target sweeps; None where no arm has one."""
    sweeps = {arm.name: arm.sweep for arm in analysis.others if arm.sweep is not None}
    if not sweeps:
        return None
    falls = _falling(analysis, sweeps)
    with drawing_style("sweep"):
        svg, png = _draw(analysis, sweeps, falls)
    caption = (
        f"Token cost against {analysis.baseline} if another validation loss were the target: estimate with "
        f"its pointwise {words.coverage(analysis.rule)} band, over the losses that every run of both passes; "
        "training goes to the right. Dotted: the study's target. A cost that depends on the target is no "
        "single number. The scale follows the later half."
    )
    if falls:
        caption += (
            f" Grey ground: targets that the arm, or {analysis.baseline}, meets only while the learning rate "
            f"falls, from {words.tokens(analysis.decay_begins)} tokens on; costs there are not those of a "
            "steady rate."
        )
    without = [arm.name for arm in analysis.others if arm.name not in sweeps]
    if without:
        caption += f" No range in common, or diverged: {', '.join(without)}."
    ends = ", ".join(
        f"{name} from {words.percent(_first(sweep.cost))} to {words.percent(_first(sweep.cost[::-1]))}"
        for name, sweep in sweeps.items()
    )
    alt = f"Small line charts of token cost over the target loss. From the first to the last target: {ends}."
    return Drawing(name="sweep", title="Other targets", caption=caption, alt=alt, svg=svg, png=png)


def _falling(analysis: Analysis, sweeps: dict[str, Sweep]) -> dict[str, float]:
    """Return the loss under which a panel's targets are met, by the arm or the baseline, in the decay.

    The greater of their mean losses where the rate begins to fall. Left out: arms without such targets.
    """
    begins = analysis.decay_begins
    if begins is None:
        return {}
    at = {}
    for name in (analysis.baseline, *sweeps):
        grid = common_grid([curve for curve in analysis.curves if curve.arm == name])
        if len(grid.tokens) and grid.tokens[0] <= begins < grid.tokens[-1]:
            at[name] = float(np.interp(begins, grid.tokens, grid.mean))
    falls = {
        name: max(at[name], at[analysis.baseline])
        for name in sweeps
        if at.keys() >= {name, analysis.baseline}
    }
    return {name: loss for name, loss in falls.items() if sweeps[name].targets[-1] < loss}


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


def _first(values: Sequence[float | None]) -> float:
    return next(value for value in values if value is not None)


def _draw(analysis: Analysis, sweeps: dict[str, Sweep], falls: dict[str, float]) -> tuple[bytes, bytes]:
    style = looks([arm.name for arm in analysis.arms], analysis.baseline)
    figure, axes, columns = panels(len(sweeps))
    low, high = _limits(sweeps)
    for i, axis in enumerate(axes):
        if i >= len(sweeps):
            axis.set_axis_off()
            continue
        name, sweep = list(sweeps.items())[i]
        targets, cost, below, above = (
            100 * _numbers(column) if column is not sweep.targets else _numbers(column)
            for column in (sweep.targets, sweep.cost, sweep.low, sweep.high)
        )
        look = style[name]
        axis.axhline(0, color=INK, linewidth=0.9, zorder=1.5)
        axis.axvline(analysis.target.val_loss, color=FAINT, linewidth=0.9, linestyle=":", zorder=1.5)
        if np.isfinite(below).any():
            axis.fill_between(targets, below, above, color=look.color, alpha=0.22, linewidth=0)
        axis.plot(
            targets, cost, color=look.color, linewidth=look.width, linestyle=look.dash,
            marker=look.marker, markersize=3.8, markevery=max(1, len(targets) // 6), zorder=3,
        )  # fmt: skip
        axis.set_title(short(name, 30))
        n = f"n = {sweep.n}" if sweep.n == sweep.n_baseline else f"n = {sweep.n} against {sweep.n_baseline}"
        axis.annotate(
            n, (0.015, 0.965), xycoords="axes fraction", ha="left", va="top", fontsize=8, color=FAINT
        )
        if i + columns >= len(sweeps):
            axis.set_xlabel("target (nats/token)")
            axis.tick_params(labelbottom=True)
    axes[0].set_ylim(low, high)
    lowest, highest = axes[0].get_xlim()
    for name, axis in zip(sweeps, axes, strict=False):
        if name in falls:
            axis.axvspan(lowest, falls[name], color=SHADE, linewidth=0, zorder=0)
    axes[0].set_xlim(lowest, highest)
    axes[0].invert_xaxis()
    figure.supylabel("token cost (%)", fontsize=9, x=0.004 if columns > 1 else 0.01)
    return to_bytes(figure)


def _limits(sweeps: dict[str, Sweep]) -> tuple[float, float]:
    """Follow the later half of the lines, and of the bands what is no wider than a few times that."""
    lines, edges = np.zeros(1), np.empty(0)
    for sweep in sweeps.values():
        half = slice(len(sweep.targets) // 2, None)
        lines = np.concatenate([lines, _numbers(sweep.cost[half])])
        edges = np.concatenate([edges, _numbers(sweep.low[half]), _numbers(sweep.high[half])])
    lines, edges = lines[np.isfinite(lines)], edges[np.isfinite(edges)]
    low, high = float(lines.min()), float(lines.max())
    extent = max(high - low, 0.01)
    if len(edges):
        low = max(min(low, float(edges.min())), low - extent)
        high = min(max(high, float(edges.max())), high + extent)
    room = 0.1 * max(high - low, 0.01)
    return 100 * (low - room), 100 * (high + 2 * room)
