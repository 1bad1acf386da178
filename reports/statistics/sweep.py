"""Token cost at other targets than the study's, because one target can mislead.

Each is read as the study's own is, with its interval; neighbouring targets share their noise. Where the loss
curve gets flatter, the same lag in loss is more tokens: ``cost_growth`` compares the cost at the target with
that half-way to it.

How it fails: it does not raise. Where a run diverged, or the ranges do not overlap, there is no sweep; where
not every run of both arms crosses both losses at a known place, there is no growth, and the reason says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ablate.reports.statistics.cost import Cost, mean_tokens, token_costs
from ablate.reports.statistics.losses import common_grid
from ablate.run.outcome import Outcome, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ablate.reports.statistics.losses import Curve, Sides
    from ablate.run.outcome import Rule

Arm = TypeVar("Arm")
MOST_TARGETS = 40


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Token cost at each target (validation loss in nats per token, falling), without bounds."""

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    n: int
    n_baseline: int


def target_sweeps(
    sides: Mapping[Arm, Sides],
    alphas: Mapping[Arm, float],
    *,
    rule: Rule = "confirmed",
    paired: bool = False,
    moderated: bool = True,
) -> dict[Arm, Sweep]:
    """Return each arm's token cost at each target that all runs of both sides pass.

    From the lowest loss that all of them reach up to the lowest first evaluation. An arm without two such
    targets, or with a run that diverged, has none.
    """
    usable = {arm: found for arm, both in sides.items() if (found := _finished(*both)) is not None}
    if not usable:
        return {}
    ranges = {arm: _range(*both) for arm, both in usable.items()}
    most: Sequence[Curve] = max((base for _, base in usable.values()), key=len)
    targets = _targets(most, ranges.values())
    inside = {
        arm: [i for i, target in enumerate(targets) if low <= target < high]
        for arm, (low, high) in ranges.items()
    }
    # Of the baseline an arm is compared with all runs, or with the first of them.
    base_ends = [_outcomes(curve, targets, rule) for curve in most]
    ends = {arm: [_outcomes(curve, targets, rule) for curve in own] for arm, (own, _) in usable.items()}
    costs: dict[Arm, list[tuple[float, Cost]]] = {arm: [] for arm in usable}
    for i, target in enumerate(targets):
        there = {
            arm: ([run[i] for run in ends[arm]], [run[i] for run in base_ends[: len(base)]])
            for arm, (_, base) in usable.items()
            if len(inside[arm]) >= 2 and i in inside[arm]
        }
        for arm, cost in token_costs(there, paired=paired, alpha=alphas, moderated=moderated).items():
            # A bound is no estimate, and has no place in a band of intervals.
            exact = cost if cost.kind in ("interval", "point") else Cost(kind="none")
            costs[arm].append((target, exact))
    return {
        arm: Sweep(
            targets=tuple(target for target, _ in found),
            costs=tuple(cost for _, cost in found),
            n=len(usable[arm][0]),
            n_baseline=len(usable[arm][1]),
        )
        for arm, found in costs.items()
        if any(cost.estimate is not None for _, cost in found)
    }


def _finished(own: Sequence[Curve], base: Sequence[Curve]) -> Sides | None:
    """Return both sides' curves with a result; None where one has none, or a run that diverged."""
    left, right = ([curve for curve in curves if curve.end != "missing"] for curves in (own, base))
    every = (*left, *right)
    if not left or not right or any(curve.end == "diverged" or not len(curve.loss) for curve in every):
        return None
    return left, right


def _range(own: Sequence[Curve], base: Sequence[Curve]) -> tuple[float, float]:
    """Return the lowest loss that all runs reach, and the lowest first evaluation."""
    curves = (*own, *base)
    return (
        max(float(curve.loss.min()) for curve in curves),
        min(float(curve.loss[0]) for curve in curves),
    )


def _targets(base: Sequence[Curve], ranges: Iterable[tuple[float, float]]) -> list[float]:
    """Return the losses of the baseline's mean curve that any arm covers, falling: even in training."""
    along = np.unique(np.minimum.accumulate(common_grid(base).mean))[::-1]
    lows, highs = zip(*ranges, strict=True)
    within = along[(along >= min(lows)) & (along < max(highs))]
    if len(within) > MOST_TARGETS:
        within = within[np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)]
    return [float(target) for target in within]


def _outcomes(curve: Curve, targets: Sequence[float], rule: Rule) -> list[Outcome]:
    """Return how a finished run stands to each target (nats per token)."""
    found = outcomes(
        seed=curve.seed, tokens=curve.tokens, loss=curve.loss, targets=targets, rule=rule, fit=curve.fit
    )
    return [run.after(curve.origin) for run in found]


def cost_growths(
    sides: Mapping[Arm, Sides],
    alphas: Mapping[Arm, float],
    target: float,
    *,
    decay_begins: Mapping[Arm, int | None],
    rule: Rule = "confirmed",
    paired: bool = False,
    moderated: bool = True,
) -> dict[Arm, Cost]:
    """Return by what share each (1 + token cost) grows from half-way to the target (nats per token) on.

    Half-way is the loss that the baseline reaches, in the mean over its runs, after half of its tokens to
    target; the interval leaves out that this place comes from the baseline's runs. What each run's tokens
    grow by from there to the target is compared as tokens to target are.

    ``decay_begins``: the tokens after which the learning rate of either falls at the end.
    """
    found: dict[Arm, Cost] = {}
    grown: dict[Arm, tuple[list[Outcome], list[Outcome]]] = {}
    for arm, (own, base) in sides.items():
        ratios = _growth(own, base, target, rule, decay_begins[arm])
        if isinstance(ratios, str):
            found[arm] = Cost(kind="none", reason=ratios)
        else:
            grown[arm] = ratios
    return found | token_costs(grown, paired=paired, alpha=alphas, moderated=moderated)


def _growth(
    own: Sequence[Curve], base: Sequence[Curve], target: float, rule: Rule, decay_begins: int | None
) -> tuple[list[Outcome], list[Outcome]] | str:
    """Return what each run's tokens grow by, or why that is not known."""
    both = [[curve for curve in curves if curve.end != "missing"] for curves in (own, base)]
    if any(curve.end == "diverged" for side in both for curve in side):
        return "runs diverged"
    ends = [[_outcomes(curve, [target], rule)[0] for curve in side] for side in both]
    if not all(ends) or not all(run.exact for side in ends for run in side):
        return "not every run has reached the target"
    origin = base[0].origin
    if decay_begins is not None and any(run.high + origin > decay_begins for side in ends for run in side):
        return "the target was crossed while the learning rate fell"
    half = origin + 0.5 * (mean_tokens(ends[1]).estimate or 0.0)
    grid = common_grid(both[1])
    if not len(grid.tokens) or half < grid.tokens[0]:
        return "no evaluation before half of the way"
    between = float(np.interp(half, grid.tokens, grid.mean))
    before = [[_outcomes(curve, [between], rule)[0] for curve in side] for side in both]
    if not all(run.exact for side in before for run in side):
        return "a run has no evaluation before half of the way"
    left, right = (
        [_grown(*pair) for pair in zip(earlier, later, strict=True)]
        for earlier, later in zip(before, ends, strict=True)
    )
    return left, right


def _grown(earlier: Outcome, later: Outcome) -> Outcome:
    """Return an outcome whose "tokens" are those to the target over those half-way."""
    ratio = later.high / earlier.high
    return Outcome(seed=later.seed, end="hit", low=ratio, high=ratio)
