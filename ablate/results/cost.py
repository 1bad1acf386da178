"""Token cost: what share more tokens an arm needs than the baseline to reach the same validation loss.

exp(mean log T_arm − mean log T_baseline) − 1, with a t interval on log T: of paired differences where seeds
are pairs, else Welch's, each with its variance moderated by the study's other arms (``intervals``). A mean
over the runs that hit would leave out the slow ones. So if any run of either side has no known T, there is no
estimate, only a bound from the ranges of all T.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ablate.results.intervals import (
    ALPHA,
    Compared,
    Estimate,
    Interval,
    change_interval,
    contrast,
    contrasts,
    exponential,
    mean_estimate,
    t_interval,
)
from ablate.results.losses import sample_sizes, with_partners, with_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.intervals import Contrast, Method, Values
    from ablate.run.outcome import Outcome

    Sides = tuple[Sequence[Outcome], Sequence[Outcome]]
    """Runs of an arm, and of the baseline that they are compared with."""

CostKind = Literal["interval", "point", "bound", "none", "baseline"]
_INEXACT = {
    "censored": "ended before the target",
    "diverged": "diverged",
    "hit": "reached the target by the first evaluation",
    "at_change": "reached it between two evaluations while schedule or recipe changed",
}
"""By its end, why the tokens to target of a run are not known."""
NEAR_BUDGET = 0.05
"""Share of the budget. A single miss removes the interval: with hits so late only lucky studies have one."""


@dataclass(frozen=True, kw_only=True)
class Cost(Compared):
    """A token cost as a fraction (0.18 is 18 % more tokens).

    ``kind``: ``interval``, an estimate with its interval; ``point``, an estimate without one; ``bound``, no
    estimate: ``low`` or ``high`` bounds the cost of *these runs* without a sampling error, and ``restricted``
    is the cost with every run cut at the budget, with its interval; ``none``, nothing.
    ``figure``: log (1 + cost). ``cut_figure``: that of ``restricted``.
    ``own``: the interval from these runs' variance alone, where ``low`` and ``high`` are moderated;
    ``stands_out``: the arm's runs spread so much more than the others' that ``own`` is safer;
    ``baseline_stands_out``: unpaired, and the baseline's runs spread that much more than the arms'.
    ``counted_from``: tokens of the fork, from which both sides are counted; 0 for whole runs.
    ``near_budget``: a run hit in the last ``NEAR_BUDGET`` of its budget: the interval is there by luck.
    """

    kind: CostKind
    pairs: int | None = None
    pairing_variance_ratio: float | None = None
    restricted: Interval | None = None
    cut_figure: Estimate | None = None
    own: Interval | None = None
    stands_out: bool = False
    baseline_stands_out: bool = False
    counted_from: int = 0
    near_budget: bool = False


def is_settled(cost: Cost) -> bool:
    """Tell whether the cost has an interval without zero."""
    return cost.kind == "interval" and not (cost.low or 0.0) <= 0.0 <= (
        cost.high or 0.0
    )


def mean_tokens(outcomes: Sequence[Outcome], alpha: float = ALPHA) -> Interval:
    """Return the geometric mean of the tokens to target with its interval on log T.

    If a run has no known T there is no estimate; ``low`` is then the mean with such runs at their budget.
    """
    runs = with_result(outcomes)
    if not runs:
        return Interval(note="no results")
    mean = log_tokens(runs)
    if mean is not None:
        return exponential(t_interval(mean, alpha))
    low, high = _log_range(runs)
    return exponential(Interval(low=low, high=high, note=_why_inexact(runs)))


def log_tokens(outcomes: Sequence[Outcome]) -> Estimate | None:
    """Return the mean log of the tokens to target; None unless every result has a known T."""
    runs = with_result(outcomes)
    if not runs or not _all_exact(runs):
        return None
    return mean_estimate([math.log(run.high) for run in runs])


def token_costs(sides: Mapping[str, Sides], method: Method) -> dict[str, Cost]:
    """Compute the token cost of each arm over one baseline; the arms' variances moderate each other.

    >>> from ablate.results.intervals import Method
    >>> from ablate.run.outcome import Outcome
    >>> def runs(*tokens):
    ...     return [Outcome(seed=seed, end="hit", low=t, high=t) for seed, t in enumerate(tokens)]
    >>> sides = {"mxfp4": (runs(112_000, 108_000, 111_000), runs(100_000, 98_000, 101_000))}
    >>> cost = token_costs(sides, Method(paired=True))["mxfp4"]
    >>> f"{cost.estimate:+.1%} [{cost.low:+.1%}, {cost.high:+.1%}], {cost.pairs} pairs"
    '+10.7% [+7.9%, +13.5%], 3 pairs'
    """
    results = {arm: with_partners(*both, method) for arm, both in sides.items()}
    logs = {}
    for arm, (runs, base_runs) in results.items():
        if runs and base_runs and _all_exact([*runs, *base_runs]):
            logs[arm] = (_logs(runs), _logs(base_runs))
    compared = contrasts(logs, method)
    costs = {}
    for arm, (runs, base_runs) in results.items():
        if arm in compared:
            cost = _exact(compared[arm], *logs[arm], method)
        elif runs and base_runs:
            cost = _bound(runs, base_runs, method)
        else:
            side = "the baseline" if runs else "this arm"
            cost = Cost(kind="none", note=f"no result of {side} yet")
        sizes = sample_sizes(sides[arm], results[arm], cost.pairs or 0)
        costs[arm] = replace(cost, **sizes)
    return costs


def _all_exact(runs: Sequence[Outcome]) -> bool:
    return all(run.exact for run in runs)


def _logs(runs: Sequence[Outcome]) -> list[tuple[int, float]]:
    return [(run.seed, math.log(run.high)) for run in runs]


def _exact(compared: Contrast, arm: Values, baseline: Values, method: Method) -> Cost:
    interval = exponential(compared.interval(method), minus=1.0)
    own_interval = None
    if compared.own != compared.estimate:
        own_interval = change_interval(compared.own, method.alpha)
    return Cost(
        kind="point" if interval.low is None else "interval",
        **vars(interval),
        pairs=len(compared.pairs) or None,
        pairing_variance_ratio=_pairing_variance_ratio(compared.pairs, arm, baseline),
        figure=compared.estimate,
        own=own_interval,
        stands_out=compared.stands_out,
        baseline_stands_out=compared.baseline_stands_out,
    )


def _pairing_variance_ratio(
    pairs: Sequence[int], arm: Values, baseline: Values
) -> float | None:
    """Return how much larger the variance would be without pairs; None without pairs or spread."""
    if len(pairs) < 2:
        return None
    x, y = (np.array([dict(side)[seed] for seed in pairs]) for side in (arm, baseline))
    paired = float(np.var(x - y, ddof=1))
    if paired > 0:
        return float(np.var(x, ddof=1) + np.var(y, ddof=1)) / paired
    return None


def _bound(arm: Sequence[Outcome], baseline: Sequence[Outcome], method: Method) -> Cost:
    """Bound the cost: each unknown T may be anywhere in its range."""
    reasons = []
    for name, runs in (("this arm", arm), ("the baseline", baseline)):
        if not _all_exact(runs):
            reasons.append(f"{name}: {_why_inexact(runs)}")
    low, high = _log_range(arm)
    base_low, base_high = _log_range(baseline)
    log_bounds = Interval(
        low=low - base_high, high=high - base_low, note="; ".join(reasons)
    )
    bounds = exponential(log_bounds, minus=1.0)
    cut_figure = None
    restricted = None
    enough = min(len(arm), len(baseline)) > 1
    if enough and bounds.low is not None and _all_exact(baseline):
        cut = [(run.seed, math.log(run.low)) for run in arm]
        cut_figure = contrast(cut, _logs(baseline), paired=method.paired).estimate
        restricted = change_interval(cut_figure, method.alpha)
    kind: CostKind = "none" if bounds.low is None and bounds.high is None else "bound"
    return Cost(kind=kind, **vars(bounds), restricted=restricted, cut_figure=cut_figure)


def _log_range(runs: Sequence[Outcome]) -> tuple[float, float]:
    """Return the least and greatest possible mean of log T, NaN where it is unbounded."""
    low = high = 0.0
    for run in runs:
        low += math.log(run.low) if run.low > 0 else math.nan
        high += math.log(run.high) if 0 < run.high < math.inf else math.nan
    return low / len(runs), high / len(runs)


def _why_inexact(runs: Sequence[Outcome]) -> str:
    counts = Counter(
        "at_change" if run.at_change else run.end for run in runs if not run.exact
    )
    reasons = []
    for kind, reason in _INEXACT.items():
        if counts[kind]:
            reasons.append(f"{counts[kind]} {reason}")
    return f"of {len(runs)} runs {' and '.join(reasons)}"
