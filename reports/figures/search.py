"""A search's figure: the front over modelled step time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures import canvas
from ablate.reports.words.format import NBSP
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from ablate.reports.findings.search import Found


@canvas.drawing
def draw_front(found: Found) -> canvas.Picture | None:
    """Draw the results of each budget and their front; None before the first result."""
    rungs = [rung for rung in found.rungs if any(one.end == "ok" for one in rung.points)]
    if not rungs:
        return None
    named = [one.name for rung in rungs for one in rung.front if one.name != found.baseline]
    style = canvas.looks((found.baseline, *dict.fromkeys(named)), found.baseline)
    figure = canvas.sheet(11, 4.6)
    axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axis, rung in zip(axes, rungs, strict=True):
        for one in (point for point in rung.points if point.end == "ok"):
            usual = {"marker": "s" if one.started_from else "o", "color": canvas.CONTEXT}
            look = style[one.name] if one.on_front or one.is_baseline else usual
            axis.plot(
                [one.modelled_time], [one.value], look["marker"], color=look["color"], markersize=6, zorder=3
            )
        # Points above and to the right of the front are dominated.
        axis.step(
            [one.modelled_time for one in rung.front], [one.value for one in rung.front],
            where="post", color=canvas.FAINT, linewidth=1.4, zorder=2,
        )  # fmt: skip
        axis.set_title(f"{short_tokens(rung.tokens)} tokens a run")
        axis.set_xlabel("step time over the baseline's (modelled)")
        axis.margins(x=0.09, y=0.09)
        axis.locator_params("x", nbins=6)
        if found.objective == "token_cost":
            canvas.percent_ticks(axis.yaxis)
    axes[0].set_ylabel(found.value_words)
    canvas.legend(figure, {name: look | {"linestyle": "none"} for name, look in style.items()})
    caption = (
        f"Each point: one run of one recipe (n{NBSP}={NBSP}1 seed), so distances within a run's noise mean "
        f"nothing. Step time: modelled on {found.hardware} at {found.shapes}, over that of {found.baseline}; "
        "not measured. Line: the front; grey squares: other recipes that the search started from. Runs "
        "without a result are not shown."
    )
    return "front", "The front", figure, caption
