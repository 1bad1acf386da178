"""Final loss over the learning rate, a line for arms that differ in nothing else, with 95 % intervals.

How it fails: a study with one rate an arm has no such figure; a rate at which a run diverged has a cross at
the top in place of a mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports import words
from ablate.reports.figures.canvas import (
    FAINT,
    Drawing,
    drawing_style,
    looks,
    short,
    spread,
    to_bytes,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.analyse import Analysis
    from ablate.reports.sensitivity import RateCurve


def draw_sensitivity(analysis: Analysis) -> Drawing | None:
    """Draw the curves; None where no arm was run at two rates."""
    curves = [curve for curve in analysis.rate_curves if curve.best is not None]
    if not curves:
        return None
    with drawing_style("learning-rate"):
        svg, png = _draw(analysis, curves)
    numbers = sorted({rate.n for curve in curves for rate in curve.rates})
    n = f"n = {numbers[0]}" if len(numbers) == 1 else f"n = {numbers[0]} to {numbers[-1]}"
    best = "; ".join(_best_text(curve) for curve in curves)
    caption = (
        "Final validation loss over the peak learning rate, for arms that differ in it alone: means over "
        f"seeds with their {words.coverage(analysis.rule)} intervals, {n} a point. Crosses: rates at which a "
        f"run diverged. Lowest mean: {best}. Arms whose best rates differ are not compared fairly at one "
        "rate."
    )
    alt = f"Line chart of the final loss over the learning rate. Lowest: {best}."
    title = "Learning rate"
    return Drawing(name="learning-rate", title=title, caption=caption, alt=alt, svg=svg, png=png)


def _best_text(curve: RateCurve) -> str:
    best = curve.best
    assert best is not None
    edge = " (the outermost tried)" if curve.best_is_outermost else ""
    return f"{curve.name} at {best.learning_rate:g}{edge}"


def _draw(analysis: Analysis, curves: Sequence[RateCurve]) -> tuple[bytes, bytes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    names = [curve.name for curve in curves]
    style = looks(names, analysis.baseline)
    figure = Figure(figsize=(8, 3.6))
    axis = figure.subplots()
    figure.subplots_adjust(left=0.1, right=0.76, top=0.95, bottom=0.14)
    ends: list[tuple[str, float]] = []
    for curve in curves:
        look = style[curve.name]
        known = [
            (rate.learning_rate, rate.loss.estimate, rate.loss)
            for rate in curve.rates
            if rate.loss.estimate is not None
        ]
        axis.errorbar(
            [rate for rate, _, _ in known],
            [mean for _, mean, _ in known],
            yerr=[
                [mean - (loss.low if loss.low is not None else mean) for _, mean, loss in known],
                [(loss.high if loss.high is not None else mean) - mean for _, mean, loss in known],
            ],
            color=look.color, linestyle=look.dash, linewidth=look.width, marker=look.marker, markersize=5,
            capsize=3, elinewidth=1, zorder=3,
        )  # fmt: skip
        ends.append((curve.name, known[-1][1]))
        for rate in curve.rates:
            if rate.diverged:
                axis.plot(
                    rate.learning_rate, 0.97, marker="x", color=look.color, markersize=7, clip_on=False,
                    transform=axis.get_xaxis_transform(), zorder=4,
                )  # fmt: skip
    axis.set_xscale("log")
    rates = sorted({rate.learning_rate for curve in curves for rate in curve.rates})
    axis.set_xticks(rates)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel("final validation loss (nats/token)")
    low, high = axis.get_ylim()
    places = spread([(loss - low) / (high - low) for _, loss in ends], 0.065, 0.0, 1.0)
    for (name, loss), place in zip(ends, places, strict=True):
        at = ((loss - low) / (high - low), place)
        axis.plot([1.0, 1.03], at, color=FAINT, linewidth=0.7, transform=axis.transAxes, clip_on=False)
        axis.text(
            1.04, place, short(name), color=style[name].color, fontsize=8.5, va="center",
            transform=axis.transAxes,
        )  # fmt: skip
    return to_bytes(figure)
