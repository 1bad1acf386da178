"""Final loss over the learning rate: of arms that differ in nothing else, and of the trials of a tuned study.

How it fails: a study with one rate an arm, and no trials, has no such figure; a rate at which a run diverged
has a cross at the top in place of a mean, one whose trial was ended early a triangle.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ablate.reports.figures import canvas
from ablate.reports.findings.tuning import RATE
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import Analysis, RateCurve


@canvas.drawing("learning-rate", "Learning rate")
def draw_sensitivity(analysis: Analysis) -> canvas.Picture | None:
    """Draw the curves; None where no arm was run at two rates."""
    curves = [curve for curve in analysis.rate_curves if curve.best is not None]
    if not curves:
        return None
    numbers = sorted({rate.n for curve in curves for rate in curve.rates})
    n = f"n = {numbers[0]}" if len(numbers) == 1 else f"n = {numbers[0]} to {numbers[-1]}"
    best = "; ".join(_best_text(curve) for curve in curves)
    caption = (
        "Final validation loss over the peak learning rate, for arms that differ in it alone: means over "
        f"seeds with their {words.coverage(analysis.plan.stop)} intervals, {n} a point. Crosses: rates at "
        f"which a run diverged. Lowest mean: {best}. Arms whose best rates differ are not compared fairly at "
        "one rate."
    )
    alt = f"Line chart of the final loss over the learning rate. Lowest: {best}."
    return _draw(curves, analysis.baseline), caption, alt


@canvas.drawing("trials", "Trials")
def draw_trials(analysis: Analysis) -> canvas.Picture | None:
    """Draw the trials of a tuned study; None where no learning rate was tuned."""
    tuning = analysis.tuning
    if tuning is None or not any(curve.best is not None for curve in tuning.curves):
        return None
    curves = [curve for curve in tuning.curves if curve.best is not None]
    group_of = {arm.tuned: arm.group for arm in tuning.arms}
    chosen = {arm.group: float(arm.chosen[RATE]) for arm in tuning.arms}
    shared = {float(arm.shared[RATE]) for arm in tuning.arms}
    alone = len(tuning.plan.fields) == 1
    found = "; ".join(f"{group} at {rate:g}" for group, rate in chosen.items())
    runs = max(rate.n for curve in curves for rate in curve.rates)
    caption = (
        "Final validation loss of the trials over the peak learning rate, "
        f"{words.tokens(tuning.plan.tokens)} tokens each ({words.plural(runs, 'run')} a "
        f"point{'' if alone else '; other fields vary, too'}). Crosses at the top: a run diverged; "
        f"triangles: ended early. Dotted: the study's own rate. Rings: the rates found: {found}."
    )
    alt = f"Chart of the trials' final loss over the learning rate. Found: {found}."
    base = group_of[analysis.baseline]
    figure = _draw(curves, base, shared=sorted(shared), chosen=chosen, joined=alone)
    return figure, caption, alt


def _best_text(curve: RateCurve) -> str:
    best = curve.best
    assert best is not None
    edge = " (the outermost tried)" if curve.best_is_outermost else ""
    return f"{curve.name} at {best.learning_rate:g}{edge}"


def _draw(
    curves: Sequence[RateCurve],
    baseline: str,
    *,
    shared: Sequence[float] = (),
    chosen: Mapping[str, float] | None = None,
    joined: bool = True,
) -> Any:
    """Draw the curves, as lines if ``joined``; ``shared``, and ``chosen`` of each curve: rates to mark."""
    from matplotlib.ticker import FixedLocator

    names = [curve.name for curve in curves]
    style = canvas.looks(names, baseline)
    figure = canvas.sheet(8, 3.6, left=0.1, right=0.76, top=0.95, bottom=0.14)
    axis = figure.subplots()
    ends: list[tuple[str, float]] = []
    for curve in curves:
        look = style[curve.name]
        points = [(rate, rate.loss.estimate) for rate in curve.rates]
        known = [(rate.learning_rate, mean, rate.loss) for rate, mean in points if mean is not None]
        at, means, _ = zip(*known, strict=True)
        below = [0.0 if loss.low is None else mean - loss.low for _, mean, loss in known]
        above = [0.0 if loss.high is None else loss.high - mean for _, mean, loss in known]
        line = look.line if joined else look.line | {"linestyle": "none"}
        axis.errorbar(at, means, yerr=[below, above], **line, markersize=5, capsize=3, elinewidth=1, zorder=3)
        ends.append((curve.name, means[-1]))
        mark = partial(axis.plot, color=look.color, fillstyle="none", zorder=4)
        for rate, mean in points:
            if mean is None:
                mark(
                    rate.learning_rate, 0.97, marker="x" if rate.diverged else "v", markersize=7,
                    clip_on=False, transform=axis.get_xaxis_transform(),
                )  # fmt: skip
        for at_rate, mean, _ in known:
            if chosen is not None and at_rate == chosen[curve.name]:
                mark(at_rate, mean, marker="o", markersize=12)
    for rate_of_study in shared:
        axis.axvline(rate_of_study, color=canvas.FAINT, linestyle=":", linewidth=1, zorder=1)
    axis.set_xscale("log")
    rates = sorted({rate.learning_rate for curve in curves for rate in curve.rates})
    axis.xaxis.set_major_locator(FixedLocator(rates if chosen is None else _few(rates)))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel("final validation loss (nats/token)")
    low, high = axis.get_ylim()
    places = canvas.spread([(loss - low) / (high - low) for _, loss in ends], 0.065, 0.0, 1.0)
    for (name, loss), place in zip(ends, places, strict=True):
        at = ((loss - low) / (high - low), place)
        axis.plot([1.0, 1.03], at, color=canvas.FAINT, linewidth=0.7, transform=axis.transAxes, clip_on=False)
        axis.text(
            1.04, place, canvas.short(name), color=style[name].color, fontsize=8.5, va="center",
            transform=axis.transAxes,
        )  # fmt: skip
    return figure


def _few(rates: Sequence[float]) -> list[float]:
    """Return 1, 2 and 5 times powers of ten as ticks, for rates that lie anywhere."""
    powers = range(math.floor(math.log10(rates[0])), math.ceil(math.log10(rates[-1])) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if rates[0] * 0.9 <= tick <= rates[-1] * 1.1] or [rates[0]]
