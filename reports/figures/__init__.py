"""Figures of an analysis, each as SVG and PNG, with a caption."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.reports.figures.canvas import Drawing
from ablate.reports.figures.curves import draw_convergence, draw_trials
from ablate.reports.figures.forest import draw_effects, draw_forest
from ablate.reports.figures.panels import draw_difference, draw_sweep
from ablate.reports.words.verdict import tokens_needed

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis

__all__ = ["Drawing", "draw_figures", "drawn_arms"]


_MOST_ARMS = 40
"""A figure with more arms is not readable."""


def draw_figures(analysis: Analysis) -> tuple[Drawing, ...]:
    """Draw every figure that the analysis has data for, in the report's order.

    If there are too many arms, only the baseline and those of lowest token cost are drawn; captions say so.
    """
    shown = drawn_arms(analysis)
    drawings = [
        draw_effects(analysis),
        draw_forest(shown),
        draw_convergence(shown),
        draw_difference(shown),
        draw_sweep(shown),
        draw_trials(analysis),
    ]
    more = ""
    if left_out := len(analysis.arms) - len(shown.arms):
        more = f" Not drawn: {left_out} arms of higher or unknown token cost."
    return tuple(
        replace(drawing, caption=drawing.caption + more)
        for drawing in drawings
        if drawing
    )


def drawn_arms(analysis: Analysis) -> Analysis:
    """Keep only the arms that figures show: the baseline and those of lowest token cost, 40 at most."""
    cheapest = sorted(analysis.others, key=tokens_needed)[: _MOST_ARMS - 1]
    names = {analysis.baseline, *(arm.name for arm in cheapest)}
    return replace(
        analysis,
        arms=tuple(arm for arm in analysis.arms if arm.name in names),
        curves=tuple(curve for curve in analysis.curves if curve.arm in names),
        curves_in_bf16=tuple(
            curve for curve in analysis.curves_in_bf16 if curve.arm in names
        ),
    )
