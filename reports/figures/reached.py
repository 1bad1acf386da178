"""The share of runs that have reached the target over tokens, where not all have: one panel an arm.

Not drawn where every run of every arm reached it, for then the tokens to target say all, nor where none did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures.canvas import (
    CONTEXT,
    FAINT,
    Drawing,
    drawing_style,
    looks,
    panels,
    short,
    to_bytes,
    token_axis,
)
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis
    from ablate.reports.statistics.survival import Reached


def draw_reached(analysis: Analysis) -> Drawing | None:
    """Draw the Kaplan–Meier curves; None where every run reached the target, or none."""
    curves = {arm.name: arm.reached for arm in analysis.arms if arm.reached is not None}
    hits = [arm.hit for arm in analysis.arms]
    if not any(hits) or hits == [arm.n for arm in analysis.arms]:
        return None
    with drawing_style("reached"):
        svg, png = _draw(analysis, curves)
    caption = (
        "Share of runs that have reached the target, over training tokens (Kaplan–Meier), with its pointwise "
        f"{words.coverage(analysis.rule)} band. Ticks: runs whose budget ended before. A diverged run never "
        "reaches it. Grey: "
        f"{analysis.baseline}."
    )
    ends = ", ".join(f"{name} {words.share(curve.share[-1])}" for name, curve in curves.items())
    alt = f"Small step charts of the share of runs that have reached the target. At the end: {ends}."
    return Drawing(
        name="reached", title="Runs that reached the target", caption=caption, alt=alt, svg=svg, png=png
    )


def _draw(analysis: Analysis, curves: dict[str, Reached]) -> tuple[bytes, bytes]:
    style = looks([arm.name for arm in analysis.arms], analysis.baseline)
    figure, axes, columns = panels(len(curves))
    largest = max(curve.end for curve in curves.values())
    # From a little before the first run that reached it: before that all is nought.
    first = min(min([*curve.tokens[1:], largest * 0.999]) for curve in curves.values())
    base = curves.get(analysis.baseline)
    for i, axis in enumerate(axes):
        if i >= len(curves):
            axis.set_axis_off()
            continue
        name, curve = list(curves.items())[i]
        if base is not None and name != analysis.baseline:
            _steps(axis, base, color=CONTEXT, linewidth=1.2, zorder=1)
        _steps(axis, curve, color=style[name].color, linewidth=style[name].width, zorder=3)
        low, high = (
            np.array([np.nan if value is None else 100 * value for value in (*column, column[-1])])
            for column in (curve.low, curve.high)
        )
        at = [*curve.tokens, max(curve.end, curve.tokens[-1])]
        axis.fill_between(at, low, high, step="post", color=style[name].color, alpha=0.2, linewidth=0)
        arm = next(arm for arm in analysis.arms if arm.name == name)
        left = [run.tokens for run in arm.runs if run.end == "censored"]
        shares = [
            100 * curve.share[np.searchsorted(curve.tokens, tokens, side="right") - 1] for tokens in left
        ]
        axis.plot(left, shares, linestyle="", marker="|", markersize=9, color=style[name].color, zorder=4)
        axis.set_title(short(name, 30))
        text = f"n = {curve.n}" + (f", {arm.diverged} diverged" if arm.diverged else "")
        axis.annotate(text, (0.02, 0.95), xycoords="axes fraction", va="top", fontsize=8, color=FAINT)
        axis.set_xlim(max(0.0, first - 0.4 * (largest - first)), largest + 0.02 * (largest - first))
        if i + columns >= len(curves):
            token_axis(axis, largest, nbins=4)
            axis.tick_params(labelbottom=True)
    axes[0].set_ylim(-4, 104)
    figure.supylabel("runs at the target (%)", fontsize=9, x=0.004 if columns > 1 else 0.01)
    return to_bytes(figure)


def _steps(axis: Any, curve: Reached, **look: Any) -> None:
    at = [*curve.tokens, max(curve.end, curve.tokens[-1])]
    axis.step(at, [100 * share for share in (*curve.share, curve.share[-1])], where="post", **look)
