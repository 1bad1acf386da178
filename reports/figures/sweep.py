"""Token cost over the target, one small panel an arm, with its 95 % band.

How it fails: an arm without a range in common with the baseline is left out, and the caption says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import canvas
from ablate.reports.words import words
from ablate.results.losses import common_grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.reports.findings.targets import Sweep
    from ablate.results.cost import Cost


@canvas.drawing("sweep", "Other targets")
def draw_sweep(analysis: Analysis) -> canvas.Picture | None:
    """Draw the target sweeps; None where no arm has one."""
    sweeps = {arm.name: arm.sweep for arm in analysis.others if arm.sweep is not None}
    if not sweeps:
        return None
    falls = _falling(analysis, sweeps)
    caption = (
        f"Token cost against {analysis.baseline} if another validation loss were the target: estimate with "
        f"its pointwise {words.coverage(analysis.plan.stop)} band, over the losses that every run of both "
        "passes; training goes to the right. Dotted: the study's target. A cost that depends on the target "
        "is no single number. The scale follows the later half."
    )
    if falls:
        caption += (
            f" Grey ground: targets that the arm, or {analysis.baseline}, meets only while the learning rate "
            f"falls, from {words.tokens(analysis.decay_begins)} tokens on; costs there are not those of a "
            "steady rate."
        )
    caption += words.forked(analysis.others)
    without = [arm.name for arm in analysis.others if arm.name not in sweeps]
    if without:
        caption += f" No range in common, or diverged: {', '.join(without)}."
    ends = ", ".join(
        f"{name} from {words.percent(_first(sweep.costs))} to {words.percent(_first(sweep.costs[::-1]))}"
        for name, sweep in sweeps.items()
    )
    alt = f"Small line charts of token cost over the target loss. From the first to the last target: {ends}."
    return _draw(analysis, sweeps, falls), caption, alt


def _falling(analysis: Analysis, sweeps: dict[str, Sweep]) -> dict[str, float]:
    """Return the loss under which a panel's targets are met, by the arm or the baseline, in the decay.

    The greater of their mean losses where the rate begins to fall. Left out: arms without such targets.
    """
    begins = analysis.decay_begins
    if begins is None:
        return {}
    at = {}
    for name in (analysis.baseline, *sweeps):
        grid = common_grid([curve for curve in analysis.curves if curve.arm == name])
        if len(grid.tokens) and grid.tokens[0] <= begins < grid.tokens[-1]:
            at[name] = float(np.interp(begins, grid.tokens, grid.mean))
    falls = {
        name: max(at[name], at[analysis.baseline])
        for name in sweeps
        if at.keys() >= {name, analysis.baseline}
    }
    return {name: loss for name, loss in falls.items() if sweeps[name].targets[-1] < loss}


def _first(costs: Sequence[Cost]) -> float:
    return next(cost.estimate for cost in costs if cost.estimate is not None)


def _draw(analysis: Analysis, sweeps: dict[str, Sweep], falls: dict[str, float]) -> Any:
    style = canvas.looks([arm.name for arm in analysis.arms], analysis.baseline)
    figure, axes, lowest = canvas.panels(sweeps, "token cost (%)")
    assert analysis.plan.target is not None  # without one there is no sweep
    for axis, (name, sweep) in zip(axes, sweeps.items(), strict=True):
        rows = [(one.estimate, one.low, one.high) for one in sweep.costs]
        cost, below, above = np.array(rows, dtype=float).T
        look = style[name]
        axis.axhline(0, color=canvas.INK, linewidth=0.9, zorder=1.5)
        axis.axvline(
            analysis.plan.target.val_loss, color=canvas.FAINT, linewidth=0.9, linestyle=":", zorder=1.5
        )
        if np.isfinite(below).any():
            axis.fill_between(
                sweep.targets, 100 * below, 100 * above, color=look.color, alpha=0.22, linewidth=0
            )
        every = max(1, len(sweep.targets) // 6)
        axis.plot(sweep.targets, 100 * cost, **look.line, markersize=3.8, markevery=every, zorder=3)
        canvas.note(axis, words.results(sweep).replace(words.NBSP, " "), 0.015, 0.965, ha="left")
    for axis in lowest:
        axis.set_xlabel("target (nats/token)")
    axes[0].set_ylim(*_limits(sweeps))
    lowest_target, highest = axes[0].get_xlim()
    for name, axis in zip(sweeps, axes, strict=True):
        if name in falls:
            axis.axvspan(lowest_target, falls[name], color=canvas.SHADE, linewidth=0, zorder=0)
    axes[0].set_xlim(lowest_target, highest)
    axes[0].invert_xaxis()
    return figure


def _limits(sweeps: dict[str, Sweep]) -> tuple[float, float]:
    """Follow the later half of the lines, and of the bands what is no wider than a few times that."""
    later = [cost for sweep in sweeps.values() for cost in sweep.costs[len(sweep.costs) // 2 :]]
    lines = [cost.estimate for cost in later if cost.estimate is not None]
    edges = [edge for cost in later for edge in (cost.low, cost.high) if edge is not None]
    low, high = canvas.limits([0.0, *lines], edges, most=1.0, least=0.01)
    room = 0.1 * max(high - low, 0.01)
    return 100 * (low - room), 100 * (high + 2 * room)
