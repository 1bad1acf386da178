"""Final loss over the learning rate: of arms that differ in nothing else, and of the trials of a tuned study.

How it fails: a study with one rate an arm, and no trials, has no such figure; a rate at which a run diverged
has a cross at the top in place of a mean, one whose trial was ended early a triangle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.figures import canvas
from ablate.reports.findings.tuning import RATE
from ablate.reports.words.format import coverage, plural, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis, RateCurve


@canvas.drawing("learning-rate", "Learning rate")
def draw_sensitivity(analysis: Analysis) -> canvas.Picture | None:
    """Draw the curves; None where no arm was run at two rates."""
    curves = [curve for curve in analysis.rate_curves if curve.best is not None]
    if not curves:
        return None
    numbers = sorted({rate.n for curve in curves for rate in curve.rates})
    best = "; ".join(
        f"{curve.name} at {curve.best.learning_rate:g}" + " (the outermost tried)" * curve.best_is_outermost
        for curve in curves
        if curve.best is not None
    )
    caption = (
        "Final validation loss over the peak learning rate, for arms that differ in it alone: means over "
        f"seeds with their {coverage(analysis.plan.stop)} intervals, n = {numbers[0]} to {numbers[-1]} a "
        f"point. Crosses: rates at which a run diverged. Lowest mean: {best}. Arms whose best rates differ "
        "are not compared fairly at one rate."
    )
    figure, _ = _draw(curves, analysis.baseline)
    return figure, caption, f"Line chart of the final loss over the learning rate. Lowest: {best}."


@canvas.drawing("trials", "Trials")
def draw_trials(analysis: Analysis) -> canvas.Picture | None:
    """Draw the trials of a tuned study; None where no learning rate was tuned."""
    tuning = analysis.tuning
    curves = [] if tuning is None else [curve for curve in tuning.curves if curve.best is not None]
    if tuning is None or not curves:
        return None
    chosen = {arm.group: float(arm.chosen[RATE]) for arm in tuning.arms}
    base = next(arm.group for arm in tuning.arms if arm.tuned == analysis.baseline)
    figure, axis = _draw(curves, base, joined=len(tuning.plan.fields) == 1)
    for shared in {float(arm.shared[RATE]) for arm in tuning.arms}:
        axis.axvline(shared, color=canvas.FAINT, linestyle=":", linewidth=1, zorder=1)
    for rate in (
        rate for curve in curves for rate in curve.rates if rate.learning_rate == chosen[curve.name]
    ):
        if rate.loss.estimate is not None:
            axis.plot(
                rate.learning_rate, rate.loss.estimate, "o", color=canvas.INK, fillstyle="none", markersize=12
            )
    found = "; ".join(f"{group} at {rate:g}" for group, rate in chosen.items())
    runs = max(rate.n for curve in curves for rate in curve.rates)
    caption = (
        "Final validation loss of the trials over the peak learning rate, "
        f"{tokens(tuning.plan.tokens)} tokens each ({plural(runs, 'run')} a point); points are joined where "
        "the rate alone varies. Crosses at the top: a run diverged; triangles: ended early. Dotted: the "
        f"study's own rate. Rings: the rates found: {found}."
    )
    return figure, caption, f"Chart of the trials' final loss over the learning rate. Found: {found}."


def _draw(curves: Sequence[RateCurve], baseline: str, *, joined: bool = True) -> tuple[Any, Any]:
    """Return a figure with the curves, as lines if ``joined``, and its axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    style = canvas.looks((curve.name for curve in curves), baseline)
    figure = canvas.sheet(8, 3.6)
    axis = figure.subplots()
    for curve in curves:
        look = style[curve.name] | ({} if joined else {"linestyle": "none"})
        known = [(rate.learning_rate, rate.loss) for rate in curve.rates if rate.loss.estimate is not None]
        axis.plot([at for at, _ in known], [loss.estimate for _, loss in known], **look, markersize=5)
        for at, loss in known:
            if loss.low is not None and loss.high is not None:
                axis.plot([at, at], [loss.low, loss.high], color=look["color"], linewidth=1, marker="_")
        for rate in curve.rates:
            if rate.loss.estimate is None:
                axis.plot(
                    rate.learning_rate, 0.97, color=look["color"], marker="x" if rate.diverged else "v",
                    markersize=7, fillstyle="none", transform=axis.get_xaxis_transform(),
                )  # fmt: skip
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel("final validation loss (nats/token)")
    canvas.legend(figure, style)
    return figure, axis
