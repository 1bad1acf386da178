"""Token cost at other targets than the study's, because one target can mislead.

Each is read as the study's own is, with its interval; neighbouring targets share their noise. Where the loss
curve gets flatter, the same lag in loss is more tokens: ``cost_growth`` compares the cost at the target with
that half-way to it.

Where a run diverged, or the ranges do not overlap, there is no sweep; where not every run of both arms
crosses both losses at a known place, there is no growth, and the reason says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ablate.results.cost import Cost, mean_tokens, token_costs
from ablate.results.losses import common_grid
from ablate.run.outcome import Outcome, outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.losses import Curve, Sides
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


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One arm if another loss were the target: ``targets`` in nats per token, falling, the same for all arms.

    ``costs`` has the token cost at each, ``ends`` how the arm's runs stand to it, ``base_ends`` how those of
    the baseline do.
    """

    targets: tuple[float, ...]
    costs: tuple[Cost, ...]
    ends: tuple[tuple[Outcome, ...], ...]
    base_ends: tuple[tuple[Outcome, ...], ...]

    @property
    def sweep(self) -> Sweep | None:
        """From the first to the last target at which there is an estimate; None without two of them."""
        exact = [i for i, cost in enumerate(self.costs) if cost.estimate is not None]
        if len(exact) < 2:
            return None
        inside = slice(exact[0], exact[-1] + 1)
        return Sweep(
            targets=self.targets[inside],
            # A bound is no estimate, and has no place in a band of intervals.
            costs=tuple(
                cost if cost.estimate is not None else Cost(kind="none") for cost in self.costs[inside]
            ),
            n=len(self.ends[exact[0]]),
            n_baseline=len(self.base_ends[exact[0]]),
        )


def move_target(
    sides: Mapping[Arm, Sides],
    alphas: Mapping[Arm, float],
    own: float | None = None,
    *,
    lost: Mapping[Arm, Sequence[Outcome]] | None = None,
    rule: Rule = "confirmed",
    paired: bool = False,
    moderated: bool = True,
) -> dict[Arm, Moved]:
    """Return each arm's token cost at losses of the baseline's mean curve, and at the study's ``own`` target.

    ``lost``: how runs that diverged ended, of which no target makes a hit. There is nothing without a result
    of the baseline, or with one that diverged.
    """
    results = {arm: tuple(map(_results, both)) for arm, both in sides.items()}
    whole = {
        arm: (left, base)
        for arm, (left, base) in results.items()
        if base and not any(curve.end == "diverged" for curve in base)
    }
    if not whole:
        return {}
    most: Sequence[Curve] = max((base for _, base in whole.values()), key=len)
    targets = _targets(most, [curve for left, _ in whole.values() for curve in left], own)
    # Of the baseline an arm is compared with all runs, or with the first of them.
    base_ends = [_outcomes(curve, targets, rule) for curve in most]
    ends = {
        arm: [
            *(_outcomes(curve, targets, rule) for curve in left if curve.end != "diverged"),
            *([run] * len(targets) for run in (lost or {}).get(arm, ())),
        ]
        for arm, (left, _) in whole.items()
    }
    costs = [
        token_costs(
            {
                arm: ([run[i] for run in ends[arm]], [run[i] for run in base_ends[: len(base)]])
                for arm, (_, base) in whole.items()
                if ends[arm]
            },
            paired=paired,
            alpha=alphas,
            moderated=moderated,
        )
        for i in range(len(targets))
    ]
    return {
        arm: Moved(
            targets=tuple(targets),
            costs=tuple(cost[arm] for cost in costs),
            ends=tuple(zip(*ends[arm], strict=True)),
            base_ends=tuple(zip(*base_ends[: len(base)], strict=True)),
        )
        for arm, (_, base) in whole.items()
        if ends[arm] and targets
    }


def _results(curves: Sequence[Curve]) -> list[Curve]:
    return [
        curve for curve in curves if curve.end != "missing" and (len(curve.loss) or curve.end == "diverged")
    ]


def _targets(base: Sequence[Curve], others: Sequence[Curve], own: float | None) -> list[float]:
    """Return losses of the baseline's mean curve, falling: even in training.

    From the lowest first evaluation of all runs to the lowest loss that all runs of the baseline reach.
    """
    along = np.unique(np.minimum.accumulate(common_grid(base).mean))
    low = max(float(curve.loss.min()) for curve in base)
    high = min(float(curve.loss[0]) for curve in (*base, *others) if len(curve.loss))
    within = along[(along >= low) & (along < high)]
    if len(within) > MOST_TARGETS:
        within = within[np.linspace(0, len(within) - 1, MOST_TARGETS).round().astype(int)]
    if own is not None and low <= own < high:
        within = np.union1d(within, [own])
    return [float(target) for target in within[::-1]]


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
