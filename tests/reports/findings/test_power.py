"""What so many seeds could show: against simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import hits, token_cost

from ablate.reports.findings.power import power_of
from ablate.results.claims import p_values
from ablate.run.outcome import Outcome
from ablate.store.plan_file import Margin

SPREAD = 0.03


def of(logs):
    return hits(*np.exp(logs))


def power(arm, baseline, *, paired=False, limit=None):
    cost = token_cost(arm, baseline, paired=paired)
    margin = limited = None
    if limit is not None:
        margin = Margin(kind="cost", value=math.expm1(limit))
        limited = (cost.figure, limit)
    p = p_values(cost, None, margin)
    if margin is not None:
        del p["differs"]
    settled = min(p.values(), default=1.0) <= 0.05
    return power_of(cost, arm, baseline, limited, settled=settled)


def moved(values, mean, spread=SPREAD):
    """Return values with exactly that mean, and that standard deviation."""
    apart = np.asarray(values, float) - np.mean(values)
    return mean + apart / apart.std(ddof=1) * spread


def how_often_found(effect, error, degrees):
    """By the noncentral t of scipy.stats, where ours is of scipy.special alone."""
    edge = stats.t.ppf(0.975, degrees)
    t = stats.nct(degrees, effect / error)
    return t.sf(edge) + t.cdf(-edge)


def how_often_settled(n, effect, limit):
    """Return the share of 4,000 simulated studies of n seeds an arm that find its standing to a margin."""
    rng = np.random.default_rng(n)
    found = stats.ttest_ind(
        rng.normal(effect, SPREAD, (4000, n)), rng.normal(0, SPREAD, (4000, n)), axis=1
    )
    low, high = found.confidence_interval(0.9)
    return np.mean(((-limit < low) & (high < limit)) | (low > limit) | (high < -limit))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_smallest_cost_is_found_four_times_in_five(n):
    rng = np.random.default_rng(n)
    x, y = (moved(rng.normal(0, 1, n), 18) for _ in range(2))

    def found(effect, seeds):
        return how_often_found(effect, SPREAD * math.sqrt(2 / seeds), 2 * seeds - 2)

    effect = math.log1p(power(of(x), of(y)).smallest_cost)
    assert found(effect, n) == pytest.approx(0.8, abs=1e-6)
    m = n + power(of(x + 0.02), of(y)).more_seeds
    assert found(0.02, m - 1) < 0.8 <= found(0.02, m)


@pytest.mark.parametrize(
    ("effect", "limit"), [(0.0, 0.03), (0.005, 0.03), (0.05, 0.03)]
)
def test_so_many_more_seeds_settle_it(effect, limit):
    x, y = of(moved([-1, 0, 1], 18 + effect)), of(moved([-1, 0, 1], 18))
    more = power(x, y, limit=limit).more_seeds
    assert how_often_settled(3 + more, effect, limit) >= 0.78
    assert how_often_settled(2 + more, effect, limit) <= 0.82
    assert power(x, y, limit=1.0).more_seeds == 0


def test_pairs_show_smaller_costs_and_need_fewer_seeds():
    rng = np.random.default_rng(3)
    n, effect, pairs = 5, 0.015, 0.014
    seeds = rng.normal(18, 0.05, n)
    x, y = of(seeds + moved(rng.normal(0, 1, n), effect, pairs)), of(seeds)
    apart = power(x, y)
    found = power(x, y[::-1], paired=True)
    assert found.spread_of_the_pairs == pytest.approx(pairs)
    assert apart.spread_of_the_pairs is None
    assert found.spread_of_log_tokens == pytest.approx(apart.spread_of_log_tokens)

    def shown(cost, seeds):
        return how_often_found(cost, pairs / math.sqrt(seeds), seeds - 1)

    smallest = math.log1p(found.smallest_cost)
    assert shown(smallest, n) == pytest.approx(0.8, abs=1e-6)
    m = n + found.more_seeds
    assert shown(effect, m - 1) < 0.8 <= shown(effect, m)
    assert found.smallest_cost < apart.smallest_cost / 2
    assert found.more_seeds < apart.more_seeds / 4
    # Runs that share a seed, as in logs without seeds, and seeds that are not in common make no pair.
    alike = [[replace(run, seed=0) for run in side] for side in (x, y)]
    assert power(*alike, paired=True) == apart
    others = [replace(run, seed=run.seed + 5) for run in y]
    assert power(x, others, paired=True) == apart


def test_what_is_settled_needs_no_more_what_is_nothing_too_many_and_some_has_nothing_to_go_by():
    x, y = [1, 2, 3, 4, 6], of(moved([1, 2, 3, 5, 4], 18, 0.01))
    assert power(of(moved(x, 18.35, 0.01)), y).more_seeds == 0
    assert power(of(moved(x, 18.0001, 0.01)), y).more_seeds is None
    one, two = of([18]), of([18, 18.1])
    # The spread of those that hit is not that of all: a bound has no power.
    censored = [Outcome(seed=9, end="censored", low=5.0), *two]
    same = of([18, 18])
    for arm, base in ((one, two), (two, one), (same, same), (censored, two)):
        assert power(arm, base) is None
    assert power(of([18, 19]), of([18.1, 19.1]), paired=True) is None
