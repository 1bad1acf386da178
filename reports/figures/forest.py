"""Forest plot: token costs with their intervals on one scale.

How it fails: an interval much longer than the others is cut at the scale; an arm without an estimate has its
bound as an open triangle, or a dash if it has no bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures import canvas
from ablate.reports.findings.compare import target_text
from ablate.reports.words.format import cost, coverage, ends, forked, share

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis


@canvas.drawing("token-cost", "Token cost")
def draw_forest(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token costs, a row for each arm; None if no arm has an estimate or a bound."""
    arms = analysis.others
    if all(arm.token_cost.kind == "none" for arm in arms):
        return None
    style = canvas.looks_of(analysis)
    figure = canvas.sheet(11, 1.2 + 0.4 * len(arms))
    axis = figure.subplots()
    axis.set_ylim(len(arms) - 0.4, -1.4)
    axis.set_yticks(range(len(arms)), [canvas.short(arm.name) for arm in arms])
    axis.grid(visible=False, axis="y")
    axis.axvline(0, color=canvas.INK, linewidth=1, zorder=1)
    points, edges = [0.0], []
    for row, arm in enumerate(arms):
        found, color = arm.token_cost, style[arm.name]["color"]
        bounds = [value for value in (found.low, found.high) if value is not None]
        if found.estimate is not None:
            axis.plot(found.estimate, row, style[arm.name]["marker"], color=color, markersize=7)
            axis.plot(bounds, [row] * len(bounds), color=color, linewidth=2.2)
            points.append(found.estimate)
            edges += bounds
        elif bounds:
            marker = "<" if found.low is None else ">"
            axis.plot(bounds[0], row, marker, color=color, markersize=8, fillstyle="none")
            points.append(bounds[0])
    axis.set_xlim(canvas.limits(points, edges, least=0.05))
    axis.set_xlabel(f"token cost against {canvas.short(analysis.baseline)}")
    axis.locator_params("x", nbins=7)
    canvas.percent_ticks(axis.xaxis)
    beside = axis.secondary_yaxis("right")
    texts = [f"{cost(arm.token_cost)}   {arm.n} ({ends(arm)})" for arm in arms]
    beside.set_yticks(range(-1, len(arms)), ["token cost [95\u00a0%]   n (hit / cens. / div.)", *texts])
    for side in (axis, beside):
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right"]].set_visible(False)
    band = analysis.resolution.share_of_tokens_to_target
    if band is not None:
        axis.axvspan(-band, band, color=canvas.SHADE, zorder=0, linewidth=0)
    caption = (
        f"Token cost against {analysis.baseline}: tokens to {target_text(analysis.plan.target)} over the "
        f"baseline's, minus one. Points: estimates; bars: {coverage(analysis.plan.stop)} intervals; "
        "open triangles: bounds, where not every run reached the target (no estimate). n: results of the "
        f"arm, and how they ended. Grey band: one evaluation interval ({share(band)}), below which a cost "
        f"rests on interpolation. The scale follows the points: longer bars are cut.{forked(arms)}"
    )
    return figure, caption
