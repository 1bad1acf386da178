"""Figures of a small panel for each arm, on shared scales: a dozen bands in one picture hide each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words.compare import UNITS
from ablate.reports.words.format import (
    cost,
    counts,
    coverage,
    forked,
    percent,
    percents,
    share,
    signed,
    tokens,
)
from ablate.results.cost import Cost
from ablate.results.losses import difference_bands

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.reports.findings.compare import Line, Trend
    from ablate.reports.findings.results import Analysis
    from ablate.results.losses import Band, Curve


@canvas.drawing("difference", "Difference to the baseline")
def draw_difference(analysis: Analysis) -> canvas.Picture | None:
    """Draw the loss differences; None where no arm has an evaluation in common with the baseline."""
    bands = _bands(analysis, analysis.curves)
    if not bands:
        return None
    in_bf16 = _bands(analysis, analysis.curves_in_bf16)
    figure, axes = canvas.panels(bands, "training tokens", "loss difference (nats/token)")
    style = canvas.looks_of(analysis)
    points, edges = [0.0], []
    for name, axis in axes.items():
        band = bands[name]
        diverged = next(arm.diverged for arm in analysis.others if arm.name == name)
        for other in bands.values():
            axis.plot(other.tokens, other.difference, color=canvas.CONTEXT, linewidth=0.7, zorder=1)
        if name in in_bf16:
            own = in_bf16[name]
            axis.plot(own.tokens, own.difference, color=canvas.INK, linewidth=1.0, zorder=2.5)
        # An interval over a mixture of runs that learn and runs that diverge would mean nothing.
        low, high = (np.full(len(end), np.nan) if diverged else end for end in (band.low, band.high))
        canvas.band(axis, style[name], band.tokens, band.difference, low, high)
        canvas.note(axis, counts(band) + f", {diverged} diverged" * bool(diverged))
        late = slice(len(band.tokens) // 4, None)
        points += [] if diverged else band.difference[late].tolist()
        edges += [*low[late].tolist(), *high[late].tolist()]
    some = canvas.scale_about_zero(axes, points, edges, least=1e-4)
    some.set_xlim(0, 1.01 * max(float(band.tokens[-1]) for band in bands.values()))
    canvas.count_ticks(some, 4)
    for axis in axes.values():
        canvas.shade_decay(axis, analysis.decay_begins)
    way = "differences of seeds in common" if analysis.plan.paired_seeds else "Welch"
    caption = (
        f"Validation loss minus that of {analysis.baseline} at equal tokens (nats/token): mean difference "
        f"with its pointwise {coverage(analysis.plan.stop)} band ({way}), as far as all runs of both go; "
        "above zero the arm is worse. Grey: the other arms. The scale follows the later part of arms that "
        "did not diverge. No band with one run, or where runs diverged. Left out: arms without an evaluation "
        "in common."
    )
    if in_bf16:
        caption += (
            " Thin and black: evaluated in bf16, what the arm learnt worse; the rest of the difference is "
            "its own evaluation."
        )
    last = (f"{name} {signed(float(band.difference[-1]))}" for name, band in bands.items())
    alt = f"Small line charts of the loss difference to {analysis.baseline}. At the end: {', '.join(last)}."
    return figure, caption + canvas.decay_caption(analysis.decay_begins), alt


def _bands(analysis: Analysis, curves: Iterable[Curve]) -> dict[str, Band]:
    by_arm: dict[str, list[Curve]] = {arm.name: [] for arm in analysis.arms}
    for curve in curves:
        by_arm[curve.arm].append(curve)
    # An arm that was stopped at a look is compared with as many seeds of the baseline.
    seeds = {arm.name: None if arm.stopped is None else arm.stopped.seeds for arm in analysis.others}
    bands = difference_bands(
        {name: (by_arm[name], by_arm[analysis.baseline][:most]) for name, most in seeds.items()},
        {arm.name: arm.alpha for arm in analysis.others},
        paired=analysis.plan.paired_seeds,
        moderated=analysis.plan.is_moderated,
    )
    return {name: band for name, band in bands.items() if band.tokens.any()}


@canvas.drawing("sweep", "Other targets")
def draw_sweep(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token cost over the target; None where no arm has a range in common with the baseline."""
    sweeps = {arm.name: arm.sweep for arm in analysis.others if arm.sweep is not None}
    if not sweeps or analysis.plan.target is None:
        return None
    style = canvas.looks_of(analysis)
    figure, axes = canvas.panels(sweeps, "target (nats/token)", "token cost")
    points, edges = [0.0], []
    for name, axis in axes.items():
        sweep = sweeps[name]
        rows = np.array([(one.estimate, one.low, one.high) for one in sweep.costs], dtype=float)
        canvas.band(axis, style[name], sweep.targets, *rows.T)
        axis.axvline(analysis.plan.target.val_loss, color=canvas.FAINT, linewidth=0.9, linestyle=":")
        canvas.note(axis, counts(sweep), 0.015)
        later = rows[len(rows) // 2 :]
        points += later[:, 0].tolist()
        edges += later[:, 1:].ravel().tolist()
    some = canvas.scale_about_zero(axes, points, edges, least=0.01)
    canvas.percent_ticks(some.yaxis)
    some.invert_xaxis()
    caption = (
        f"Token cost against {analysis.baseline} if another validation loss were the target: estimate with "
        f"its pointwise {coverage(analysis.plan.stop)} band, over the losses that every run of both "
        "passes; training goes to the right. Dotted: the study's target. A cost that depends on the target "
        f"is no single number. The scale follows the later half.{forked(analysis.others)}"
    )
    without = ", ".join(arm.name for arm in analysis.others if arm.name not in sweeps)
    if without:
        caption += f" No range in common, or diverged: {without}."
    ends = (f"{name} {percent(sweep.costs[-1].estimate)}" for name, sweep in sweeps.items())
    alt = f"Small line charts of token cost over the target loss. At the last target: {', '.join(ends)}."
    return figure, caption, alt


@canvas.drawing("reached", "Runs that reached the target")
def draw_reached(analysis: Analysis) -> canvas.Picture | None:
    """Draw the Kaplan–Meier curves; None where every run reached the target, or none."""
    curves = {arm.name: arm.reached for arm in analysis.arms if arm.reached is not None}
    hits = [arm.hit for arm in analysis.arms]
    if not any(hits) or hits == [arm.n for arm in analysis.arms]:
        return None
    style = canvas.looks_of(analysis)
    figure, axes = canvas.panels(curves, "training tokens", "runs at the target")
    end = max(max(curve.end, curve.tokens[-1]) for curve in curves.values())
    for arm in (arm for arm in analysis.arms if arm.name in curves):
        axis, curve, color = axes[arm.name], curves[arm.name], style[arm.name]["color"]
        for one, shade in ((curves.get(analysis.baseline, curve), canvas.CONTEXT), (curve, color)):
            axis.step([*one.tokens, end], [*one.share, one.share[-1]], where="post", color=shade, linewidth=2)
        low, high = (np.array([*part, part[-1]], dtype=float) for part in (curve.low, curve.high))
        axis.fill_between([*curve.tokens, end], low, high, step="post", color=color, alpha=0.2, linewidth=0)
        left = [run.tokens for run in arm.runs if run.end == "censored"]
        shares = [curve.share[np.searchsorted(curve.tokens, at, side="right") - 1] for at in left]
        axis.plot(left, shares, linestyle="", marker="|", markersize=9, color=color, zorder=4)
        canvas.note(axis, f"n = {curve.n}" + f", {arm.diverged} diverged" * bool(arm.diverged), 0.015)
    some = next(iter(axes.values()))
    # From a little before the first run that reached it: before that all is zero.
    first = min(min([*curve.tokens[1:], end]) for curve in curves.values())
    some.set_xlim(0.6 * first, 1.02 * end)
    some.set_ylim(-0.04, 1.04)
    some.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    canvas.count_ticks(some, 4)
    caption = (
        "Share of runs that have reached the target, over training tokens (Kaplan–Meier), with its pointwise "
        f"{coverage(analysis.plan.stop)} band. Ticks: runs whose budget ended before. A diverged run "
        f"never reaches it. Grey: {analysis.baseline}."
    )
    ends = ", ".join(f"{name} {share(curve.share[-1])}" for name, curve in curves.items())
    return figure, caption, f"Small step charts of the share of runs at the target. At the end: {ends}."


@canvas.drawing("trend", "Token cost over size or budget")
def draw_trend(found: Trend) -> canvas.Picture | None:
    """Draw the token cost of every arm that has a line over parameters or budget; None without one."""
    lines = {arm.name: arm.cost for arm in found.arms if arm.cost is not None}
    if not lines:
        return None
    style = canvas.looks(("", *lines))
    figure, axes = canvas.panels(lines, UNITS[found.axis], "token cost")
    points, edges = [0.0], []
    for name, axis in axes.items():
        line, look = lines[name], style[name]
        known = _known(found, line)
        along = np.geomspace(known[0][0], known[-1][0], 40)
        fitted = np.expm1(line.intercept + line.slope * np.log10(along))
        axis.plot(along, fitted, color=look["color"], linewidth=0.9, linestyle=look["linestyle"])
        for place, one in known:
            bounds = [end for end in (one.low, one.high) if end is not None]
            axis.plot([place] * len(bounds), bounds, color=look["color"], linewidth=1.8)
            axis.plot([place], [one.estimate], color=look["color"], marker=look["marker"], markersize=5)
            points.append(one.estimate)
            edges += bounds
        points += fitted.tolist()
        canvas.note(axis, f"{percents(line.change)} per tenfold", 0.02)
    some = canvas.scale_about_zero(axes, points, edges, least=0.01)
    some.set_xscale("log")
    some.margins(x=0.1)
    some.set_xticks(sorted({found.places[0], found.places[-1]}))
    some.minorticks_off()
    some.xaxis.set_major_formatter(lambda place, _: tokens(place))
    canvas.percent_ticks(some.yaxis)
    numbers = dict.fromkeys(counts(one) for line in lines.values() for _, one in _known(found, line))
    caption = (
        f"Token cost over {found.against} against the number of {UNITS[found.axis]}, each point a study; "
        f"bars: {coverage(*found.rules)} intervals, {', '.join(numbers)} a point. Thin: the straight line of "
        "log (1 + token cost) over the logarithm of that number by least squares; above it its change for "
        "each tenfold. It is an average slope: its interval does not tell whether the line is straight. The "
        "scale follows the points: longer bars are cut."
    )
    rows = "; ".join(
        f"{name}: {', '.join(f'{cost(one)} at {tokens(place)}' for place, one in _known(found, line))}; "
        f"change per tenfold {percents(line.change)}"
        for name, line in lines.items()
    )
    return figure, caption, f"Small charts of token cost over {UNITS[found.axis]}, one an arm. {rows}."


def _known(found: Trend, line: Line) -> list[tuple[int, Any]]:
    """Return the places and costs of the studies that have an estimate."""
    pairs = zip(found.places, line.points, strict=True)
    return [(place, one) for place, one in pairs if isinstance(one, Cost) and one.log_ratio is not None]
