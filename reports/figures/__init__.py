"""Pictures of an analysis, each as SVG and PNG, with the caption and the text for those who do not see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures.canvas import Drawing
from ablate.reports.figures.convergence import draw_convergence
from ablate.reports.figures.difference import draw_difference
from ablate.reports.figures.forest import draw_forest
from ablate.reports.figures.reached import draw_reached
from ablate.reports.figures.sensitivity import draw_sensitivity, draw_trials
from ablate.reports.figures.sweep import draw_sweep

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis

__all__ = ["Drawing", "draw_figures"]


def draw_figures(analysis: Analysis) -> tuple[Drawing, ...]:
    """Draw every figure that the analysis has data for, in the order in which a report shows them."""
    drawings = (
        draw_forest(analysis), draw_convergence(analysis), draw_difference(analysis), draw_sweep(analysis),
        draw_sensitivity(analysis), draw_trials(analysis), draw_reached(analysis),
    )  # fmt: skip
    return tuple(drawing for drawing in drawings if drawing is not None)
