"""Token cost: what share more tokens an arm needs than the baseline to reach the same validation loss.

exp(mean log T_arm − mean log T_baseline) − 1, with a t interval on log T: of paired differences where seeds
are pairs, else Welch's, each with its variance moderated by the study's other arms (``intervals``). A mean
over the runs that hit would leave out the slow ones. So if any run of either side has no known T, there is no
estimate, only a bound from the ranges of all T.

Two one-sided tests (Schuirmann 1987) decide whether an arm is as good as the baseline up to the study's
margin. An arm is *within* if its 90 % interval is inside the margin on both sides, which errs in 5 % of
studies; *outside* if the interval is outside; else *open*. An interval that holds zero proves neither.
"""

from __future__ import annotations

import math
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
from ablate.results.losses import with_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.intervals import Contrast, Method, Values
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import Margin

    Sides = tuple[Sequence[Outcome], Sequence[Outcome]]
    """Runs of an arm, and of the baseline that they are compared with."""

CostKind = Literal["interval", "point", "bound", "none", "baseline"]
Standing = Literal["within", "outside", "open"]
NEAR_BUDGET = 0.05
"""Share of the budget. A single miss removes the interval: with hits so late only lucky studies have one."""


@dataclass(frozen=True, kw_only=True)
class Cost(Compared):
    """A token cost as a fraction (0.18 is 18 % more tokens).

    ``kind``: ``interval``, an estimate with its interval; ``point``, an estimate without one; ``bound``, no
    estimate: ``low`` or ``high`` bounds the cost of *these runs* without a sampling error, and ``restricted``
    is the cost with every run cut at the budget, with its interval; ``none``, nothing.
    ``figure``: log (1 + cost).
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
    results = {
        arm: (with_result(runs), with_result(base_runs))
        for arm, (runs, base_runs) in sides.items()
    }
    logs = {}
    for arm, (runs, base_runs) in results.items():
        if runs and base_runs and _all_exact(runs) and _all_exact(base_runs):
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
        costs[arm] = replace(cost, n=len(runs), n_baseline=len(base_runs))
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
        pairing_variance_ratio=_pairing_variance_ratio(
            compared.pairs, dict(arm), dict(baseline)
        ),
        figure=compared.estimate,
        own=own_interval,
        stands_out=compared.stands_out,
        baseline_stands_out=compared.baseline_stands_out,
    )


def _pairing_variance_ratio(
    pairs: Sequence[int], arm: Mapping[int, float], baseline: Mapping[int, float]
) -> float | None:
    """Return how much larger the variance would be without pairs; None without pairs or spread."""
    if not pairs:
        return None
    x = np.array([arm[seed] for seed in pairs])
    y = np.array([baseline[seed] for seed in pairs])
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
    bounds = exponential(
        Interval(low=low - base_high, high=high - base_low, note="; ".join(reasons)),
        minus=1.0,
    )
    restricted = None
    if (
        bounds.low is not None
        and _all_exact(baseline)
        and min(len(arm), len(baseline)) >= 2
    ):
        cut = [(run.seed, math.log(run.low)) for run in arm]
        log_ratio = contrast(cut, _logs(baseline), paired=method.paired).estimate
        restricted = change_interval(log_ratio, method.alpha)
    kind: CostKind = "none" if bounds.low is None and bounds.high is None else "bound"
    return Cost(kind=kind, **vars(bounds), restricted=restricted)


def _log_range(runs: Sequence[Outcome]) -> tuple[float, float]:
    """Return the least and greatest possible mean of log T, NaN where it is unbounded."""

    def mean_log(tokens: list[float]) -> float:
        if not all(0 < value < math.inf for value in tokens):
            return math.nan
        return sum(map(math.log, tokens)) / len(tokens)

    return mean_log([run.low for run in runs]), mean_log([run.high for run in runs])


def _why_inexact(runs: Sequence[Outcome]) -> str:
    counts = {
        "ended before the target": sum(run.end == "censored" for run in runs),
        "diverged": sum(run.end == "diverged" for run in runs),
        "reached the target by the first evaluation": sum(
            run.end == "hit" and not run.exact for run in runs
        ),
    }
    reasons = " and ".join(
        f"{count} {reason}" for reason, count in counts.items() if count
    )
    return f"of {len(runs)} runs {reasons}"


def standing(
    cost: Cost, loss: Estimate | None, margin: Margin, alpha: float = ALPHA
) -> Standing:
    """Tell whether an arm is within the margin, outside of it, or neither is shown.

    ``loss``: the arm's difference in final loss; None where unknown. A margin in cost is the
    same factor to both sides: 5 % more tokens, or 1 / 1.05 of them. ``alpha``: the chance that each of the
    two tests errs.
    """
    figure, limit = limited_figure(cost, loss, margin)
    if figure is not None:
        return stands(figure, limit, alpha)
    # The true cost of runs cut at the budget is at least the restricted one.
    cut = cost.restricted
    if (
        margin.kind == "cost"
        and cut is not None
        and cut.low is not None
        and cut.low > margin.value
    ):
        return "outside"
    return "open"


def limited_figure(
    cost: Cost, loss: Estimate | None, margin: Margin
) -> tuple[Estimate | None, float]:
    """Return the figure that the margin limits, None if unknown, and the limit on either side of zero."""
    if margin.kind == "cost":
        return cost.figure, math.log1p(margin.value)
    return loss, margin.value


def stands(figure: Estimate, limit: float, alpha: float = ALPHA) -> Standing:
    """Tell where a figure is relative to ± ``limit``, by two one-sided tests at level ``alpha`` each."""
    interval = t_interval(figure, 2 * alpha)
    if interval.low is None or interval.high is None:
        return "open"
    if -limit < interval.low and interval.high < limit:
        return "within"
    if interval.low > limit or interval.high < -limit:
        return "outside"
    return "open"
