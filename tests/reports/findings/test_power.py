"""What so many seeds could show: against simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import smooth_curve

from ablate.reports import analyse, load_frames
from ablate.reports.findings.power import power_of
from ablate.reports.words.tables import power_table
from ablate.results.cost import token_cost
from ablate.run.outcome import Outcome


def runs(logs, end="hit"):
    return [
        Outcome(seed=seed, end=end, low=math.exp(value), high=math.exp(value))
        for seed, value in enumerate(logs)
    ]


def outcomes(rng, n, spread, shift=0.0):
    return runs(18 + shift + rng.normal(0, spread, n))


def how_often_found(rng, n, effect, spread):
    """Return the share of 4,000 simulated studies of n seeds an arm whose t test finds the effect."""
    arm, baseline = rng.normal(effect, spread, (4000, n)), rng.normal(0, spread, (4000, n))
    return np.mean(stats.ttest_ind(arm, baseline, axis=1).pvalue < 0.05)


def power(arm, baseline, *, paired=False):
    return power_of(token_cost(arm, baseline, paired=paired), arm, baseline)


def moved(values, mean, spread=None):
    """Return values with exactly that mean, and that standard deviation."""
    apart = np.asarray(values, float) - np.mean(values)
    return mean + (apart if spread is None else apart / apart.std(ddof=1) * spread)


@pytest.mark.parametrize("n", [3, 4, 10])
def test_the_smallest_cost_is_found_four_times_in_five(n):
    rng = np.random.default_rng(n)
    x, y = (moved(rng.normal(0, 1, n), 18, 0.03) for _ in range(2))
    effect = math.log1p(power(runs(x), runs(y)).smallest_cost)
    assert how_often_found(rng, n, effect, 0.03) == pytest.approx(0.8, abs=0.025)


def test_the_power_is_that_of_the_noncentral_t():
    """The noncentral t of scipy.stats, where ours is of scipy.special alone."""
    x, y = moved([1, 2, 4, 3, 7], 18, 0.05), moved([1, 5, 2, 3, 2], 18, 0.05)
    effect = math.log1p(power(runs(x), runs(y)).smallest_cost) / (0.05 * math.sqrt(2 / 5))
    edge = stats.t.ppf(0.975, 8)
    assert stats.nct.sf(edge, 8, effect) + stats.nct.cdf(-edge, 8, effect) == pytest.approx(0.8, abs=1e-6)


def test_so_many_more_seeds_settle_it():
    rng = np.random.default_rng(0)
    spread, effect = 0.03, 0.02
    x, y = moved([-1, 0, 1], 18 + effect, spread), moved([-1, 0, 1], 18, spread)
    more = power(runs(x), runs(y)).more_seeds
    assert how_often_found(rng, 3 + more, effect, spread) >= 0.78
    assert how_often_found(rng, 2 + more, effect, spread) <= 0.82


@pytest.mark.parametrize(("effect", "limit"), [(0.0, 0.03), (0.005, 0.03), (0.05, 0.03)])
def test_so_many_more_seeds_settle_a_margin(effect, limit):
    rng = np.random.default_rng(1)
    spread = 0.03
    x, y = moved([-1, 0, 1], 18 + effect, spread), moved([-1, 0, 1], 18, spread)
    cost = token_cost(runs(x), runs(y))
    more = power_of(cost, runs(x), runs(y), (cost.log_ratio, limit)).more_seeds

    def how_often(seeds):
        arm, base = rng.normal(effect, spread, (4000, seeds)), rng.normal(0, spread, (4000, seeds))
        low, high = stats.ttest_ind(arm, base, axis=1).confidence_interval(0.9)
        return np.mean(((-limit < low) & (high < limit)) | (low > limit) | (high < -limit))

    assert how_often(3 + more) >= 0.78
    assert how_often(2 + more) <= 0.82
    settled = power_of(cost, runs(x), runs(y), (cost.log_ratio, 1.0))
    assert settled.more_seeds == 0


def test_pairs_show_smaller_costs_and_need_fewer_seeds():
    rng = np.random.default_rng(3)
    n, of_seed, effect = 5, 0.05, 0.015
    seeds = rng.normal(18, of_seed, n)
    x, y = runs(seeds + moved(rng.normal(0, 1, n), effect, 0.014)), runs(seeds)
    apart, found = power(x, y), power(x, y[::-1], paired=True)
    assert found.spread_of_the_pairs == pytest.approx(0.014)
    assert apart.spread_of_the_pairs is None
    assert (found.spread_of_log_tokens, found.spread_of_the_baseline) == pytest.approx(
        (apart.spread_of_log_tokens, apart.spread_of_the_baseline)
    )
    for effect_of, seeds_of in [(math.log1p(found.smallest_cost), n), (effect, n + found.more_seeds)]:
        pairs = rng.normal(effect_of, 0.014, (4000, seeds_of))
        assert np.mean(stats.ttest_1samp(pairs, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.05)
    assert found.smallest_cost < apart.smallest_cost / 2
    assert found.more_seeds < apart.more_seeds / 4


def test_runs_that_share_a_seed_all_count():
    """As in logs without seeds, all of which are of seed 0."""
    x, y = runs(moved([1, 2, 3, 4], 18.02, 0.03)), runs(moved([1, 2, 3, 5], 18, 0.03))
    alike = [[replace(run, seed=0) for run in side] for side in (x, y)]
    assert power(*alike) == power(x, y)
    assert power(*alike, paired=True) == power(x, y)  # which run is whose pair is not known


def test_a_study_of_paired_seeds_is_shown_by_its_pairs(make_study):
    curves = {
        "bf16": [smooth_curve(np.random.default_rng(seed), seed_noise=0.05) for seed in range(4)],
        "all": [smooth_curve(np.random.default_rng(seed), seed_noise=0.05, cost=0.02) for seed in range(4)],
    }
    tables = {
        paired: power_table(analyse(load_frames(make_study(curves, paired_seeds=paired))))
        for paired in (False, True)
    }
    cells = {paired: dict(zip(table.columns, table.rows[0], strict=True)) for paired, table in tables.items()}
    assert cells[False]["Spread of the pairs"] == "–"
    pairs, spread, smallest, before = (
        float(text.split("\u00a0")[0])
        for text in (
            cells[True]["Spread of the pairs"],
            cells[True]["Spread"],
            cells[True]["Smallest cost"],
            cells[False]["Smallest cost"],
        )
    )
    assert pairs < spread / 3
    assert smallest < before / 3


def test_seeds_that_are_not_in_common_make_no_pair():
    rng = np.random.default_rng(4)
    x, y = outcomes(rng, 4, 0.02), outcomes(rng, 4, 0.02)
    other = [replace(run, seed=run.seed + 3) for run in y]
    assert power(x, other, paired=True) == power(x, y)


def test_what_is_settled_needs_no_more_and_what_is_nothing_needs_too_many():
    x, y = moved([1, 2, 3, 4, 6], 18.35, 0.01), moved([1, 2, 3, 5, 4], 18, 0.01)
    assert power(runs(x), runs(y)).more_seeds == 0
    assert power(runs(moved(x, 18.0001)), runs(y)).more_seeds is None


def test_nothing_to_go_by():
    rng = np.random.default_rng(2)
    one, two = outcomes(rng, 1, 0.1), outcomes(rng, 2, 0.1)
    assert power(one, two) is None
    assert power(two, one) is None
    assert power(runs([18, 18]), runs([18, 18])) is None
    assert power(runs([18, 19]), runs([18.1, 19.1]), paired=True) is None
    # The spread of those that hit is not that of all: a bound has no power.
    censored = Outcome(seed=9, end="censored", low=5.0)
    assert power([censored, *two], two) is None
