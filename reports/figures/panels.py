"""Figures with a small panel for each arm, on shared scales: a dozen bands in one panel hide each other.

The front of a search has a panel for each budget.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words.compare import UNITS
from ablate.reports.words.format import (
    NBSP,
    counts,
    coverage,
    forked,
    percents,
    tokens,
)
from ablate.results.losses import difference_bands
from ablate.results.stop_rule import method_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.results import Analysis
    from ablate.reports.findings.search import SearchResult
    from ablate.results.losses import Band, Curve

_ENDS = attrgetter("estimate", "low", "high")


@canvas.drawing
def draw_difference(analysis: Analysis) -> canvas.Picture | None:
    """Draw the loss differences; None if no arm has an evaluation in common with the baseline."""
    bands = _bands(analysis, analysis.curves)
    if not bands:
        return None
    in_bf16 = _bands(analysis, analysis.curves_in_bf16)
    # An interval over both runs that learn and runs that diverge has no meaning.
    mixed = {arm.name: f", {count} diverged" for arm in analysis.others if (count := arm.count("diverged"))}
    figure, axes = canvas.small_multiples(
        {
            name: (
                band.tokens,
                zip(band.difference, band.low, band.high, strict=True),
                counts(band) + mixed.get(name, ""),
            )
            for name, band in bands.items()
        },
        canvas.looks_of(analysis),
        "training tokens",
        f"loss difference ({analysis.plan.unit})",
        least=1e-4,
        mixed=mixed,
    )
    for name, axis in axes.items():
        for other in bands.values():
            axis.plot(other.tokens, other.difference, color=canvas.CONTEXT, linewidth=0.7, zorder=1)
        if own := in_bf16.get(name):
            axis.plot(own.tokens, own.difference, color=canvas.INK, linewidth=1.0, zorder=2.5)
        axis.set_xlim(0, 1.01 * max(float(band.tokens[-1]) for band in bands.values()))
        canvas.shade_decay(axis, analysis.decay_begins)
    canvas.count_ticks(axis, 4)
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


def _bands(analysis: Analysis, curves: Iterable[Curve]) -> dict[str, Band]:
    by_arm: dict[str, list[Curve]] = {arm.name: [] for arm in analysis.arms}
    for curve in curves:
        by_arm[curve.arm].append(curve)
    # An arm that was stopped at a look is compared with the same number of the baseline's seeds.
    bands = difference_bands(
        {arm.name: (by_arm[arm.name], by_arm[analysis.baseline][: arm.seeds]) for arm in analysis.others},
        method_of(analysis.plan),
    )
    return {name: band for name, band in bands.items() if band.tokens.any()}


@canvas.drawing
def draw_sweep(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token cost over the target; None if no arm has a range in common with the baseline."""
    moved = {arm.name: arm.moved for arm in analysis.others if arm.moved is not None}
    sweeps = {name: pairs for name, one in moved.items() if (pairs := one.sweep) is not None}
    if not sweeps or analysis.plan.target is None:
        return None
    figure, axes = canvas.small_multiples(
        {
            name: (targets, map(_ENDS, costs), counts(replace(costs[0], pairs=None)))
            for name, pairs in sweeps.items()
            for targets, costs in [zip(*pairs, strict=True)]
        },
        canvas.looks_of(analysis),
        f"target ({analysis.plan.unit})",
        "token cost",
        least=0.01,
    )
    for axis in axes.values():
        axis.axvline(analysis.plan.target.val_loss, color=canvas.FAINT, linewidth=0.9, linestyle=":")
    canvas.percent_ticks(axis.yaxis)
    axis.invert_xaxis()
    caption = (
        f"Token cost against {analysis.baseline} if another validation loss were the target: estimate with "
        f"its pointwise {coverage(analysis.plan.stop)} band, over the losses that every run of both "
        "passes; training goes to the right. Dotted: the study's target. A cost that depends on the target "
        f"is no single number. The scale follows the later part.{forked(analysis.others)}"
    )
    without = ", ".join(arm.name for arm in analysis.others if arm.name not in sweeps)
    if without:
        caption += f" No range in common, or diverged: {without}."
    return "sweep", "Other targets", figure, caption


@canvas.drawing
def draw_comparison(found: Comparison) -> canvas.Picture | None:
    """Draw every arm's token cost in each study over the studies' places; None without any."""
    known = {
        arm.name: [
            (at, one)
            for at, one in zip(found.places, arm.token_cost.points, strict=True)
            if one and one.estimate is not None
        ]
        for arm in found.arms
    }
    lines = {arm.name: arm.token_cost for arm in found.arms if known[arm.name]}
    if not lines:
        return None
    looks = canvas.looks(lines)
    figure, axes = canvas.small_multiples(
        {
            name: ([*at], map(_ENDS, costs), percents(line.change) + " per tenfold" * bool(found.axis))
            for name, line in lines.items()
            for at, costs in [zip(*known[name], strict=True)]
        },
        looks,
        UNITS[found.axis],
        "token cost",
        least=0.01,
        bars=True,
    )
    numbers = dict.fromkeys(counts(one) for name in lines for _, one in known[name])
    caption = (
        f"Token cost over {found.against}, each point a study; bars: {coverage(*found.rules)} intervals, "
        f"{', '.join(numbers)} a point. Above the points: what (1 + token cost) changes by. The scale "
        "follows the points: longer bars are cut."
    )
    for name, axis in axes.items():
        line, look = lines[name], looks[name]
        if line.intercept is not None and line.slope is not None:
            along = np.geomspace(known[name][0][0], known[name][-1][0], 40)
            fitted = np.expm1(line.intercept + line.slope * np.log10(along))
            axis.plot(along, fitted, color=look["color"], linewidth=0.9, linestyle=look["linestyle"])
    axis = next(iter(axes.values()))
    canvas.percent_ticks(axis.yaxis)
    axis.margins(x=0.1)
    axis.set_xscale("log")
    ends = {found.places[i]: canvas.short(found.studies[i].name, 16) for i in (0, -1)}
    axis.set_xticks(sorted(ends))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda place, _: tokens(place) if found.axis else ends.get(place, ""))
    if found.axis:
        caption += (
            " Thin: the straight line of log (1 + token cost) over the logarithm of the number of "
            f"{UNITS[found.axis]} by least squares. The change for each tenfold is an average slope: its "
            "interval does not tell whether the line is straight."
        )
    return "compare", "Token cost in each study", figure, caption


@canvas.drawing
def draw_front(found: SearchResult) -> canvas.Picture | None:
    """Draw the results of each budget and their front; None before the first result."""
    # Not at the top: it loads what runs a search, and a report needs none of it.
    from ablate.search.halving import short_tokens

    rungs = [rung for rung in found.rungs if any(one.end == "ok" for one in rung.points)]
    if not rungs:
        return None
    named = [one.name for rung in rungs for one in rung.front if one.name != found.baseline]
    style = canvas.looks((found.baseline, *dict.fromkeys(named)), found.baseline)
    figure = canvas.sheet(11, 4.6)
    axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axis, rung in zip(axes, rungs, strict=True):
        for one in (point for point in rung.points if point.end == "ok"):
            usual = {"marker": "s" if one.started_from else "o", "color": canvas.CONTEXT}
            look = style[one.name] if one.on_front or one.is_baseline else usual
            axis.plot(
                [one.modelled_time], [one.value], look["marker"], color=look["color"], markersize=6, zorder=3
            )
        # Points above and to the right of the front are dominated.
        axis.step(
            [one.modelled_time for one in rung.front], [one.value for one in rung.front],
            where="post", color=canvas.FAINT, linewidth=1.4, zorder=2,
        )  # fmt: skip
        axis.set_title(f"{short_tokens(rung.tokens)} tokens a run")
        axis.set_xlabel("step time over the baseline's (modelled)")
        axis.margins(x=0.09, y=0.09)
        axis.locator_params("x", nbins=6)
        if found.objective == "token_cost":
            canvas.percent_ticks(axis.yaxis)
    axes[0].set_ylabel(found.value_words)
    canvas.legend(figure, {name: look | {"linestyle": "none"} for name, look in style.items()})
    caption = (
        f"Each point: one run of one recipe (n{NBSP}={NBSP}1 seed), so distances within a run's noise mean "
        f"nothing. Step time: modelled on {found.hardware} at {found.shapes}, over that of {found.baseline}; "
        "not measured. Line: the front; grey squares: other recipes that the search started from. Runs "
        "without a result are not shown."
    )
    return "front", "The front", figure, caption
