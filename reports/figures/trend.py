"""Token cost over parameters or budget: one small panel an arm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words import words
from ablate.reports.words.compare import place_text
from ablate.results.cost import Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.trend import Line, Trend

_ROOM = 0.16
"""Beside the points, of the distance between the outermost."""
_LABEL = 0.23
"""Of the width of a panel, for the label of a size."""
_GAP = 0.035
"""Of the width of a panel, between the error bars of studies of nearly one size."""


@canvas.drawing("trend", "Token cost over size or budget")
def draw_trend(found: Trend) -> canvas.Picture | None:
    """Draw the token cost of every arm that has a line; None without one."""
    lines = {arm.name: arm.cost for arm in found.arms if arm.cost is not None}
    if not lines:
        return None
    low, high, cut = _limits(found, lines)
    counts = dict.fromkeys(words.counts(cost) for line in lines.values() for _, cost in _known(line))
    what = "number of parameters" if found.axis == "parameters" else "number of training tokens"
    caption = (
        f"Token cost over {found.against} against the {what}, each point a study; bars: "
        f"{words.coverage(*found.rules)} intervals, {', '.join(counts)} a point. Thin: the straight line of "
        "log (1 + token cost) over the logarithm of that number by least squares; above it its change for "
        "each tenfold. It is an average slope: its interval does not tell whether the line is straight."
    )
    if cut:
        caption += " The scale follows the points: longer bars are cut."
    rows = "; ".join(_text(found, name, line) for name, line in lines.items())
    alt = f"Small charts of token cost over the {what}, one an arm. {rows}."
    return _draw(found, lines, low, high), caption, alt


def _known(line: Line) -> list[tuple[int, Any]]:
    """Return the places and costs of the studies that have an estimate."""
    found = ((i, one) for i, one in enumerate(line.points) if isinstance(one, Cost))
    return [(i, cost) for i, cost in found if cost.log_ratio is not None]


def _text(found: Trend, name: str, line: Line) -> str:
    points = ", ".join(f"{words.cost(cost)} at {place_text(found, i)}" for i, cost in _known(line))
    return f"{name}: {points}; change per tenfold {words.percent_interval(line.change)}"


def _draw(found: Trend, lines: dict[str, Line], low: float, high: float) -> Any:
    from matplotlib.ticker import FixedLocator

    style = canvas.looks(["", *lines], "")
    places = np.log10(found.places)
    extent = places[-1] - places[0]
    left, right = places[0] - _ROOM * extent, places[-1] + _ROOM * extent
    moved = canvas.spread(places.tolist(), _GAP * (right - left), left, right)
    figure, axes, lowest = canvas.panels(list(lines), "token cost (%)")
    for axis, (name, fitted) in zip(axes, lines.items(), strict=True):
        look = style[name]
        known = _known(fitted)
        axis.axhline(0, color=canvas.INK, linewidth=0.9, zorder=1.5)
        along = np.linspace(places[known[0][0]], places[known[-1][0]], 40)
        line = 100 * np.expm1(fitted.intercept + fitted.slope * along)
        axis.plot(along, line, color=look.color, linewidth=0.9, linestyle=look.dash, zorder=2)
        for at, cost in known:
            if cost.low is not None and cost.high is not None:
                axis.plot([moved[at]] * 2, [100 * cost.low, 100 * cost.high], color=look.color, linewidth=1.8)
            axis.plot([moved[at]], [100 * cost.estimate], color=look.color, marker=look.marker, markersize=5)
        canvas.note(axis, f"{words.percent_interval(fitted.change)} per tenfold", 0.02, 0.975, ha="left")
    for axis in lowest:
        axis.set_xlabel("parameters" if found.axis == "parameters" else "training tokens")
    axes[0].set_xlim(left, right)
    axes[0].set_ylim(low, high)
    axes[0].xaxis.set_major_locator(FixedLocator(_ticks(places.tolist(), right - left)))
    tell = words.parameters if found.axis == "parameters" else words.tokens
    axes[0].xaxis.set_major_formatter(lambda x, _: tell(round(10**x)))
    axes[0].locator_params("y", nbins=6)
    return figure


def _ticks(places: Sequence[float], width: float) -> list[float]:
    """Return the sizes that have room for their label: the outermost two, and of the others what fits."""
    ticks = [places[0], places[-1]]
    for place in places:
        if min(abs(place - tick) for tick in ticks) >= _LABEL * width:
            ticks.append(place)
    return ticks


def _limits(found: Trend, lines: dict[str, Line]) -> tuple[float, float, bool]:
    """Follow points and lines in %, and bars no longer than a few times that; whether any is cut."""
    costs = [cost for line in lines.values() for _, cost in _known(line)]
    ends = [
        math.expm1(line.intercept + line.slope * math.log10(found.places[i]))
        for line in lines.values()
        for i, _ in _known(line)
    ]
    points = [0.0, *ends, *(cost.estimate for cost in costs)]
    edges = [edge for cost in costs for edge in (cost.low, cost.high) if edge is not None]
    low, high = canvas.limits(points, edges, most=1.5, least=0.01)
    cut = any(not low <= edge <= high for edge in edges)
    room = 0.08 * max(high - low, 0.01)
    # Above the points stands what they come to.
    return 100 * (low - room), 100 * (high + 3 * room), cut
