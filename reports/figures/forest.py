"""Forest plots: token costs with their intervals and single seeds on one scale; effects with single pairs.

How it fails: an interval much longer than the others is cut at the scale, with an arrowhead; an arm without
an estimate has its bound as an open triangle, or a dash if it has no bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.colours import INK
from ablate.reports.figures import canvas
from ablate.reports.findings.compare import target_text
from ablate.reports.words.effects import effect_name
from ablate.reports.words.format import (
    NBSP,
    cost,
    coverage,
    ends,
    forked,
    percents,
    plural,
    share,
)
from ablate.results.stop_rule import method_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.intervals import Interval

    Bars = dict[int, tuple[str, Interval]]
    """By row: the colour and the interval."""

_WIDTH = 5
"""In inches: it is as wide as a telephone's page, and needs no scrolling there."""
_LINEAR = 0.1
"""Costs up to this size are on a linear part of the scale even where others are orders larger."""

_CUT = " Arrowheads at the edge: the interval goes on."


@canvas.drawing
def draw_forest(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token costs, a row for each arm; None if no arm has an estimate or a bound."""
    arms = analysis.others
    if all(arm.token_cost.kind == "none" for arm in arms):
        return None
    texts = [
        f"{cost(arm.token_cost)} {3 * NBSP}{arm.n} ({ends(arm.runs)})" for arm in arms
    ]
    heading = f"token cost [95{NBSP}%] {3 * NBSP}n (hit / cens. / div.)"
    axis = _rows([arm.name for arm in arms], heading, texts)
    points, bars = _draw_points(axis, analysis)
    is_logarithmic = max(points) > 1 and min(filter(None, map(abs, points))) < _LINEAR
    if is_logarithmic:
        axis.set_xscale("symlog", linthresh=_LINEAR)
        canvas.percent_ticks(axis.xaxis)
    is_cut = _draw_intervals(axis, bars, points)
    axis.set_xlabel(f"token cost against {canvas.short(analysis.baseline)}")
    if not is_logarithmic:
        axis.locator_params("x", nbins=5)
    band = analysis.resolution.share_of_tokens_to_target
    if band is not None:
        axis.axvspan(-band, band, color=canvas.SHADE, zorder=0, linewidth=0)
    caption = (
        f"Token cost against {analysis.baseline}: tokens to {target_text(analysis.plan)} over the "
        f"baseline's, minus one. Points: estimates; bars: {coverage(analysis.plan.stop)} intervals; small "
        "dots: seeds that reached the target; open triangles: bounds, where not every run reached it (no "
        "estimate). n: results of the arm, and how they ended. Grey band: one evaluation interval "
        f"({share(band)}), below which a cost rests on interpolation."
    )
    if is_cut:
        caption += _CUT
    if is_logarithmic:
        caption += f" The scale is logarithmic beyond ±{_LINEAR:.0%}."
    return "token-cost", "Token cost", axis.figure, caption + forked(arms)


@canvas.drawing
def draw_effects(analysis: Analysis) -> canvas.Picture | None:
    """Draw the average effects of factors, a row for each; None without any."""
    effects = analysis.effects
    if not effects:
        return None
    texts = [
        f"{percents(effect)} {3 * NBSP}{effect.n}, {plural(len(effect.changes), 'pair')}"
        for effect in effects
    ]
    heading = f"average [95{NBSP}%] {3 * NBSP}seeds, pairs of arms"
    axis = _rows([effect_name(effect) for effect in effects], heading, texts)
    factors = list(dict.fromkeys(effect.factor for effect in effects))
    looks = canvas.looks(factors)
    points = [0.0]
    bars: Bars = {}
    for row, effect in enumerate(effects):
        color = looks[effect.factor]["color"]
        marker = looks[effect.factor]["marker"]
        rows = [row + 0.25] * len(effect.changes)
        axis.plot(effect.changes, rows, ".", color=color, markersize=4.5, alpha=0.7)
        axis.plot(effect.estimate, row, marker, color=color, markersize=7)
        points += effect.changes
        if effect.low is not None:
            bars[row] = (color, effect)
    is_cut = _draw_intervals(axis, bars, points)
    axis.locator_params("x", nbins=5)
    axis.set_xlabel("tokens to target, with over without, minus one")
    caption = (
        "What a factor does on average over all pairs of arms that differ in nothing else. Points: averages, "
        f"with {coverage(analysis.plan.stop)} intervals over seeds; small dots: single pairs. Each factor has "
        "its own colour and marker."
    )
    return "effects", "Effects", axis.figure, caption + _CUT * is_cut


def _rows(names: Sequence[str], heading: str, texts: Sequence[str]) -> Any:
    """Return the axes of a new figure with a row for each name.

    Above the place of its interval each row has its name and its text, so that it fits on a narrow page.
    """
    axis = canvas.sheet(_WIDTH, 0.9 + 0.66 * len(names)).subplots()
    axis.set_ylim(len(names) - 0.5, -0.7)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_title(heading)
    axis.axvline(0, color=INK, linewidth=1, zorder=1)
    canvas.percent_ticks(axis.xaxis)
    style = {
        "verticalalignment": "center",
        "transform": axis.get_yaxis_transform(),
        "bbox": {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    }
    for row, (name, text) in enumerate(zip(names, texts, strict=True)):
        axis.text(0, row - 0.45, canvas.short(name, 40), weight="bold", **style)
        axis.text(0, row - 0.22, text, **style)
    return axis


def _draw_points(axis: Any, analysis: Analysis) -> tuple[list[float], Bars]:
    """Draw seeds, estimates and bounds; return their places, and zero; and the rows with an interval."""
    looks = canvas.looks_of(analysis)
    points = [0.0]
    bars: Bars = {}
    for row, arm in enumerate(analysis.others):
        token_cost = arm.token_cost
        color = looks[arm.name]["color"]
        seeds = _seed_costs(arm, analysis)
        axis.plot(
            seeds,
            [row + 0.25] * len(seeds),
            ".",
            color=color,
            markersize=4.5,
            alpha=0.7,
        )
        points += seeds
        bound = token_cost.high if token_cost.low is None else token_cost.low
        if token_cost.estimate is not None:
            axis.plot(
                token_cost.estimate,
                row,
                looks[arm.name]["marker"],
                color=color,
                markersize=7,
            )
            points.append(token_cost.estimate)
        elif bound is not None:
            marker = "<" if token_cost.low is None else ">"
            axis.plot(bound, row, marker, color=color, markersize=8, fillstyle="none")
            points.append(bound)
        if token_cost.kind == "interval":
            bars[row] = (color, token_cost)
    return points, bars


def _draw_intervals(axis: Any, bars: Bars, points: list[float]) -> bool:
    """Draw the intervals and choose the scale's ends; tell whether an interval is cut there."""
    from matplotlib.markers import CARETLEFT, CARETRIGHT

    ends = {}
    for row, (_, interval) in bars.items():
        # None: beyond the range of numbers
        low = -1.0 if interval.low is None else interval.low
        high = math.inf if interval.high is None else interval.high
        ends[row] = (low, high)
    edges = [edge for both in ends.values() for edge in both]
    scale = axis.xaxis.get_transform()
    near = canvas.limits(
        scale.transform(np.array(points)), scale.transform(np.array(edges)), least=0.05
    )
    left, right = scale.inverted().transform(np.array(near))
    axis.set_xlim(left, right)
    for row, (low, high) in ends.items():
        color = bars[row][0]
        axis.plot(
            np.clip([low, high], left, right), [row, row], color=color, linewidth=2.2
        )
        if low < left:
            axis.plot(left, row, color=color, marker=CARETLEFT, markersize=8)
        if high > right:
            axis.plot(right, row, color=color, marker=CARETRIGHT, markersize=8)
    return bool(min(edges, default=left) < left or max(edges, default=right) > right)


def _seed_costs(arm: ArmResult, analysis: Analysis) -> list[float]:
    """Return each seed's token cost over the baseline's of that seed or, unpaired, over its mean."""
    base = analysis.baseline_arm
    fork = arm.counted_from - base.counted_from
    base_tokens = {run.seed: run.high - fork for run in base.used if run.exact}
    is_paired = method_of(analysis.plan, arm.counted_from).paired
    costs = []
    for run in arm.used:
        if is_paired:
            tokens = base_tokens.get(run.seed)
        else:
            tokens = base.tokens_to_target.estimate
        if run.exact and tokens and tokens > 0:
            costs.append(run.high / tokens - 1)
    return costs
