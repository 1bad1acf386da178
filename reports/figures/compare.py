"""Forest plot of two studies: each arm's token cost in both, one under the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.figures.canvas import FAINT, HUES, INK, Drawing, drawing_style, short, to_bytes
from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.findings.compare import Comparison
    from ablate.reports.statistics.cost import Cost


def draw_comparison(comparison: Comparison) -> Drawing | None:
    """Draw the costs that have an estimate in either study; None where none has."""
    arms = [
        arm
        for arm in comparison.arms
        if any(cost is not None and cost.estimate is not None for cost in (arm.left, arm.right))
    ]
    if not arms:
        return None
    with drawing_style("compare"):
        svg, png = _draw(comparison, arms)
    caption = (
        f"Token cost of each arm, in {comparison.left} (circles) and {comparison.right} (squares), each "
        f"against its own study's baseline; bars: {words.coverage(*comparison.rules)} intervals."
    )
    rows = "; ".join(f"{arm.name} {_text(arm.left)} and {_text(arm.right)}" for arm in arms)
    return Drawing(
        name="compare",
        title="Token cost in both studies",
        caption=caption,
        alt=f"Forest plot of token costs in two studies. {rows}.",
        svg=svg,
        png=png,
    )


def _draw(comparison: Comparison, arms: list[Any]) -> tuple[bytes, bytes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    height = 1.25 + 0.5 * len(arms)
    figure = Figure(figsize=(11, height))
    axis = figure.subplots()
    figure.subplots_adjust(left=0.215, right=0.7, top=1 - 0.5 / height, bottom=0.58 / height)
    axis.set_ylim(len(arms) - 0.4, -0.6)
    axis.axvline(0, color=INK, linewidth=1, zorder=1)
    for row, arm in enumerate(arms):
        for cost, offset, color, marker in (
            (arm.left, -0.16, HUES[0], "o"),
            (arm.right, 0.16, HUES[1], "s"),
        ):
            _mark(axis, row + offset, cost, color, marker)
        _write(axis, row, -0.02, "right", short(arm.name), INK)
    for x, text in ((1.03, f"token cost [{words.coverage(*comparison.rules)}]"),):
        axis.annotate(
            text, (x, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", va="bottom",
            fontsize=8.5, color=FAINT, annotation_clip=False,
        )  # fmt: skip
    handles = [
        axis.plot([], [], color=color, marker=marker, label=short(name, 40))[0]
        for name, color, marker in (
            (comparison.left, HUES[0], "o"),
            (comparison.right, HUES[1], "s"),
        )
    ]
    axis.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5
    )
    axis.set_yticks([])
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.percent(value).replace(".0", "")))
    axis.set_xlabel("token cost against the study's own baseline")
    return to_bytes(figure)


def _mark(axis: Any, row: float, cost: Cost | None, color: str, marker: str) -> None:
    if cost is not None and cost.estimate is not None:
        if cost.low is not None and cost.high is not None:
            axis.plot([cost.low, cost.high], [row, row], color=color, linewidth=2.2)
        axis.plot([cost.estimate], [row], color=color, marker=marker, markersize=6.5)
    _write(axis, row, 1.03, "left", _text(cost), color)


def _text(cost: Cost | None) -> str:
    return words.DASH if cost is None else words.cost(cost)


def _write(axis: Any, row: float, x: float, align: str, text: str, color: str) -> None:
    axis.annotate(
        text, (x, row), xycoords=axis.get_yaxis_transform(), ha=align, va="center", fontsize=8.8, color=color,
        annotation_clip=False,
    )  # fmt: skip
