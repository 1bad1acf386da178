"""Pictures of an analysis, each as SVG and PNG, with the caption and the text for those who do not see it."""

from ablate.reports.figures.canvas import Drawing
from ablate.reports.figures.draw import draw_figures

__all__ = ["Drawing", "draw_figures"]
