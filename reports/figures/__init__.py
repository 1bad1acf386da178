"""Pictures of an analysis, each as SVG and PNG, with the caption and the text for those who do not see it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.reports.figures.canvas import Drawing
from ablate.reports.figures.curves import draw_convergence, draw_sensitivity, draw_trials
from ablate.reports.figures.forest import draw_forest
from ablate.reports.figures.panels import draw_difference, draw_reached, draw_sweep

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis, ArmResult

__all__ = ["Drawing", "draw_figures", "drawn_arms"]


_MOST_ARMS = 40
"""More arms than these cannot be told apart in a figure."""


def draw_figures(analysis: Analysis) -> tuple[Drawing, ...]:
    """Draw every figure that the analysis has data for, in the order in which a report shows them.

    Of very many arms the baseline and those with the lowest token costs are drawn; the captions say so.
    """
    shown = drawn_arms(analysis)
    drawings = (
        draw_forest(shown), draw_convergence(shown), draw_difference(shown), draw_sweep(shown),
        draw_sensitivity(analysis), draw_trials(analysis), draw_reached(shown),
    )  # fmt: skip
    left_out = len(analysis.arms) - len(shown.arms)
    said = f" Not drawn: {left_out} arms of higher or unknown token cost." if left_out else ""
    return tuple(replace(one, caption=one.caption + said) for one in drawings if one is not None)


def drawn_arms(analysis: Analysis) -> Analysis:
    """Return the analysis with as many arms as a figure can show."""

    def cost(arm: ArmResult) -> float:
        return math.inf if arm.token_cost.estimate is None else arm.token_cost.estimate

    names = {analysis.baseline, *(arm.name for arm in sorted(analysis.others, key=cost)[: _MOST_ARMS - 1])}
    curves: dict[str, Any] = {
        name: tuple(curve for curve in getattr(analysis, name) if curve.arm in names)
        for name in ("curves", "curves_in_bf16")
    }
    return replace(analysis, arms=tuple(arm for arm in analysis.arms if arm.name in names), **curves)
