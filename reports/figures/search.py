"""A search's figures: the front over modelled step time, and the factors' importances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.figures import canvas
from ablate.reports.words import words
from ablate.reports.words.search import time_text, value_text
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from ablate.reports.findings.search import Found, Rung

_LABEL_GAP = 0.052
"""Between two labels, of the height of the axes."""


@canvas.drawing("front", "The front")
def draw_front(found: Found) -> canvas.Picture | None:
    """Draw the results of each budget and their front; None before there is any."""
    rungs = [rung for rung in found.rungs if any(one.end == "ok" for one in rung.points)]
    if not rungs:
        return None
    last = rungs[-1]
    hidden = sum(one.end not in ("ok", "open") for rung in rungs for one in rung.points)
    caption = (
        f"Each point: one run of one recipe (n{words.NBSP}={words.NBSP}1 seed), so distances within a run's "
        "noise mean nothing. Step time: modelled on "
        f"{found.hardware} at {found.shapes}, over that of {found.baseline}; not measured. Line: the front; "
        "diamond: the baseline; squares: the other recipes that the search started from."
        + (f" {words.plural(hidden, 'run')} without a result not shown." if hidden else "")
    )
    listed = "; ".join(f"{one.name}: {value_text(found, one)} at {time_text(one)}" for one in last.front)
    alt = f"{found.value_words}, modelled step time; {short_tokens(last.tokens)} tokens. Front: {listed}."
    figure = canvas.sheet(11, 4.6, left=0.075, right=0.79, top=0.91, bottom=0.125, wspace=0.2)
    axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axis, rung in zip(axes, rungs, strict=True):
        _scatter(axis, rung)
        axis.set_title(f"{short_tokens(rung.tokens)} tokens a run")
        axis.set_xlabel("step time over the baseline's (modelled)")
        axis.margins(x=0.09, y=0.09)
        axis.locator_params("x", nbins=6)
        if found.objective == "token_cost":
            canvas.percent_ticks(axis.yaxis)
    axes[0].set_ylabel(found.value_words)
    _label(axes[-1], rungs[-1])
    return figure, caption, alt


def _scatter(axis: Any, rung: Rung) -> None:
    """Draw the points, the front as a staircase: what lies above and right of it is dominated."""
    for one in (point for point in rung.points if point.end == "ok"):
        marker = "D" if one.is_baseline else "s" if one.started_from else "o"
        color = canvas.INK if one.is_baseline else canvas.HUES[1] if one.on_front else canvas.CONTEXT
        if not one.on_front and one.started_from and not one.is_baseline:
            color = canvas.FAINT
        size = 7 if one.on_front or one.is_baseline else 5
        axis.plot(
            [one.time], [one.value], marker=marker, color=color, markersize=size, linestyle="none", zorder=3
        )
    times, values = [one.time for one in rung.front], [one.value for one in rung.front]
    axis.step(times, values, where="post", color=canvas.HUES[1], linewidth=1.4, zorder=2)


def _label(axis: Any, rung: Rung) -> None:
    """Name the front and the baseline beside the axes, joined to their points by thin lines."""
    named = [one for one in rung.points if one.end == "ok" and (one.on_front or one.is_baseline)]
    low, high = axis.get_ylim()
    heights = [((one.value or 0.0) - low) / (high - low) for one in named]
    for one, y in zip(named, canvas.spread(heights, _LABEL_GAP, 0.02, 0.98), strict=True):
        axis.annotate(
            canvas.short(one.name, 24), (one.time, one.value), xytext=(1.04, y), textcoords="axes fraction",
            va="center", fontsize=8.5, color=canvas.INK, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": canvas.CONTEXT, "linewidth": 0.7, "shrinkB": 5},
        )  # fmt: skip


@canvas.drawing("importances", "Which factors mattered")
def draw_importances(found: Found) -> canvas.Picture | None:
    """Draw the share of each objective's variance by factor; None with too few trials."""
    value, time = found.importances
    if value is None and time is None:
        return None
    shown = [
        (name, shares, canvas.HUES[i])
        for i, (name, shares) in enumerate(((found.value_words, value), ("modelled step time", time)))
        if shares is not None
    ]
    listed = "; ".join(
        f"{name}: " + ", ".join(f"{factor} {words.share(share)}" for factor, share in shares.items())
        for name, shares, _ in shown
    )
    caption = (
        f"Share of each objective's variance that a factor explains (fANOVA), over the {found.weighed} "
        "trials of the first budget with a level and a result. Few trials make the shares rough."
    )
    return _draw_importances(found, shown), caption, f"Bars of importances. {listed}."


def _draw_importances(found: Found, shown: list[tuple[str, Any, str]]) -> Any:
    factors = list(found.factors)
    height = 1.2 + 0.62 * len(factors)
    figure = canvas.sheet(8, height, left=0.24, right=0.93, top=1 - 0.42 / height, bottom=0.55 / height)
    axis = figure.subplots()
    each = 0.36
    for i, (name, shares, color) in enumerate(shown):
        rows = [row + (i - (len(shown) - 1) / 2) * each for row in range(len(factors))]
        axis.barh(rows, [shares[factor] for factor in factors], height=each * 0.9, color=color, label=name)
        for row, factor in zip(rows, factors, strict=True):
            axis.annotate(
                words.share(shares[factor]), (shares[factor], row), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8, color=canvas.FAINT, annotation_clip=False,
            )  # fmt: skip
    axis.set_yticks(range(len(factors)), [canvas.short(factor, 30) for factor in factors])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}{words.NBSP}%")
    axis.set_xlabel("share of the variance explained")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5)
    return figure
