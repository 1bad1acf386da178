"""Forest plots: token costs with their intervals on one scale, of the arms of one study or of two.

How it fails: an interval much longer than the others is cut at the scale; an arm without an estimate has its
bound as an open triangle, or a dash if it has no bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.figures import canvas
from ablate.reports.findings.compare import target_text
from ablate.reports.words.format import cost, coverage, ends, forked, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.results import Analysis
    from ablate.results.cost import Cost


@canvas.drawing("token-cost", "Token cost")
def draw_forest(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token costs; None if no arm has an estimate or a bound."""
    arms = analysis.others
    if all(arm.token_cost.kind == "none" for arm in arms):
        return None
    style = canvas.looks_of(analysis)
    figure, axis = _draw(
        [arm.name for arm in arms],
        [
            (row, arm.token_cost, style[arm.name], f"{cost(arm.token_cost)}   {arm.n} ({ends(arm)})")
            for row, arm in enumerate(arms)
        ],
        "token cost [95\u00a0%]   n (hit / cens. / div.)",
    )
    axis.set_xlabel(f"token cost against {canvas.short(analysis.baseline)}")
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


@canvas.drawing("compare", "Token cost in both studies")
def draw_comparison(found: Comparison) -> canvas.Picture | None:
    """Draw the arms whose cost has an estimate in either study, both studies in a pair; None without one."""
    arms = [
        (arm.name, arm.cost.points)
        for arm in found.arms
        if arm.cost is not None and any(one and one.estimate is not None for one in arm.cost.points)
    ]
    if not arms:
        return None
    names = [study.name for study in found.studies]
    style = canvas.looks(("", *names))
    figure, axis = _draw(
        [name for name, _ in arms],
        [
            (row + offset, one, style[name], cost(one))
            for row, (_, points) in enumerate(arms)
            for offset, name, one in zip((-0.16, 0.16), names, points, strict=True)
        ],
        f"token cost [{coverage(*found.rules)}]",
    )
    axis.set_xlabel("token cost against the study's own baseline")
    canvas.legend(figure, {name: style[name] for name in names})
    caption = (
        f"Token cost of each arm, in {names[0]} (squares, above) and {names[1]} (triangles), each "
        f"against its own study's baseline; bars: {coverage(*found.rules)} intervals."
    )
    return figure, caption


def _draw(
    names: Sequence[str], marks: Sequence[tuple[float, Cost | None, canvas.Look, str]], head: str
) -> tuple[Any, Any]:
    """Draw a row for each name.

    ``marks``: the row, which may be fractional; the cost; its look; the text beside it, under the ``head``.
    """
    figure = canvas.sheet(11, 1.2 + 0.2 * (len(names) + len(marks)))
    axis = figure.subplots()
    axis.set_ylim(len(names) - 0.4, -1.4)
    axis.set_yticks(range(len(names)), [canvas.short(name) for name in names])
    axis.grid(visible=False, axis="y")
    axis.axvline(0, color=canvas.INK, linewidth=1, zorder=1)
    points, edges = [0.0], []
    for row, one, look, _ in marks:
        bounds = [] if one is None else [value for value in (one.low, one.high) if value is not None]
        if one is not None and one.estimate is not None:
            axis.plot(one.estimate, row, color=look["color"], marker=look["marker"], markersize=7)
            axis.plot(bounds, [row] * len(bounds), color=look["color"], linewidth=2.2)
            points.append(one.estimate)
            edges += bounds
        elif one is not None and bounds:
            marker = "<" if one.low is None else ">"
            axis.plot(bounds[0], row, color=look["color"], marker=marker, markersize=8, fillstyle="none")
            points.append(bounds[0])
    axis.set_xlim(canvas.limits(points, edges, least=0.05))
    axis.locator_params("x", nbins=7)
    canvas.percent_ticks(axis.xaxis)
    beside = axis.secondary_yaxis("right")
    beside.set_yticks([-1, *(row for row, *_ in marks)], [head, *(text for *_, text in marks)])
    for side in (axis, beside):
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right"]].set_visible(False)
    return figure, axis
