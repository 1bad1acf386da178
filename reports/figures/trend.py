"""Token cost over parameters, and loss gaps over budgets with the scaling law: one small panel an arm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.statistics.law_fit import Key
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.trend import ArmTrend, Trend
    from ablate.reports.statistics.scaling import Scaling

_ROOM = 0.16
"""Beside the points, of the distance between the outermost."""
_LABEL = 0.23
"""Of the width of a panel, for the label of a size."""
_GAP = 0.035
"""Of the width of a panel, between the error bars of studies of nearly one size."""


@canvas.drawing("trend", "Token cost over parameters")
def draw_trend(found: Trend) -> canvas.Picture:
    """Draw every arm that has a trend."""
    low, high, cut = _limits(found)
    counts = dict.fromkeys(words.counts(cost) for arm in found.arms for _, cost in _known(arm))
    caption = (
        f"Token cost over {found.against} against the number of parameters, each point a study; bars: "
        f"{words.coverage(*found.rules)} intervals, {', '.join(counts)} a point. Thin: the straight line of "
        "log (1 + token cost) over log parameters by least squares; above it its change for each tenfold. It "
        "is an average slope: its interval does not tell whether the line is straight."
    )
    if cut:
        caption += " The scale follows the points: longer bars are cut."
    rows = "; ".join(_text(found, arm) for arm in found.arms)
    alt = f"Small charts of token cost over the number of parameters, one an arm. {rows}."
    return _draw(found, low, high), caption, alt


def _known(arm: ArmTrend) -> list[tuple[int, Any]]:
    """Return the places and costs of the studies that have an estimate."""
    return [(i, cost) for i, cost in enumerate(arm.costs) if cost is not None and cost.log_ratio is not None]


def _text(found: Trend, arm: ArmTrend) -> str:
    points = ", ".join(
        f"{words.cost(cost)} at {words.parameters(found.studies[i].parameters)}" for i, cost in _known(arm)
    )
    return f"{arm.name}: {points}; change per tenfold {words.percent_interval(arm.per_tenfold)}"


def _draw(found: Trend, low: float, high: float) -> Any:
    from matplotlib.ticker import FixedLocator

    style = canvas.looks(["", *(arm.name for arm in found.arms)], "")
    sizes = [study.parameters for study in found.studies]
    places = np.log10(sizes)
    extent = places[-1] - places[0]
    left, right = places[0] - _ROOM * extent, places[-1] + _ROOM * extent
    moved = canvas.spread(places.tolist(), _GAP * (right - left), left, right)
    figure, axes, lowest = canvas.panels([arm.name for arm in found.arms], "token cost (%)")
    for axis, arm in zip(axes, found.arms, strict=True):
        look = style[arm.name]
        known = _known(arm)
        axis.axhline(0, color=canvas.INK, linewidth=0.9, zorder=1.5)
        along = np.linspace(places[known[0][0]], places[known[-1][0]], 40)
        line = 100 * np.expm1(arm.intercept + arm.slope * along)
        axis.plot(along, line, color=look.color, linewidth=0.9, linestyle=look.dash, zorder=2)
        for at, cost in known:
            if cost.low is not None and cost.high is not None:
                axis.plot([moved[at]] * 2, [100 * cost.low, 100 * cost.high], color=look.color, linewidth=1.8)
            axis.plot([moved[at]], [100 * cost.estimate], color=look.color, marker=look.marker, markersize=5)
        canvas.note(axis, f"{words.percent_interval(arm.per_tenfold)} per tenfold", 0.02, 0.975, ha="left")
    for axis in lowest:
        axis.set_xlabel("parameters")
    axes[0].set_xlim(left, right)
    axes[0].set_ylim(low, high)
    axes[0].xaxis.set_major_locator(FixedLocator(_ticks(places.tolist(), right - left)))
    axes[0].xaxis.set_major_formatter(lambda x, _: words.parameters(round(10**x)))
    axes[0].locator_params("y", nbins=6)
    return figure


def _ticks(places: Sequence[float], width: float) -> list[float]:
    """Return the sizes that have room for their label: the outermost two, and of the others what fits."""
    ticks = [places[0], places[-1]]
    for place in places:
        if min(abs(place - tick) for tick in ticks) >= _LABEL * width:
            ticks.append(place)
    return ticks


def _limits(found: Trend) -> tuple[float, float, bool]:
    """Follow points and lines in %, and bars no longer than a few times that; whether any is cut."""
    costs = [cost for arm in found.arms for _, cost in _known(arm)]
    ends = [
        math.expm1(arm.intercept + arm.slope * math.log10(found.studies[i].parameters))
        for arm in found.arms
        for i, _ in _known(arm)
    ]
    points = [0.0, *ends, *(cost.estimate for cost in costs)]
    edges = [edge for cost in costs for edge in (cost.low, cost.high) if edge is not None]
    low, high = canvas.limits(points, edges, most=1.5, least=0.01)
    cut = any(not low <= edge <= high for edge in edges)
    room = 0.08 * max(high - low, 0.01)
    # Above the points stands what they come to.
    return 100 * (low - room), 100 * (high + 3 * room), cut


class _Gap(NamedTuple):
    """An arm's loss gap at a size and budget, as seen and by the law."""

    size: int
    budget: int
    seen: float
    law: float


@canvas.drawing("law", "Loss gaps and the scaling law")
def draw_law(law: Scaling) -> canvas.Picture | None:
    """Draw each arm's loss gap to the baseline, as seen and by the law; None where no two cells compare."""
    gaps = {arm.name: _gaps(law, arm.name) for arm in law.arms}
    gaps = {name: own for name, own in gaps.items() if own}
    if not gaps:
        return None
    over_tokens = "tokens" in law.axes
    noun = "training tokens" if over_tokens else "parameters"
    lines = "size" if over_tokens else "budget"
    caption = (
        f"Validation loss minus that of {law.baseline} (nats/token) against {noun}. Points: means over runs, "
        f"a mark for each {lines}. Lines: what the scaling law makes of it, all arms fitted together. Where "
        "points leave their line, a factor on parameters and one on tokens do not tell what the arm costs."
    )
    rows = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{words.signed(gap.seen, 3)} at {words.parameters(gap.size)} and {words.tokens(gap.budget)} "
            f"(law {words.signed(gap.law, 3)})"
            for gap in own
        )
        for name, own in gaps.items()
    )
    alt = f"Small charts of loss gaps over {noun}, one an arm: {rows}."
    return _draw_law(law, gaps, over_tokens=over_tokens), caption, alt


def _gaps(law: Scaling, arm: str) -> list[_Gap]:
    """Return sizes, budgets and gaps of the cells that an arm has with the baseline: seen, and by the law."""
    found = []
    for key, loss in law.cells.items():
        base = Key(law.baseline, key.parameters, key.tokens)
        if key.arm == arm and base in law.cells:
            fit = law.by_law(key) - law.by_law(base)
            found.append(_Gap(key.parameters, key.tokens, loss - law.cells[base], fit))
    return sorted(found)


def _draw_law(law: Scaling, gaps: dict[str, list[_Gap]], *, over_tokens: bool) -> Any:
    from matplotlib.ticker import LogLocator

    rows = [gap for own in gaps.values() for gap in own]
    write, tell = (words.tokens, words.parameters) if over_tokens else (words.parameters, words.tokens)
    groups = sorted({_group(gap, over_tokens=over_tokens) for gap in rows})
    style = canvas.looks(["", *map(tell, groups)], "")
    figure, axes, lowest = canvas.panels(list(gaps), "loss gap (nats/token)")
    for axis, (name, own) in zip(axes, gaps.items(), strict=True):
        axis.axhline(0, color=canvas.INK, linewidth=0.9, zorder=1.5)
        for group in groups:
            points = [gap for gap in own if _group(gap, over_tokens=over_tokens) == group]
            if points:
                _draw_group(axis, law, name, points, style[tell(group)], over_tokens=over_tokens)
    for group in groups:
        look = style[tell(group)]
        axes[0].plot([], [], color=look.color, linestyle=look.dash, marker=look.marker, label=tell(group))
    places = [gap.budget if over_tokens else gap.size for gap in rows]
    axes[0].set_xscale("log")
    axes[0].set_xlim(min(places) / 1.15, max(places) * 1.15)
    axes[0].legend(fontsize=7.5, frameon=False, loc="best", handletextpad=0.4, borderpad=0.1)
    for axis in lowest:
        axis.set_xlabel("training tokens" if over_tokens else "parameters")
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(places) < 30 * min(places) else (1,)))
    axes[0].xaxis.set_major_formatter(lambda x, _: write(round(x)).replace(".00", "").replace(".0", ""))
    axes[0].xaxis.set_minor_formatter("")
    axes[0].locator_params("y", nbins=6)
    return figure


def _group(gap: _Gap, *, over_tokens: bool) -> int:
    return gap.size if over_tokens else gap.budget


def _draw_group(
    axis: Any, law: Scaling, name: str, points: Sequence[_Gap], look: canvas.Look, *, over_tokens: bool
) -> None:
    first, last = points[0], points[-1]
    sizes, budgets = (
        np.geomspace(*ends, 30) for ends in ((first.size, last.size), (first.budget, last.budget))
    )
    line = [
        law.by_law(Key(name, round(size), round(budget)))
        - law.by_law(Key(law.baseline, round(size), round(budget)))
        for size, budget in zip(sizes, budgets, strict=True)
    ]
    axis.plot(
        budgets if over_tokens else sizes,
        line,
        color=look.color,
        linewidth=1.0,
        linestyle=look.dash,
        zorder=2,
    )
    axis.plot(
        [gap.budget if over_tokens else gap.size for gap in points], [gap.seen for gap in points],
        color=look.color, linestyle="none", marker=look.marker, markersize=4.5, zorder=3,
    )  # fmt: skip
