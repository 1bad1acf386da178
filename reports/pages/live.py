"""What the page's script shows: values under the pointer, and each arm's figures at other targets.

Every number is computed here, like the report's own. At a target that was picked from the curves there are
estimates without intervals.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.figures import Drawing, drawn_arms
from ablate.reports.words.format import DASH, cost, ends, interval, tokens
from ablate.results.cost import mean_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.format import Table
    from ablate.run.outcome import Outcome

_MOST_POINTS = 200


def live_data(
    analysis: Analysis, parts: Iterable[Table | Drawing | None]
) -> dict[str, Any] | None:
    """Compute the script's data for the arms in the figure of convergence; None without that figure.

    ``runs``: arm, seed, tokens and losses. ``moved``: of each arm tokens to target, token cost and ends at
    each of the ``targets``. ``own``: the index of the target nearest to the study's own.
    """
    drawings = [part for part in parts if isinstance(part, Drawing)]
    axes = {drawing.name: drawing.axes for drawing in drawings}.get("convergence")
    if axes is None:
        return None
    plan = analysis.plan
    analysis = drawn_arms(analysis)
    targets, moved = _moved(analysis)
    own_target = plan.target.val_loss if plan.target else 0.0
    label = f"{{:.4f}} {plan.unit}"
    if plan.loss_unit == "nats":
        label += " (perplexity {:.4g})"
    return {
        "arms": [arm.name for arm in analysis.arms],
        "axes": axes,
        "runs": _runs(analysis),
        "targets": targets,
        "unit": plan.unit,
        "labels": [label.format(target, math.exp(target)) for target in targets],
        "own": min(
            range(len(targets)), key=lambda i: abs(targets[i] - own_target), default=0
        ),
        "moved": moved,
    }


def _runs(analysis: Analysis) -> list[list[Any]]:
    names = [arm.name for arm in analysis.arms]
    runs = []
    for curve in analysis.curves:
        shown = slice(None, None, 1 + len(curve.tokens) // _MOST_POINTS)
        losses = np.nan_to_num(curve.loss[shown], posinf=0.0).round(4).tolist()
        runs.append(
            [names.index(curve.arm), curve.seed, curve.tokens[shown].tolist(), losses]
        )
    return runs


def _moved(analysis: Analysis) -> tuple[Sequence[float], dict[str, list[list[str]]]]:
    """Return the targets, and each arm's texts at them."""
    compared = {
        arm.name: arm.moved
        for arm in analysis.others
        if arm.moved and not arm.counted_from
    }
    if not compared:
        return (), {arm.name: [] for arm in analysis.arms}
    # Arms that were stopped early are compared with fewer runs of the baseline.
    most = max(compared.values(), key=lambda moved: len(moved.base_ends[0]))
    texts = {arm.name: [[DASH] * 3] * len(most.targets) for arm in analysis.arms}
    texts[analysis.baseline] = [_texts(runs, "baseline") for runs in most.base_ends]
    for name, moved in compared.items():
        texts[name] = [*map(_texts, moved.ends, map(cost, moved.costs))]
    return most.targets, texts


def _texts(runs: Sequence[Outcome], cost_text: str) -> list[str]:
    to_target = interval(mean_tokens(runs), tokens)
    return [to_target.partition(" [")[0], cost_text.partition(" [")[0], ends(runs)]
