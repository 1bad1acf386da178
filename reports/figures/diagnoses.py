"""Heat maps of an arm's diagnostics: layer and GEMM against training tokens, a panel for each figure.

The colours are cividis, whose lightness rises for colour-blind readers too (Nuñez, Anderton, Renslow 2018).
The scales are the same in all arms, so that maps can be compared. Blank: nothing was measured there.

How it fails: if rows do not fit, only the worst are drawn; if columns do not fit, only some; the caption says
so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, Map

_MOST_ROWS = 48
_MOST_COLUMNS = 40
_LABELS = {
    "relative_error": "relative error",
    "bias_share": "bias share of the error",
    "gain": "gain",
}


def draw_diagnoses(arms: Sequence[ArmDiagnosis]) -> tuple[canvas.Drawing, ...]:
    """Draw a figure for each arm with quantised GEMMs."""
    arms = [arm for arm in arms if arm.gemms]
    scales = {figure: _scale(arms, figure) for figure in _LABELS}

    @canvas.drawing
    def draw(numbered: tuple[int, ArmDiagnosis]) -> canvas.Picture:
        number, arm = numbered
        errors = np.nan_to_num(
            np.array(arm.maps[0].values, dtype=float), nan=-np.inf
        ).max(axis=1)
        rows = np.sort(np.argsort(-errors, kind="stable")[:_MOST_ROWS])
        figure = canvas.sheet(canvas.WIDTH, 1.35 + 0.17 * len(rows))
        axes = figure.subplots(1, len(arm.maps), sharey=True, squeeze=False)[0]
        for axis, heat_map in zip(axes, arm.maps, strict=True):
            _draw_map(axis, heat_map, rows, scales[heat_map.figure])
        names = []
        for row in rows:
            layer, gemm = arm.maps[0].rows[row]
            names.append(f"{canvas.short(layer, 24)}  {gemm.capitalize()}")
        axes[0].set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=8.8)
        axes[0].invert_yaxis()
        caption = (
            f"{arm.arm}: the error of each layer's GEMM against the exact product, over training tokens; "
            f"means over runs, n = {arm.runs}. Relative error: norm of the error over that of the product. "
            "Bias share: of the error's energy, what is the same in every draw of the recipe's randomness; 1 "
            "where nothing is drawn. Gain: slope of the output on the exact one; below 1 it shrinks. Shown "
            f"are {len(rows)} of {len(arm.maps[0].rows)} rows, those with the largest error, and {_MOST_COLUMNS} steps "
            "at most."
        )
        return f"diagnostics-{number}", f"Diagnostics: {arm.arm}", figure, caption

    return tuple(filter(None, map(draw, enumerate(arms, 1))))


def _scale(arms: Sequence[ArmDiagnosis], figure: str) -> tuple[float, float]:
    """Return the least and the largest value of a figure in all arms."""
    known: list[float] = []
    for arm in arms:
        for heat_map in arm.maps:
            if heat_map.figure == figure:
                values = np.array(heat_map.values, dtype=float)
                known += [*values[np.isfinite(values)]]
    return (min(known), max(known)) if known else (0.0, 1.0)


def _draw_map(
    axis: Any, heat_map: Map, rows: np.ndarray, scale: tuple[float, float]
) -> None:
    shown = slice(None, None, math.ceil(len(heat_map.tokens) / _MOST_COLUMNS))
    tokens = heat_map.tokens[shown]
    values = np.array(heat_map.values, dtype=float)[rows, shown]
    end = 2 * tokens[-1] - tokens[-2] if len(tokens) > 1 else tokens[-1] + 1
    low, high = scale
    edges = range(len(rows) + 1)
    mesh = axis.pcolormesh(
        [*tokens, end], edges, values, cmap="cividis", vmin=low, vmax=high
    )
    axis.grid(visible=False)
    canvas.count_ticks(axis, 3)
    bar = axis.figure.colorbar(
        mesh, ax=axis, location="bottom", label=_LABELS[heat_map.figure]
    )
    bar.outline.set_visible(False)
    bar.ax.grid(visible=False)
