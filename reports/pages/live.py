"""What the page's script shows of the convergence figure: curves to point at, and costs at other targets.

Every number is computed here, as the report's own are; the script looks them up and writes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.words.format import DASH, cost, interval, tokens
from ablate.results.cost import mean_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.figures.canvas import Drawing
    from ablate.reports.findings.results import Analysis
    from ablate.run.outcome import Outcome

_MOST_POINTS = 200


def live_data(analysis: Analysis, drawing: Drawing) -> dict[str, Any]:
    """Return what the script looks up of a convergence figure, which is of the arms of this analysis.

    ``runs``: arm, seed, tokens and losses, thinned, because they are for pointing at. ``moved``: of each arm
    tokens to target, token cost and ends, as text, at each of the ``targets``; ``own`` is the study's.
    """
    names = [arm.name for arm in analysis.arms]
    found = {arm.name: arm.moved for arm in analysis.others if arm.moved and not arm.counted_from}
    # Arms that were stopped early have fewer runs of the baseline beside them.
    most = max(found.values(), key=lambda one: len(one.base_ends[0]), default=None)
    targets = most.targets if most else ()
    moved = {name: [[DASH] * 3 for _ in targets] for name in names}
    for name, one in found.items():
        pairs = zip(one.ends, one.costs, strict=True)
        moved[name] = [_figures(ends, cost(value)) for ends, value in pairs]
    if most:
        moved[analysis.baseline] = [_figures(ends, "baseline") for ends in most.base_ends]
    own = analysis.plan.target.val_loss if analysis.plan.target else 0.0
    runs = []
    for curve in analysis.curves:
        shown = slice(None, None, 1 + len(curve.tokens) // _MOST_POINTS)
        losses = np.nan_to_num(curve.loss[shown], posinf=0.0).round(4).tolist()
        runs.append([names.index(curve.arm), curve.seed, curve.tokens[shown].tolist(), losses])
    return {
        "arms": names,
        "axes": [vars(axis) for axis in drawing.axes],
        "runs": runs,
        "targets": targets,
        "labels": [f"{at:.4f} nats/token (perplexity {math.exp(at):.4g})" for at in targets],
        "own": min(range(len(targets)), key=lambda i: abs(targets[i] - own), default=0),
        "moved": moved,
    }


def _figures(ends: Sequence[Outcome], cost_text: str) -> list[str]:
    """Return texts without intervals: of a target that was picked from the curves there are none."""
    counts = (str(sum(run.end == end for run in ends)) for end in ("hit", "censored", "diverged"))
    texts = (interval(mean_tokens(ends), tokens), cost_text)
    return [*(text.partition(" [")[0] for text in texts), " / ".join(counts)]
