"""The share of runs that have reached the target over tokens: one panel an arm.

Drawn only if some runs reached the target and some did not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis
    from ablate.reports.findings.targets import Reached


@canvas.drawing("reached", "Runs that reached the target")
def draw_reached(analysis: Analysis) -> canvas.Picture | None:
    """Draw the Kaplan–Meier curves; None where every run reached the target, or none."""
    curves = {arm.name: arm.reached for arm in analysis.arms if arm.reached is not None}
    hits = [arm.hit for arm in analysis.arms]
    if not any(hits) or hits == [arm.n for arm in analysis.arms]:
        return None
    caption = (
        "Share of runs that have reached the target, over training tokens (Kaplan–Meier), with its pointwise "
        f"{words.coverage(analysis.plan.stop)} band. Ticks: runs whose budget ended before. A diverged run "
        f"never reaches it. Grey: {analysis.baseline}."
    )
    ends = ", ".join(f"{name} {words.share(curve.share[-1])}" for name, curve in curves.items())
    alt = f"Small step charts of the share of runs that have reached the target. At the end: {ends}."
    style = canvas.looks([arm.name for arm in analysis.arms], analysis.baseline)
    arms = {arm.name: arm for arm in analysis.arms}
    figure, axes, lowest = canvas.panels(curves, "runs at the target (%)")
    largest = max(curve.end for curve in curves.values())
    # From a little before the first run that reached it: before that all is zero.
    first = min(min([*curve.tokens[1:], largest * 0.999]) for curve in curves.values())
    base = curves.get(analysis.baseline)
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        arm, color = arms[name], style[name].color
        if base is not None and name != analysis.baseline:
            _steps(axis, base, color=canvas.CONTEXT, linewidth=1.2, zorder=1)
        at = _steps(axis, curve, color=color, linewidth=style[name].width, zorder=3)
        low, high = (
            np.array([np.nan if value is None else 100 * value for value in (*column, column[-1])])
            for column in (curve.low, curve.high)
        )
        axis.fill_between(at, low, high, step="post", color=color, alpha=0.2, linewidth=0)
        left = [run.tokens for run in arm.runs if run.end == "censored"]
        places = [int(np.searchsorted(curve.tokens, tokens, side="right")) - 1 for tokens in left]
        shares = [100 * curve.share[place] for place in places]
        axis.plot(left, shares, linestyle="", marker="|", markersize=9, color=color, zorder=4)
        canvas.note(
            axis, f"n = {curve.n}" + (f", {arm.diverged} diverged" if arm.diverged else ""), 0.02, 0.95
        )
        axis.set_xlim(max(0.0, first - 0.4 * (largest - first)), largest + 0.02 * (largest - first))
    for axis in lowest:
        canvas.token_axis(axis, largest, nbins=4)
    axes[0].set_ylim(-4, 104)
    return figure, caption, alt


def _steps(axis: Any, curve: Reached, **look: Any) -> list[float]:
    """Draw the curve as steps; returns where they are."""
    at = [*curve.tokens, max(curve.end, curve.tokens[-1])]
    axis.step(at, [100 * share for share in (*curve.share, curve.share[-1])], where="post", **look)
    return at
