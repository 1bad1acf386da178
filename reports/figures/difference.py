"""The difference to the baseline over tokens, one small panel an arm, with its 95 % band.

Small panels, because a dozen bands in one picture hide each other. All share their scales, and each shows
the other arms in grey.

How it fails: with one result an arm there is no band, only the line, and the panel says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words import words
from ablate.results.losses import Band, difference_bands

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.reports.findings.results import Analysis
    from ablate.results.losses import Curve

_EARLY = 0.25


@canvas.drawing("difference", "Difference to the baseline")
def draw_difference(analysis: Analysis) -> canvas.Picture | None:
    """Draw the loss differences; None where no arm has an evaluation in common with the baseline."""
    bands = _bands(analysis, analysis.curves)
    if not bands:
        return None
    in_bf16 = {
        name: band for name, band in _bands(analysis, analysis.curves_in_bf16).items() if name in bands
    }
    in_bf16 = {name: band for name, band in in_bf16.items() if not _alike(band, bands[name])}
    without = [arm.name for arm in analysis.others if arm.name not in bands]
    way = "differences of seeds in common" if analysis.plan.paired_seeds else "Welch"
    caption = (
        f"Validation loss minus that of {analysis.baseline} at equal tokens (nats/token): mean difference "
        f"with its pointwise {words.coverage(analysis.plan.stop)} band ({way}), as far as all runs of both "
        "go; above zero the arm is worse. Grey: the other arms. The scale follows the later part; early "
        "differences and wide bands may leave it. No band with one run, or where runs diverged."
    )
    if in_bf16:
        caption += (
            " Thin and black: evaluated in bf16, what the arm learnt worse; the rest of the difference is "
            "its own evaluation."
        )
    caption += canvas.decay_caption(analysis.decay_begins)
    if without:
        caption += f" No evaluation in common: {', '.join(without)}."
    last = ", ".join(f"{name} {words.signed(float(band.difference[-1]), 4)}" for name, band in bands.items())
    alt = f"Small line charts of the loss difference to {analysis.baseline}. At the last evaluation: {last}."
    if in_bf16:
        last = ", ".join(
            f"{name} {words.signed(float(band.difference[-1]), 4)}" for name, band in in_bf16.items()
        )
        alt += f" Evaluated in bf16: {last}."
    return _draw(analysis, bands, in_bf16), caption, alt


def _bands(analysis: Analysis, curves: Iterable[Curve]) -> dict[str, Band]:
    by_arm: dict[str, list[Curve]] = {arm.name: [] for arm in analysis.arms}
    for curve in curves:
        by_arm[curve.arm].append(curve)
    bands = difference_bands(
        {
            # An arm that was stopped at a look is compared with as many seeds of the baseline.
            arm.name: (
                by_arm[arm.name],
                by_arm[analysis.baseline][: None if arm.stopped is None else arm.stopped.seeds],
            )
            for arm in analysis.others
        },
        {arm.name: arm.alpha for arm in analysis.others},
        paired=analysis.plan.paired_seeds,
        moderated=analysis.plan.is_moderated,
    )
    return {name: band for name, band in bands.items() if band.tokens.any()}


def _alike(one: Band, other: Band) -> bool:
    """Whether an arm's two evaluations say the same, as they do where its Fprop is in bf16."""
    return np.array_equal(one.difference, other.difference)


def _draw(analysis: Analysis, bands: dict[str, Band], in_bf16: dict[str, Band]) -> Any:
    style = canvas.looks([arm.name for arm in analysis.arms], analysis.baseline)
    figure, axes, lowest = canvas.panels(bands, "loss difference (nats/token)")
    low, high = _limits(bands)
    largest = max(float(band.tokens[-1]) for band in bands.values())
    diverged = {arm.name: arm.diverged for arm in analysis.others}
    for axis, (name, band) in zip(axes, bands.items(), strict=True):
        for other, context in bands.items():
            if other != name:
                axis.plot(context.tokens, context.difference, color=canvas.CONTEXT, linewidth=0.7, zorder=1)
        if name in in_bf16:
            axis.plot(
                in_bf16[name].tokens, in_bf16[name].difference, color=canvas.INK, linewidth=1.0, zorder=2.5
            )
        _panel(axis, band, style[name], diverged=diverged[name], limits=(low, high))
        axis.set_ylim(low, high)
        axis.set_xlim(0, largest * 1.01)
        canvas.shade_decay(axis, analysis.decay_begins)
    for axis in lowest:
        canvas.token_axis(axis, largest, nbins=4)
    return figure


def _panel(axis: Any, band: Band, look: canvas.Look, *, diverged: int, limits: tuple[float, float]) -> None:
    axis.axhline(0, color=canvas.INK, linewidth=0.9, zorder=1.5)
    # An interval over a mixture of runs that learn and runs that diverge would mean nothing.
    has_band = bool(np.isfinite(band.low).any()) and not diverged
    if has_band:
        axis.fill_between(
            band.tokens, band.low, band.high, color=look.color, alpha=0.22, linewidth=0, zorder=2
        )
    every = max(1, len(band.tokens) // 6)
    axis.plot(band.tokens, band.difference, **look.line, markersize=3.8, markevery=every, zorder=3)
    text = words.results(band).replace(words.NBSP, " ")
    if diverged:
        text += f", {diverged} diverged"
    if not has_band:
        text += "\nno band"
    late = float(band.difference[-1])
    if not limits[0] <= late <= limits[1]:
        text += f"\nleaves the scale: {words.signed(late, 2)}"
    canvas.note(axis, text, 0.985, 0.965, ha="right")


def _limits(bands: dict[str, Band]) -> tuple[float, float]:
    """Follow the later part of the lines, and of the bands only what is no wider than a few times that."""
    largest = max(float(band.tokens[-1]) for band in bands.values())
    late = [band.tokens >= min(_EARLY * largest, float(band.tokens[-1])) for band in bands.values()]
    pairs = list(zip(bands.values(), late, strict=True))
    lines = np.concatenate([[0.0], *(band.difference[keep] for band, keep in pairs)])
    middle = np.percentile(np.abs(lines), 90)
    lines = lines[np.abs(lines) <= 5 * middle] if middle > 0 else lines
    low, high = float(lines.min()), float(lines.max())
    extent = max(high - low, 1e-4)
    edges = np.concatenate([np.concatenate([band.low[keep], band.high[keep]]) for band, keep in pairs])
    edges = edges[np.isfinite(edges)]
    if len(edges):
        low = max(min(low, float(np.percentile(edges, 5))), low - 0.8 * extent)
        high = min(max(high, float(np.percentile(edges, 95))), high + 0.8 * extent)
    room = 0.1 * max(high - low, 1e-4)
    return low - room, high + 2 * room
