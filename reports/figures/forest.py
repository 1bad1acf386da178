"""Forest plots: token costs with their intervals on one scale, of the arms of one study or of two.

How it fails: an interval that runs out of the scale ends in an arrow; an arm without an estimate has its
bound as an open triangle, or a word where there is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.reports.figures import canvas
from ablate.reports.findings.compare import target_text
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.cost import Cost

_FORKED = "\u2020"


@canvas.drawing("token-cost", "Token cost")
def draw_forest(analysis: Analysis) -> canvas.Picture | None:
    """Draw the token costs; None where no arm has an estimate or a bound."""
    if all(arm.token_cost.kind == "none" for arm in analysis.others):
        return None
    caption = (
        f"Token cost against {analysis.baseline}: tokens to {target_text(analysis.plan.target)} over the "
        f"baseline's, minus one. Points: estimates; bars: {words.coverage(analysis.plan.stop)} intervals; "
        "open triangles: bounds, where not every run reached the target (no estimate). n: results of the "
        "arm, and how they ended."
    )
    arms = analysis.others
    style = canvas.looks([arm.name for arm in analysis.arms], analysis.baseline)
    figure, axis = _rows(len(arms), height=1.15 + 0.36 * len(arms), above=0.42, right=0.655)
    low, high = _limits(arms)
    axis.set_xlim(low, high)
    share = analysis.resolution.share_of_tokens_to_target
    if share is not None:
        axis.axvspan(max(-share, low), min(share, high), color=canvas.SHADE, zorder=0, linewidth=0)
        caption += (
            f" Grey band: one evaluation interval ({words.share(share)}), below which a cost rests on "
            "interpolation."
        )
    if forked := words.forked(arms):
        caption += f" {_FORKED}:{forked}"
    for row, arm in enumerate(arms):
        _mark(axis, row, arm.token_cost, style[arm.name], (low, high))
        _write(axis, row, -0.02, canvas.short(arm.name))
        cost = words.cost(replace(arm.token_cost, counted_from=0, near_budget=False)) + (
            _FORKED if arm.counted_from else ""
        )
        _write(axis, row, 1.03, cost if arm.token_cost.kind != "none" else "no estimate")
        _write(axis, row, 1.47, str(arm.n))
        _write(axis, row, 1.56, words.ends(arm))
    _heads(axis, {1.03: "token cost [95\u00a0%]", 1.47: "n", 1.56: "hit / cens. / div."})
    axis.set_xlabel(f"token cost against {canvas.short(analysis.baseline)}")
    rows = "; ".join(f"{arm.name} {words.cost(arm.token_cost)}" for arm in arms)
    alt = f"Forest plot of token costs with {words.coverage(analysis.plan.stop)} intervals. {rows}."
    return figure, caption, alt


def _rows(count: int, *, height: float, above: float, right: float) -> tuple[Any, Any]:
    """Return a figure with so many rows, and its axis; ``height``, and room ``above`` the rows, in inches."""
    figure = canvas.sheet(11, height, left=0.215, right=right, top=1 - above / height, bottom=0.58 / height)
    axis = figure.subplots()
    axis.set_ylim(count - 0.4, -0.6)
    axis.axvline(0, color=canvas.INK, linewidth=1, zorder=1)
    axis.set_yticks([])
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.locator_params("x", nbins=7)
    canvas.percent_ticks(axis.xaxis)
    return figure, axis


def _heads(axis: Any, heads: dict[float, str]) -> None:
    for x, text in heads.items():
        axis.annotate(
            text, (x, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", va="bottom",
            fontsize=8.5, color=canvas.FAINT, annotation_clip=False,
        )  # fmt: skip


def _write(axis: Any, row: float, x: float, text: str, color: str = canvas.INK) -> None:
    """Write beside a row: on the left, where ``x`` is below zero, up to there."""
    axis.annotate(
        text, (x, row), xycoords=axis.get_yaxis_transform(), ha="right" if x < 0 else "left", va="center",
        fontsize=8.8, color=color, annotation_clip=False,
    )  # fmt: skip


def _mark(axis: Any, row: int, cost: Cost, look: canvas.Look, ends: tuple[float, float]) -> None:
    low, high = ends
    if cost.estimate is not None:
        if cost.low is not None and cost.high is not None:
            axis.plot([max(cost.low, low), min(cost.high, high)], [row, row], color=look.color, linewidth=2.2)
            for edge, beyond, marker in ((low, cost.low < low, "<"), (high, cost.high > high, ">")):
                if beyond:
                    axis.plot([edge], [row], color=look.color, marker=marker, markersize=6, clip_on=False)
        axis.plot([cost.estimate], [row], color=look.color, marker=look.marker, markersize=7)
        return
    for bound, marker in ((cost.low, ">"), (cost.high, "<")):
        if bound is not None:
            axis.plot(
                [min(max(bound, low), high)], [row], color=look.color, marker=marker, markersize=8,
                markerfacecolor="none", markeredgewidth=1.6, clip_on=False,
            )  # fmt: skip


def _limits(arms: Sequence[ArmResult]) -> tuple[float, float]:
    """Hold every estimate and bound; of the intervals no more than a few times their range."""
    points, edges = [0.0], []
    for cost in (arm.token_cost for arm in arms):
        ends = [value for value in (cost.low, cost.high) if value is not None]
        points += ends if cost.estimate is None else [cost.estimate]
        edges += ends
    low, high = canvas.limits(points, edges, most=1.2, least=0.05)
    room = 0.06 * (high - low) or 0.05
    return low - room, high + room


@canvas.drawing("compare", "Token cost in both studies")
def draw_comparison(comparison: Comparison) -> canvas.Picture | None:
    """Draw the costs that have an estimate in either study, one under the other; None where none has."""
    arms = [
        arm
        for arm in comparison.arms
        if any(cost is not None and cost.estimate is not None for cost in (arm.left, arm.right))
    ]
    if not arms:
        return None
    caption = (
        f"Token cost of each arm, in {comparison.left} (circles) and {comparison.right} (squares), each "
        f"against its own study's baseline; bars: {words.coverage(*comparison.rules)} intervals."
    )
    figure, axis = _rows(len(arms), height=1.25 + 0.5 * len(arms), above=0.5, right=0.7)
    sides = {"left": (-0.16, canvas.HUES[0], "o"), "right": (0.16, canvas.HUES[1], "s")}
    for row, arm in enumerate(arms):
        for side, (offset, color, marker) in sides.items():
            _mark_one(axis, row + offset, getattr(arm, side), color, marker)
        _write(axis, row, -0.02, canvas.short(arm.name))
    _heads(axis, {1.03: f"token cost [{words.coverage(*comparison.rules)}]"})
    handles = [
        axis.plot([], [], color=color, marker=marker, label=canvas.short(getattr(comparison, side), 40))[0]
        for side, (_, color, marker) in sides.items()
    ]
    axis.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5
    )
    axis.set_xlabel("token cost against the study's own baseline")
    rows = "; ".join(f"{arm.name} {words.cost(arm.left)} and {words.cost(arm.right)}" for arm in arms)
    return figure, caption, f"Forest plot of token costs in two studies. {rows}."


def _mark_one(axis: Any, row: float, cost: Cost | None, color: str, marker: str) -> None:
    if cost is not None and cost.estimate is not None:
        if cost.low is not None and cost.high is not None:
            axis.plot([cost.low, cost.high], [row, row], color=color, linewidth=2.2)
        axis.plot([cost.estimate], [row], color=color, marker=marker, markersize=6.5)
    _write(axis, row, 1.03, words.cost(cost), color)
