"""Forest plot: the token cost of each arm with its interval, on one scale, with n and how its runs ended.

How it fails: an interval that runs out of the scale ends in an arrow; an arm without an estimate has its
bound as an open triangle, or a word where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.figures.canvas import (
    FAINT,
    INK,
    SHADE,
    Drawing,
    Look,
    drawing_style,
    looks,
    short,
    to_bytes,
)
from ablate.reports.findings.ends import target_text
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis, ArmResult


def draw_forest(analysis: Analysis) -> Drawing | None:
    """Draw the token costs; None where no arm has an estimate or a bound."""
    if all(arm.token_cost.kind == "none" for arm in analysis.others):
        return None
    with drawing_style("forest"):
        svg, png = _draw(analysis)
    caption = (
        f"Token cost against {analysis.baseline}: tokens to {target_text(analysis.target)} over the "
        f"baseline's, minus one. Points: estimates; bars: {words.coverage(analysis.rule)} intervals; "
        "open triangles: bounds, where not every run reached the target (no estimate). n: results of the "
        "arm, and how they ended."
    )
    if analysis.resolution.share is not None:
        share = words.share(analysis.resolution.share)
        caption += (
            f" Grey band: one evaluation interval ({share}), below which a cost rests on interpolation."
        )
    rows = "; ".join(f"{arm.name} {words.cost(arm.token_cost)}" for arm in analysis.others)
    alt = f"Forest plot of token costs with {words.coverage(analysis.rule)} intervals. {rows}."
    return Drawing(name="token-cost", title="Token cost", caption=caption, alt=alt, svg=svg, png=png)


def _draw(analysis: Analysis) -> tuple[bytes, bytes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    arms = analysis.others
    style = looks([arm.name for arm in analysis.arms], analysis.baseline)
    height = 1.15 + 0.36 * len(arms)
    figure = Figure(figsize=(11, height))
    axis = figure.subplots()
    figure.subplots_adjust(left=0.215, right=0.655, top=1 - 0.42 / height, bottom=0.58 / height)
    low, high = _limits(arms)
    axis.set_xlim(low, high)
    axis.set_ylim(len(arms) - 0.4, -0.6)
    share = analysis.resolution.share
    if share is not None:
        axis.axvspan(max(-share, low), min(share, high), color=SHADE, zorder=0, linewidth=0)
    axis.axvline(0, color=INK, linewidth=1, zorder=1)
    for row, arm in enumerate(arms):
        _row(axis, row, arm, style[arm.name], (low, high))
    axis.set_yticks([])
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.percent(value).replace(".0", "")))
    axis.set_xlabel(f"token cost against {short(analysis.baseline)}")
    for x, text in ((1.03, "token cost [95\u00a0%]"), (1.47, "n"), (1.56, "hit / cens. / div.")):
        axis.annotate(
            text,
            (x, 1),
            xycoords="axes fraction",
            xytext=(0, 6),
            textcoords="offset points",
            va="bottom",
            fontsize=8.5,
            color=FAINT,
            annotation_clip=False,
        )
    return to_bytes(figure)


def _row(axis: Any, row: int, arm: ArmResult, look: Look, limits: tuple[float, float]) -> None:
    cost = arm.token_cost
    low, high = limits
    if cost.estimate is not None:
        if cost.low is not None and cost.high is not None:
            axis.plot([max(cost.low, low), min(cost.high, high)], [row, row], color=look.color, linewidth=2.2)
            for edge, beyond, marker in ((low, cost.low < low, "<"), (high, cost.high > high, ">")):
                if beyond:
                    axis.plot([edge], [row], color=look.color, marker=marker, markersize=6, clip_on=False)
        axis.plot([cost.estimate], [row], color=look.color, marker=look.marker, markersize=7)
    else:
        for bound, marker in ((cost.low, ">"), (cost.high, "<")):
            if bound is not None:
                axis.plot(
                    [min(max(bound, low), high)],
                    [row],
                    color=look.color,
                    marker=marker,
                    markersize=8,
                    markerfacecolor="none",
                    markeredgewidth=1.6,
                    clip_on=False,
                )
    text = words.cost(cost) if cost.kind != "none" else "no estimate"
    for x, align, words_, color in (
        (-0.02, "right", short(arm.name), INK),
        (1.03, "left", text, INK),
        (1.47, "left", str(arm.n), INK),
        (1.56, "left", words.ends(arm), INK),
    ):
        axis.annotate(
            words_,
            (x, row),
            xycoords=axis.get_yaxis_transform(),
            ha=align,
            va="center",
            fontsize=8.8,
            color=color,
            annotation_clip=False,
        )


def _limits(arms: tuple[ArmResult, ...]) -> tuple[float, float]:
    """Hold every estimate and bound; of the intervals no more than a few times their range."""
    points = [0.0]
    edges = [0.0]
    for arm in arms:
        cost = arm.token_cost
        if cost.estimate is not None:
            points.append(cost.estimate)
            edges.extend(value for value in (cost.low, cost.high) if value is not None)
        else:
            points.extend(value for value in (cost.low, cost.high) if value is not None)
    extent = max(max(points) - min(points), 0.05)
    low = max(min(*points, *edges), min(points) - 1.2 * extent)
    high = min(max(*points, *edges), max(points) + 1.2 * extent)
    room = 0.06 * (high - low) or 0.05
    return low - room, high + room
