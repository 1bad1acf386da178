"""Whether what an arm costs still grows at the target: (1 + token cost) there over that half-way to it.

Where the loss curve gets flatter, the same lag in loss is more tokens, so that a token cost belongs to its
target: read at a lower one it is another. Half-way is the loss that the baseline reaches, in the mean over
its runs, after half of its tokens to target. Of each run counts what its tokens grow by from there to the
target, and those of an arm are compared with the baseline's as tokens to target are. That the place itself
comes from the baseline's runs is not in the interval.

How it fails: it does not raise. Where not every run of both crosses both losses at a known place, or one does
so while its learning rate falls at the end, there is no estimate, and the reason says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.cost import Cost, mean_tokens, token_cost
from ablate.reports.statistics.intervals import ALPHA
from ablate.reports.statistics.losses import common_grid
from ablate.reports.statistics.sweep import outcomes_at
from ablate.run.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.statistics.losses import Curve
    from ablate.run.outcome import Rule


def cost_growth(
    arm: Sequence[Curve],
    baseline: Sequence[Curve],
    target: float,
    *,
    rule: Rule = "confirmed",
    paired: bool = False,
    alpha: float = ALPHA,
    decay_begins: int | None = None,
) -> Cost:
    """Return by what share (1 + token cost) grows from half-way to the target (nats per token) on.

    ``decay_begins``: the tokens after which the learning rate of either falls at the end.
    """
    left, right = ([curve for curve in curves if curve.end != "missing"] for curves in (arm, baseline))
    if any(curve.end == "diverged" for curve in (*left, *right)):
        return Cost(kind="none", reason="runs diverged")
    ends = [outcomes_at(curves, target, rule) for curves in (left, right)]
    if not all(ends) or not all(run.exact for side in ends for run in side):
        return Cost(kind="none", reason="not every run has reached the target")
    if decay_begins is not None and any(run.high > decay_begins for side in ends for run in side):
        return Cost(kind="none", reason="the target was crossed while the learning rate fell")
    half = 0.5 * (mean_tokens(ends[1]).estimate or 0.0)
    grid = common_grid(right)
    if not len(grid.tokens) or half < grid.tokens[0]:
        return Cost(kind="none", reason="no evaluation before half of the way")
    between = float(np.interp(half, grid.tokens, grid.mean))
    before = [outcomes_at(curves, between, rule) for curves in (left, right)]
    if not all(run.exact for side in before for run in side):
        return Cost(kind="none", reason="a run has no evaluation before half of the way")
    ratios = [
        [_grown(*pair) for pair in zip(earlier, later, strict=True)]
        for earlier, later in zip(before, ends, strict=True)
    ]
    return token_cost(ratios[0], ratios[1], paired=paired, alpha=alpha)


def _grown(earlier: Outcome, later: Outcome) -> Outcome:
    """Return an outcome whose "tokens" are those to the target over those half-way."""
    ratio = later.high / earlier.high
    return Outcome(seed=later.seed, end="hit", low=ratio, high=ratio)
