"""What all figures share: colours, line styles, fonts, and how a figure becomes bytes.

With more than six arms line styles differ as well as colours, and every line has its name beside it. The SVG
has fixed colour values, so that the page can replace them in dark mode.

The same figure gives the same bytes: no date, a fixed salt for the ids. User strings are drawn literally
(``text.parse_math`` off), because a ``$`` in an arm's name is no formula.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from ablate.base.colours import HUES, INK, arm_colours
from ablate.base.errors import cut
from ablate.reports.words.format import NBSP, percent, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ablate.reports.findings.results import Analysis

Look = dict[str, Any]
"""How an arm is drawn in every figure: matplotlib's arguments for colour, line and marker."""
Picture = tuple[str, str, Any, str]
"""A name, a title, a figure and its caption."""

FAINT = "#6a737d"
GRID = "#d8dde3"
CONTEXT = "#b9c0c8"
SHADE = "#eceff2"
WIDTH = 8
"""Of most figures, in inches: on a page 800 px wide their letters then have 11 px."""
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "o")

_RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.2,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8.8),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), "#ffffff"),
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure.

    ``axes``: for each panel its left, top, right and bottom edge in the SVG's units (``box``), and the values
    at the edges (``x``, ``y``).
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    axes: list[dict[str, list[float]]]


def drawing(draw: Callable[[Any], Picture | None]) -> Callable[[Any], Drawing | None]:
    """Decorate a function that returns a figure with its words, or None, to make a ``Drawing``.

    The style applies inside the function only: no global setting changes. SVG and PNG hold no dates.
    """

    @wraps(draw)
    def drawn(record: Any) -> Drawing | None:
        svg = io.BytesIO()
        with mpl.rc_context(_RC):
            picture = draw(record)
            if picture is None:
                return None
            name, title, figure, caption = picture
            mpl.rcParams["svg.hashsalt"] = name
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
            # laid out once: the PNG keeps the SVG's places
            figure.set_layout_engine(None)
            axes = [_scales(axis) for axis in figure.axes]
            png = to_png(figure)
        return Drawing(name, title, caption, svg.getvalue(), png, axes)

    return drawn


def to_png(figure: Any) -> bytes:
    """Return the figure as PNG for slides, at 160 dpi."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    return png.getvalue()


def _scales(axis: Any) -> dict[str, list[float]]:
    width, height = 72 * axis.figure.get_size_inches()
    (left, bottom), (right, top) = axis.get_position().get_points()
    box = np.round(
        [left * width, (1 - top) * height, right * width, (1 - bottom) * height], 3
    )
    return {
        "box": box.tolist(),
        "x": [*map(float, axis.get_xlim())],
        "y": [*map(float, axis.get_ylim())],
    }


def looks_of(analysis: Analysis) -> dict[str, Look]:
    """Assign a look to each arm of a study: the same whether all are drawn or some."""
    drawn = {arm.name for arm in analysis.arms}
    every = looks((arm.name for arm in analysis.plan.arms), analysis.baseline)
    return {name: look for name, look in every.items() if name in drawn}


def looks(arms: Iterable[str], baseline: str = "") -> dict[str, Look]:
    """Assign looks: the baseline in ink, the others first by hue, then by line style."""
    colours = arm_colours(arms, baseline)
    result = {}
    for i, (arm, colour) in enumerate(colours.items(), -1):
        result[arm] = {
            "color": colour,
            "linestyle": DASHES[i // len(HUES) % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "linewidth": 1.9,
        }
    result[baseline] |= {"linestyle": "-", "marker": "o", "linewidth": 2.4}
    return result


def sheet(width: float, height: float) -> Any:
    """Make an empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@dataclass(frozen=True)
class Panel:
    """The line of a small panel: ``x``; estimates, lows and highs at each x; and the text at the top."""

    x: Sequence[float] | np.ndarray
    ends: np.ndarray
    text: str


def small_multiples(
    panels: Mapping[str, Panel],
    looks: Mapping[str, Look],
    x_label: str,
    y_label: str,
    *,
    least: float,
    bars: bool = False,
    mixed: Collection[str] = (),
) -> tuple[Any, dict[str, Any]]:
    """Draw a panel for each line, over its pointwise band, on shared scales; also return the axes by name.

    ``bars``: points with bars. ``mixed``: lines without a band. The y scale follows the later part of all
    other lines and spans at least ``least``.
    """
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = sheet(WIDTH if columns > 1 else 6, 0.75 + 2.2 * rows)
    figure.supxlabel(x_label, fontsize=9)
    figure.supylabel(y_label, fontsize=9)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    axes = dict(zip(panels, grid, strict=False))
    for unused in grid[len(panels) :]:
        unused.remove()
    points = [0.0]
    edges: list[float] = []
    for i, (name, axis) in enumerate(axes.items()):
        look = looks[name]
        color = look["color"]
        panel = panels[name]
        x = panel.x
        middle, low, high = panel.ends
        axis.set_title(f"{short(name, 30)}\n{panel.text}".replace(NBSP, " "))
        axis.tick_params(labelbottom=i + columns >= len(panels))
        axis.axhline(0, color=INK, linewidth=0.9, zorder=1.5)
        if bars:
            axis.vlines(x, low, high, color=color, linewidth=1.8)
            axis.plot(x, middle, look["marker"], color=color, markersize=5)
        else:
            axis.plot(
                x,
                middle,
                **look,
                markersize=3.8,
                markevery=max(1, len(x) // 6),
                zorder=3,
            )
        if name in mixed:
            continue
        if not bars:
            axis.fill_between(x, low, high, color=color, alpha=0.22, linewidth=0)
        late = slice(len(x) // 4, None)
        points += middle[late].tolist()
        edges += [*low[late], *high[late]]
    axis.set_ylim(limits(points, edges, least))
    return figure, axes


def percent_ticks(axis: Any) -> None:
    """Label a matplotlib axis of fractions in percent."""
    axis.set_major_formatter(lambda value, _: percent(value).replace(".0", ""))


def count_ticks(axis: Any, bins: int = 4) -> None:
    """Label an x axis of tokens or parameters."""
    if axis.get_xscale() == "linear":
        axis.locator_params("x", nbins=bins)
    axis.xaxis.set_minor_formatter("")
    axis.xaxis.set_major_formatter(lambda value, _: tokens(value))


def token_axis(axis: Any, per_step: int | None) -> None:
    """Label an x axis of training tokens, and above it the steps, of ``per_step`` tokens each; None: none."""
    axis.set_xlabel("training tokens")
    count_ticks(axis)
    if per_step:
        steps = axis.secondary_xaxis(
            "top", functions=(lambda x: x / per_step, lambda x: x * per_step)
        )
        steps.set_xlabel("steps")
        count_ticks(steps)


def limits(
    points: Iterable[float], edges: Iterable[float], least: float
) -> tuple[float, float]:
    """Choose the ends of a scale that holds all points, and the near ones of the intervals' edges.

    Near: no further out than the range of the points, or than ``least`` if that is larger.
    """
    known = [value for value in points if np.isfinite(value)] or [0.0]
    extent = max(max(known) - min(known), least)
    near = np.clip([*known, *edges], min(known) - extent, max(known) + extent)
    return float(np.nanmin(near)) - 0.1 * extent, float(np.nanmax(near)) + 0.2 * extent


def short(name: str, length: int = 26) -> str:
    """Shorten a name to ``length``, and replace characters that do not print: XML does not allow all."""
    return cut("".join(c if c.isprintable() else " " for c in name), length)


def legend(figure: Any, lines: Mapping[str, Look]) -> None:
    """Add a legend of lines, by name, below a figure, which it makes higher: a narrow page shows it, too."""
    from matplotlib.lines import Line2D

    handles = []
    for name, look in lines.items():
        handles.append(Line2D([], [], markersize=5, label=short(name, 50), **look))
    figure.set_figheight(figure.get_figheight() + 0.2 * len(lines))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        frameon=False,
        fontsize=9,
        handlelength=3,
    )


def shade_decay(axis: Any, begins: int | None) -> None:
    """Shade in grey the tokens in which the learning rate falls; None shades nothing."""
    start, end = axis.get_xlim()
    if begins is not None and begins < end:
        axis.axvspan(max(begins, start), end, color=SHADE, linewidth=0, zorder=0)
        axis.set_xlim(start, end)


def decay_caption(begins: int | None) -> str:
    """Say in a caption what the grey shading means; empty if nothing is shaded."""
    if begins is None:
        return ""
    return f" Grey ground: the learning rate falls, from {tokens(begins)} tokens on."
