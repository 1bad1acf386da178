"""What may be stated of several arms, so that of all statements of one kind one study in twenty errs.

Each interval errs in 5 % of studies, so that of seven intervals often one does. Statements of one kind on
several arms hold together by the step-up procedure of Hochberg (Biometrika 75: 800, 1988): of k statements
all hold if the weakest has a p-value of 5 %; else it is dropped, and all others hold if the second weakest
has 2.5 %, and so on to 5 % / k. That errs in no more than 5 % of studies where comparisons go up and down
together, as those with one baseline do (Sarkar 1998), however many of the arms differ.

Two one-sided tests (Schuirmann 1987) show that an arm is as good as the baseline up to the study's margin:
its 90 % interval is inside. An interval that holds zero proves nothing.

Which arm needs the fewest tokens is answered by comparisons with the best (Hsu 1984): an arm may be the least
costly unless it is shown to need more than some other arm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeGuard

from scipy.special import stdtr

from ablate.results.intervals import Interval, exponential, quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.results.cost import Cost
    from ablate.results.intervals import Estimate
    from ablate.store.plan_file import Margin

    Level = Callable[[int], float]
    """Of so many statements, the level at which any of them errs in 5 % of studies."""

Claim = Literal["differs", "within", "outside"]
"""That a figure is not zero; that what the margin limits lies within it, or outside."""


def hold_together(p_values: Mapping[str, float], level: Level) -> set[str]:
    """Return the names whose statements hold together.

    >>> sorted(hold_together({"a": 0.001, "b": 0.02, "c": 0.04}, lambda count: 0.05 / count))
    ['a', 'b', 'c']
    >>> sorted(hold_together({"a": 0.001, "b": 0.02, "c": 0.06}, lambda count: 0.05 / count))
    ['a', 'b']
    """
    ranked = sorted(p_values, key=p_values.__getitem__, reverse=True)
    for count, weakest in enumerate(ranked, 1):
        if p_values[weakest] <= level(count):
            return set(ranked[count - 1 :])
    return set()


def claims_together(
    p_values: Mapping[str, Mapping[Claim, float]], level: Level
) -> dict[str, frozenset[Claim]]:
    """Return which claims on each arm hold beside those of the same kind on all others."""
    claims: dict[str, frozenset[Claim]] = dict.fromkeys(p_values, frozenset())
    for kind in {kind for p in p_values.values() for kind in p}:
        of_kind = {arm: p[kind] for arm, p in p_values.items() if kind in p}
        for arm in hold_together(of_kind, level):
            claims[arm] |= {kind}
    return claims


def p_values(
    cost: Cost, loss: Estimate | None, margin: Margin | None
) -> dict[Claim, float]:
    """Return the p-value of each claim that can be made on an arm: on its token cost, and on its margin.

    ``loss``: the arm's difference in final loss; None where unknown. Runs cut at the budget cost no more than
    whole ones: they can show a cost, or one outside of the margin, but no saving.
    """
    figure = cost.figure
    cut = cost.cut_figure
    if cut is not None and cut.value > 0:
        figure = cut
    p: dict[Claim, float] = {}
    if has_interval(figure):
        p["differs"] = p_of_difference(figure)
    if margin is None:
        return p
    limited, limit = limited_figure(figure, loss, margin)
    if has_interval(limited):
        p["outside"] = _p_beyond(limited, limit)
        if limited is not cut:
            p["within"] = 1 - p["outside"]
    return p


def limited_figure(
    figure: Estimate | None, loss: Estimate | None, margin: Margin
) -> tuple[Estimate | None, float]:
    """Return which the margin limits, log (1 + cost) or loss, and the limit on either side of zero.

    A margin in cost is the same factor to both sides: 5 % more tokens, or 1 / 1.05 of them.
    """
    if margin.kind == "cost":
        return figure, math.log1p(margin.value)
    return loss, margin.value


def has_interval(figure: Estimate | None) -> TypeGuard[Estimate]:
    """Tell whether a figure has a spread."""
    return figure is not None and figure.degrees * figure.variance > 0


def p_of_difference(figure: Estimate) -> float:
    """Return the two-sided p-value of a figure, which has an interval, against zero."""
    return 2 * _p_beyond(figure, 0.0)


def _p_beyond(figure: Estimate, limit: float) -> float:
    """Return the one-sided p-value for a figure beyond ± ``limit``."""
    t = (limit - abs(figure.value)) / math.sqrt(figure.variance)
    return float(stdtr(figure.degrees, t))


def may_be_least(
    over: Mapping[str, Mapping[str, Estimate]], level: Level
) -> dict[str, Interval]:
    """Return the arms that may need the fewest tokens, the cheapest first, each over the best other arm.

    ``over``: by rival, each other arm's log ratio of tokens. In 95 % of studies the least costly arm is among
    them, and all intervals hold.
    """
    arms = dict.fromkeys(arm for figures in over.values() for arm in figures)
    alpha = 2 * level(max(1, len(arms) - 1))
    least = {}
    for arm in arms:
        low = high = best = -math.inf
        for figure in (figures[arm] for figures in over.values() if arm in figures):
            half = math.inf  # not known
            if has_interval(figure):
                half = quantile(figure.degrees, alpha) * math.sqrt(figure.variance)
            best = max(best, figure.value)
            low = max(low, figure.value - half)
            high = max(high, figure.value + half)
        if low <= 0:
            interval = Interval(estimate=best, low=low, high=max(0.0, high))
            least[arm] = exponential(interval, minus=1.0)
    return dict(sorted(least.items(), key=lambda item: item[1].estimate or 0.0))
