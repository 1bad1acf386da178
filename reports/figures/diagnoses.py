"""Heat maps of an arm's diagnostics: layer and GEMM against training tokens, a panel for each figure.

The colours are cividis, which rise in lightness for every reader, colour-blind or not (Nuñez, Anderton,
Renslow 2018). The scales are the same in all arms, so that maps compare. Blank: nothing was measured there.

How it fails: of more rows than fit the worst are drawn, and the caption says so.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, Map

_MOST_ROWS = 48
_MOST_COLUMNS = 40
_PANELS = {
    "relative_error": ("relative error (%)", 100.0),
    "bias_share": ("bias share of the error (%)", 100.0),
    "gain": ("gain", 1.0),
}


def draw_diagnoses(arms: Sequence[ArmDiagnosis]) -> tuple[canvas.Drawing, ...]:
    """Draw a figure for each arm; other recipes on its tensors (``what_if``) stand in the table alone."""
    arms = [arm for arm in arms if arm.what_if is None]
    picture = partial(_picture, limits={figure: _limits(figure, arms) for figure in _PANELS})
    drawings = (
        canvas.drawing(f"diagnostics-{i}", f"Diagnostics: {arm.arm}")(picture)(arm)
        for i, arm in enumerate(arms, 1)
    )
    return tuple(one for one in drawings if one is not None)


def _limits(figure: str, arms: Sequence[ArmDiagnosis]) -> tuple[float, float]:
    if figure == "bias_share":
        return 0.0, 1.0
    maps = [one for arm in arms for one in arm.maps if one.figure == figure]
    known = [value for one in maps for row in one.values for value in row if value is not None]
    if not known:
        return 0.0, 1.0
    low, high = (0.0 if figure == "relative_error" else min(known)), max(known)
    return (low, high) if high > low else (low - 0.01, high + 0.01)


def _picture(arm: ArmDiagnosis, limits: dict[str, tuple[float, float]]) -> canvas.Picture:
    rows, columns = _chosen(arm)
    all_rows = len(arm.maps[0].rows)
    few = f" Shown are the {len(rows)} of {all_rows} with the largest error."
    shown = few if len(rows) < all_rows else ""
    n = "1 run" if arm.runs == 1 else f"means over {arm.runs} runs"
    caption = (
        f"{arm.arm}: the error of each layer's GEMM against the exact product, over training tokens; {n}. "
        "Relative error: norm of the error over that of the product. Bias share: of the error's energy, what "
        "is the same in every draw of the recipe's randomness; 100\u00a0% where nothing is drawn. Gain: "
        f"slope of the output on the exact one; below 1 it shrinks.{shown}"
    )
    alt = f"Heat maps of relative error, bias share and gain by layer and GEMM over tokens, of arm {arm.arm}."
    return _draw(arm, rows, columns, limits), caption, alt


def _chosen(arm: ArmDiagnosis) -> tuple[list[int], list[int]]:
    """Return the rows and columns that are drawn: the rows with the largest error, columns spread evenly."""
    errors = arm.maps[0]

    def largest(row: int) -> float:
        return max((value for value in errors.values[row] if value is not None), default=-math.inf)

    rows = sorted(sorted(range(len(errors.rows)), key=largest, reverse=True)[:_MOST_ROWS])
    count = len(errors.tokens)
    columns = sorted({round(i * (count - 1) / max(1, _MOST_COLUMNS - 1)) for i in range(_MOST_COLUMNS)})
    return rows, list(range(count)) if count <= _MOST_COLUMNS else columns


def _draw(
    arm: ArmDiagnosis, rows: list[int], columns: list[int], limits: dict[str, tuple[float, float]]
) -> Any:
    height = 1.35 + 0.17 * len(rows)
    top, bottom = 1 - 0.15 / height, 1.2 / height
    figure = canvas.sheet(11, height, left=0.25, right=0.985, top=top, bottom=bottom, wspace=0.06)
    axes = list(figure.subplots(1, len(_PANELS), sharey=True, squeeze=False).flat)
    for axis, one in zip(axes, arm.maps, strict=True):
        _panel(figure, axis, one, rows, columns, limits[one.figure])
    names = (arm.maps[0].rows[row] for row in rows)
    labels = [f"{canvas.short(layer, 30)}  {gemm.capitalize()}" for layer, gemm in names]
    axes[0].set_yticks([i + 0.5 for i in range(len(rows))], labels, fontsize=7)
    axes[0].invert_yaxis()
    return figure


def _panel(
    figure: Any, axis: Any, one: Map, rows: list[int], columns: list[int], limits: tuple[float, float]
) -> None:
    label, factor = _PANELS[one.figure]
    # None becomes NaN.
    values = np.array(one.values, dtype=float)[np.ix_(rows, columns)] * factor
    tokens = [one.tokens[column] for column in columns]
    steps = [b - a for a, b in itertools.pairwise(tokens)]
    edges = [*tokens, tokens[-1] + (steps[-1] if steps else 1)]
    low, high = limits[0] * factor, limits[1] * factor
    mesh = axis.pcolormesh(edges, range(len(rows) + 1), values, cmap="cividis", vmin=low, vmax=high)
    axis.grid(visible=False)
    canvas.token_axis(axis, float(edges[-1]), nbins=4)
    where, height = axis.get_position(), figure.get_figheight()
    below = figure.add_axes((where.x0, 0.45 / height, where.width, 0.09 / height))
    bar = figure.colorbar(mesh, cax=below, orientation="horizontal")
    bar.set_label(label)
    bar.outline.set_visible(False)
    below.grid(visible=False)
