"""Figures of an analysis, each as SVG and PNG, with a caption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures.canvas import Drawing
from ablate.reports.figures.curves import draw_convergence, draw_training, draw_trials
from ablate.reports.figures.forest import draw_forest
from ablate.reports.figures.panels import draw_difference, draw_sweep

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis

__all__ = ["Drawing", "draw_figures"]


def draw_figures(analysis: Analysis) -> tuple[Drawing, ...]:
    """Draw every figure that the analysis has data for, in the report's order."""
    draws = (draw_forest, draw_convergence, draw_difference, draw_sweep, draw_trials, draw_training)
    return tuple(one for draw in draws if (one := draw(analysis)) is not None)
