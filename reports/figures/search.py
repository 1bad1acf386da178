"""A search's figures: the front over modelled step time, and the factors' importances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures import canvas
from ablate.reports.words.format import NBSP, share
from ablate.reports.words.search import time_text, value_text
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from ablate.reports.findings.search import Found


@canvas.drawing("front", "The front")
def draw_front(found: Found) -> canvas.Picture | None:
    """Draw the results of each budget and their front; None before there is any."""
    rungs = [rung for rung in found.rungs if any(one.end == "ok" for one in rung.points)]
    if not rungs:
        return None
    named = [one.name for rung in rungs for one in rung.front if one.name != found.baseline]
    style = canvas.looks((found.baseline, *dict.fromkeys(named)), found.baseline)
    figure = canvas.sheet(11, 4.6)
    axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axis, rung in zip(axes, rungs, strict=True):
        for one in (point for point in rung.points if point.end == "ok"):
            marker = {"marker": "s" if one.started_from else "o", "color": canvas.CONTEXT, "markersize": 5}
            if one.on_front or one.is_baseline:
                marker = {key: style[one.name][key] for key in ("marker", "color")} | {"markersize": 7}
            axis.plot([one.time], [one.value], **marker, zorder=3)
        # What lies above and right of the front is dominated.
        axis.step(
            [one.time for one in rung.front], [one.value for one in rung.front], where="post",
            color=canvas.FAINT, linewidth=1.4, zorder=2,
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
    front = "; ".join(f"{one.name}: {value_text(found, one)} at {time_text(one)}" for one in rungs[-1].front)
    return figure, caption, f"{found.value_words} over modelled step time. Front: {front}."


@canvas.drawing("importances", "Which factors mattered")
def draw_importances(found: Found) -> canvas.Picture | None:
    """Draw the share of each objective's variance by factor; None with too few trials."""
    pairs = zip((found.value_words, "modelled step time"), found.importances, strict=True)
    shown = {name: shares for name, shares in pairs if shares is not None}
    if not shown:
        return None
    factors = list(found.factors)
    figure = canvas.sheet(8, 1.2 + 0.62 * len(factors))
    axis = figure.subplots()
    for i, (name, shares) in enumerate(shown.items()):
        bars = axis.barh(
            [row + 0.36 * i for row in range(len(factors))], [shares[factor] for factor in factors],
            height=0.32, color=canvas.HUES[i], label=name,
        )  # fmt: skip
        axis.bar_label(bars, [share(shares[factor]) for factor in factors], padding=4, fontsize=8)
    axis.set_yticks(range(len(factors)), [canvas.short(factor, 30) for factor in factors])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_xlabel("share of the variance explained")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8.5)
    caption = (
        f"Share of each objective's variance that a factor explains (fANOVA), over the {found.weighed} "
        "trials of the first budget with a level and a result. Few trials make the shares rough."
    )
    listed = "; ".join(
        f"{name}: " + ", ".join(f"{factor} {share(shares[factor])}" for factor in factors)
        for name, shares in shown.items()
    )
    return figure, caption, f"Bars of importances. {listed}."
