"""Figures with a small panel for each arm, on shared scales: a dozen bands in one panel hide each other.

The front of a search has a panel for each budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ablate.base.colours import INK
from ablate.reports.figures import canvas
from ablate.reports.words.compare import UNITS
from ablate.reports.words.format import NBSP, counts, coverage, forked, percents, tokens
from ablate.results.losses import difference_bands
from ablate.results.stop_rule import method_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.results import Analysis
    from ablate.reports.findings.search import SearchResult
    from ablate.results.intervals import Interval
    from ablate.results.losses import Band, Curve


@canvas.drawing
def draw_difference(analysis: Analysis) -> canvas.Picture | None:
    """Draw the loss differences; None if no arm has an evaluation in common with the baseline."""
    bands = _bands(analysis, analysis.curves)
    if not bands:
        return None
    in_bf16 = _bands(analysis, analysis.curves_in_bf16)
    panels = {}
    # An interval over both runs that learn and runs that diverge has no meaning.
    mixed = []
    for arm in analysis.others:
        if arm.name not in bands:
            continue
        band = bands[arm.name]
        text = counts(band)
        if num_diverged := arm.count("diverged"):
            text += f", {num_diverged} diverged"
            mixed.append(arm.name)
        figures = np.array([band.difference, band.low, band.high])
        panels[arm.name] = canvas.Panel(band.tokens, figures, text)
    figure, axes = canvas.small_multiples(
        panels,
        canvas.looks_of(analysis),
        "training tokens",
        f"loss difference ({analysis.plan.unit})",
        least=1e-4,
        mixed=mixed,
    )
    end = 1.01 * max(float(band.tokens[-1]) for band in bands.values())
    others = {"color": canvas.CONTEXT, "linewidth": 0.7, "zorder": 1}
    thin = {"color": INK, "linewidth": 1.0, "zorder": 2.5}
    for name, axis in axes.items():
        for band in bands.values():
            axis.plot(band.tokens, band.difference, **others)
        if name in in_bf16:
            axis.plot(in_bf16[name].tokens, in_bf16[name].difference, **thin)
        axis.set_xlim(0, end)
        canvas.shade_decay(axis, analysis.decay_begins)
    canvas.count_ticks(axis, 3)
    way = "differences of seeds in common" if analysis.plan.paired_seeds else "Welch"
    caption = (
        f"Validation loss minus that of {analysis.baseline} at equal tokens "
        f"({analysis.plan.unit}): mean difference with its pointwise "
        f"{coverage(analysis.plan.stop)} band ({way}), as far as all runs of both go; "
        "above zero the arm is worse. Grey: the other arms. The scale follows the later part of arms that "
        "did not diverge. No band with one run, or where runs diverged. Left out: arms without an evaluation "
        "in common."
    )
    if in_bf16:
        caption += (
            " Thin and black: evaluated in bf16, what the arm learnt worse; the rest of the difference is "
            "its own evaluation."
        )
    caption += canvas.decay_caption(analysis.decay_begins)
    return "difference", "Difference to the baseline", figure, caption


def _bands(analysis: Analysis, curves: Sequence[Curve]) -> dict[str, Band]:
    of_baseline = [curve for curve in curves if curve.arm == analysis.baseline]
    sides = {}
    for arm in analysis.others:
        of_arm = [curve for curve in curves if curve.arm == arm.name]
        # An arm that was stopped at a look is compared with the same number of the baseline's seeds.
        sides[arm.name] = (of_arm, of_baseline[: arm.seeds])
    bands = difference_bands(sides, method_of(analysis.plan))
    return {name: band for name, band in bands.items() if band.tokens.any()}


def _panel(
    places: Sequence[float], costs: Sequence[Interval], text: str
) -> canvas.Panel:
    ends = np.array(
        [(cost.estimate, cost.low, cost.high) for cost in costs], dtype=float
    )
    return canvas.Panel(places, ends.T, text)


@canvas.drawing
def draw_sweep(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token cost over the target; None if no arm has a range in common with the baseline."""
    panels = {}
    for arm in analysis.others:
        if arm.moved is not None and arm.moved.sweep is not None:
            targets, costs = zip(*arm.moved.sweep, strict=True)
            panels[arm.name] = _panel(
                targets, costs, counts(replace(costs[0], pairs=None))
            )
    if not panels or analysis.plan.target is None:
        return None
    figure, axes = canvas.small_multiples(
        panels,
        canvas.looks_of(analysis),
        f"target ({analysis.plan.unit})",
        "token cost",
        least=0.01,
    )
    for axis in axes.values():
        axis.axvline(
            analysis.plan.target.val_loss,
            color=canvas.FAINT,
            linewidth=0.9,
            linestyle=":",
        )
    canvas.percent_ticks(axis.yaxis)
    axis.invert_xaxis()
    caption = (
        f"Token cost against {analysis.baseline} if another validation loss were the target: estimate with "
        f"its pointwise {coverage(analysis.plan.stop)} band, over the losses that every run of both "
        "passes; training goes to the right. Dotted: the study's target. A cost that depends on the target "
        f"is no single number. The scale follows the later part.{forked(analysis.others)}"
    )
    without = [arm.name for arm in analysis.others if arm.name not in panels]
    if without:
        caption += f" No range in common, or diverged: {', '.join(without)}."
    return "sweep", "Other targets", figure, caption


@canvas.drawing
def draw_comparison(comparison: Comparison) -> canvas.Picture | None:
    """Draw every arm's token cost in each study over the studies' places; None without any."""
    panels = {}
    lines = {}
    numbers: dict[str, None] = {}
    for arm in comparison.arms:
        line = arm.token_cost
        places = []
        costs = []
        for place, point in zip(comparison.places, line.points, strict=True):
            if point and point.estimate is not None:
                places.append(place)
                costs.append(point)
        if costs:
            change = percents(line.change)
            if comparison.axis:
                change += " per tenfold"
            panels[arm.name] = _panel(places, costs, change)
            lines[arm.name] = line
            numbers |= dict.fromkeys(map(counts, costs))
    if not panels:
        return None
    looks = canvas.looks(panels)
    figure, axes = canvas.small_multiples(
        panels, looks, UNITS[comparison.axis], "token cost", least=0.01, bars=True
    )
    for name, axis in axes.items():
        line = lines[name]
        if line.intercept is not None and line.slope is not None:
            x = panels[name].x
            between = np.geomspace(x[0], x[-1], 40)
            axis.plot(
                between,
                np.expm1(line.intercept + line.slope * np.log10(between)),
                color=looks[name]["color"],
                linewidth=0.9,
                linestyle=looks[name]["linestyle"],
            )
    canvas.percent_ticks(axis.yaxis)
    axis.margins(x=0.1)
    axis.set_xscale("log")
    ends = {
        comparison.places[i]: canvas.short(comparison.studies[i].name, 16)
        for i in (0, -1)
    }
    axis.set_xticks(sorted(ends))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(
        lambda place, _: tokens(place) if comparison.axis else ends.get(place, "")
    )
    caption = (
        f"Token cost over {comparison.against}, each point a study; bars: {coverage(*comparison.rules)} "
        f"intervals, {', '.join(numbers)} a point. Above the points: what (1 + token cost) changes by. The "
        "scale follows the points: longer bars are cut."
    )
    if comparison.axis:
        caption += (
            " Thin: the straight line of log (1 + token cost) over the logarithm of the number of "
            f"{UNITS[comparison.axis]} by least squares. The change for each tenfold is an average slope: "
            "its interval does not tell whether the line is straight."
        )
    return "compare", "Token cost in each study", figure, caption


@canvas.drawing
def draw_front(search: SearchResult) -> canvas.Picture | None:
    """Draw the results of each budget and their front; None before the first result."""
    # Not at the top: it loads what runs a search, and a report needs none of it.
    from ablate.search.halving import short_tokens

    rungs = []
    names = {search.baseline: None}
    for rung in search.rungs:
        if any(point.end == "ok" for point in rung.points):
            rungs.append(rung)
            names |= dict.fromkeys(point.name for point in rung.front)
    if not rungs:
        return None
    looks = canvas.looks(names, search.baseline)
    figure = canvas.sheet(canvas.WIDTH, 3.8)
    axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axis, rung in zip(axes, rungs, strict=True):
        for point in rung.points:
            if point.end != "ok":
                continue
            marker = "s" if point.started_from else "o"
            color = canvas.CONTEXT
            if point.on_front or point.is_baseline:
                marker = looks[point.name]["marker"]
                color = looks[point.name]["color"]
            place = (point.modelled_time, point.value)
            axis.plot(*place, marker, color=color, markersize=6, zorder=3)
        # Points above and to the right of the front are dominated.
        axis.step(
            [point.modelled_time for point in rung.front],
            [point.value for point in rung.front],
            where="post",
            color=canvas.FAINT,
            linewidth=1.4,
            zorder=2,
        )
        axis.set_title(f"{short_tokens(rung.tokens)} tokens a run")
        axis.set_xlabel("step time over the baseline's (modelled)")
        axis.margins(x=0.09, y=0.09)
        axis.locator_params("x", nbins=5)
        if search.objective == "token_cost":
            canvas.percent_ticks(axis.yaxis)
    axes[0].set_ylabel(search.value_words)
    canvas.legend(
        figure, {name: look | {"linestyle": "none"} for name, look in looks.items()}
    )
    caption = (
        f"Each point: one run of one recipe (n{NBSP}={NBSP}1 seed), so distances within a run's noise mean "
        f"nothing. Step time: modelled on {search.hardware} at {search.shapes}, over that of "
        f"{search.baseline}; not measured. Line: the front; grey squares: other recipes that the search "
        "started from. Runs without a result are not shown."
    )
    return "front", "The front", figure, caption
