"""What all figures share: colours, line styles, fonts, and how a figure becomes bytes.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; past six arms the line style
tells them apart as well, and every line has its name beside it. The colours stand in the SVG as fixed
words, so that the page can put others in their place in the dark.

The same figure gives the same bytes: no date, a fixed salt for the ids. User strings are drawn as they are
(``text.parse_math`` off), for a ``$`` in the name of an arm is no formula.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
import numpy as np

from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

T = TypeVar("T")
Picture = tuple[Any, str, str]
"""A figure, its caption, and what it shows in words."""

INK = "#1b1f24"
FAINT = "#6a737d"
GRID = "#d8dde3"
CONTEXT = "#b9c0c8"
SHADE = "#eceff2"
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")

_RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.grid": True,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8.5),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), "#ffffff"),
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A finished figure. ``alt`` says in words what it shows; ``axes``: where its scales lie in the SVG."""

    name: str
    title: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    axes: tuple[Scales, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scales:
    """One panel: its left, top, right and bottom edge in the SVG's units, and the values at the edges."""

    box: tuple[float, float, float, float]
    x: tuple[float, float]
    y: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one arm is drawn, the same in every figure."""

    color: str
    dash: Any
    marker: str
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """The settings of a line, with its markers."""
        return {
            "color": self.color, "linewidth": self.width, "linestyle": self.dash, "marker": self.marker,
        }  # fmt: skip


def drawing(
    name: str, title: str
) -> Callable[[Callable[[T], Picture | None]], Callable[[T], Drawing | None]]:
    """Make a drawing of what a function returns: a figure, its caption and its ``alt``, or None for none.

    The style applies inside of it, and nothing global is left changed. SVG and PNG are free of dates.
    """

    def decorate(draw: Callable[[T], Picture | None]) -> Callable[[T], Drawing | None]:
        @wraps(draw)
        def drawn(found: T) -> Drawing | None:
            svg = io.BytesIO()
            with mpl.rc_context(_RC | {"svg.hashsalt": name}):
                picture = draw(found)
                if picture is None:
                    return None
                figure, caption, alt = picture
                figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
                png = to_png(figure)
            return Drawing(
                name=name, title=title, caption=caption, alt=alt, svg=svg.getvalue(), png=png,
                axes=tuple(_scales(axis) for axis in figure.axes),
            )  # fmt: skip

        return drawn

    return decorate


def to_png(figure: Any) -> bytes:
    """Return a figure as a picture for slides."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    return png.getvalue()


def _scales(axis: Any) -> Scales:
    width, height = 72 * axis.figure.get_size_inches()
    place = axis.get_position()
    edges = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    left, top, right, bottom = (round(float(edge), 3) for edge in edges)
    (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()
    return Scales(box=(left, top, right, bottom), x=(float(x0), float(x1)), y=(float(y0), float(y1)))


def part_names(names: Sequence[str]) -> Callable[[str], str]:
    """Return what gives each part of an arm in a figure an id of its own, from ``arm0-0`` on."""
    counts = {name: itertools.count() for name in names}
    places = {name: i for i, name in enumerate(names)}
    return lambda name: f"arm{places[name]}-{next(counts[name])}"


def looks(arms: Sequence[str], baseline: str) -> dict[str, Look]:
    """Return each arm's look: the baseline in ink, the others through hues and then through line styles."""
    result = {baseline: Look(color=INK, dash="-", marker="o", width=2.4)}
    dashes = itertools.cycle(itertools.product(DASHES, HUES))
    markers = itertools.cycle((*MARKERS[1:], MARKERS[0]))
    others = (arm for arm in arms if arm != baseline)
    for arm, (dash, color), marker in zip(others, dashes, markers, strict=False):
        result[arm] = Look(color=color, dash=dash, marker=marker, width=1.9)
    return result


def sheet(width: float, height: float, **edges: float) -> Any:
    """Return an empty figure, its sizes in inches; ``edges``: where its axes begin and end, as shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(**edges)
    return figure


def panels(names: Collection[str], label: str) -> tuple[Any, list[Any], list[Any]]:
    """Return a figure of small panels with shared scales, its axes row by row, and those at the bottom.

    ``names``: their titles; ``label``: of the y axis.
    """
    count = len(names)
    columns = min(count, 3 if count <= 6 else 4)
    rows = -(-count // columns)
    height = 0.75 + 2.05 * rows
    width, left, label_at = (11, 0.085, 0.004) if columns > 1 else (6, 0.15, 0.01)
    top, bottom = 1 - 0.3 / height, 0.55 / height
    figure = sheet(width, height, left=left, right=0.985, top=top, bottom=bottom, wspace=0.1, hspace=0.32)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    figure.supylabel(label, fontsize=9, x=label_at)
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis, name in zip(axes, names, strict=False):
        axis.set_title(short(name, 30))
    lowest = axes[max(0, count - columns) : count]
    for axis in lowest:
        axis.tick_params(labelbottom=True)
    return figure, axes[:count], lowest


def note(axis: Any, text: str, x: float, y: float, **more: Any) -> None:
    """Write small and faint into a panel; ``x`` and ``y`` as shares of it."""
    axis.annotate(text, (x, y), xycoords="axes fraction", va="top", fontsize=8, color=FAINT, **more)


def percent_ticks(axis: Any) -> None:
    """Label an axis of fractions in percent."""
    axis.set_major_formatter(lambda value, _: words.percent(value).replace(".0", ""))


def limits(points: Iterable[float], edges: Iterable[float], most: float, least: float) -> tuple[float, float]:
    """Return the ends of a scale that holds all points, and of edges of intervals those that are near.

    Near: no further out than ``most`` times the range of the points, which counts as ``least`` at least.
    """
    known = list(points)
    low, high = min(known), max(known)
    extent = most * max(high - low, least)
    far = [low, high, *edges]
    return max(min(far), low - extent), min(max(far), high + extent)


def short(name: str, length: int = 26) -> str:
    """Return a name that fits beside a line, without characters that XML does not allow."""
    clean = "".join(c if c.isprintable() else " " for c in name)
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def token_axis(axis: Any, largest: float, nbins: int = 6) -> None:
    """Label an x axis of tokens in one unit for all its ticks."""
    from matplotlib.ticker import Formatter

    units = {"billions": 1e9, "millions": 1e6, "thousands": 1e3}
    unit, size = next(((unit, size) for unit, size in units.items() if largest >= size), ("", 1.0))

    class InUnits(Formatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            # As many decimals as the tick that needs most: 0.9 beside 1.0.
            decimals = max((len(f"{tick / size:.6g}".partition(".")[2]) for tick in values), default=0)
            return [f"{tick / size:.{decimals}f}" for tick in values]

        def __call__(self, x: float, pos: int | None = None) -> str:
            del pos
            return self.format_ticks([x])[0]

    axis.locator_params("x", nbins=nbins, min_n_ticks=3)
    axis.xaxis.set_major_formatter(InUnits())
    axis.set_xlabel(f"training tokens ({unit})" if unit else "training tokens")


def shade_decay(axis: Any, begins: int | None) -> None:
    """Put a grey ground under the tokens in which the learning rate falls, up to the axis' own end."""
    start, end = axis.get_xlim()
    if begins is not None and begins < end:
        axis.axvspan(max(begins, start), end, color=SHADE, linewidth=0, zorder=0)
        axis.set_xlim(start, end)


def decay_caption(begins: int | None) -> str:
    """Return the caption's sentence on that ground; empty where there is none."""
    if begins is None:
        return ""
    return f" Grey ground: the learning rate falls, from {words.tokens(begins)} tokens on."


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels as little as possible so that neighbours are at least ``gap`` apart, within low … high."""
    from scipy.optimize import isotonic_regression

    count = len(positions)
    if not count:
        return []
    gap = min(gap, (high - low) / max(1, count - 1))
    order = np.argsort(positions, kind="stable")
    steps = gap * np.arange(count)
    # With i gaps taken off, "at least a gap apart" becomes "not falling".
    flat = isotonic_regression(np.asarray(positions)[order] - steps).x
    result = np.empty(count)
    result[order] = np.clip(flat, low, high - (count - 1) * gap) + steps
    return [float(place) for place in result]
