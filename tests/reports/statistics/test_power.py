"""What so many seeds could show: against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from synthetic_study import smooth_curve

from ablate.reports import analyse, load_frames
from ablate.reports.statistics.power import power_of
from ablate.reports.words.tables import power_table
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


@pytest.mark.parametrize("n", [4, 10])
def test_the_smallest_cost_is_found_four_times_in_five(n):
    rng = np.random.default_rng(n)
    x, y = rng.normal(0, 0.03, n), rng.normal(0, 0.03, n)
    x, y = ((v - v.mean()) / v.std(ddof=1) * 0.03 for v in (x, y))
    power = power_of(runs(x + 18), runs(y + 18), settled=False, estimate=0.05)
    effect = math.log1p(power.smallest_cost)
    # The sum of two quantiles is a little off the noncentral t where there are few degrees of freedom.
    assert how_often_found(rng, n, effect, 0.03) == pytest.approx(0.8, abs=0.04)


def test_so_many_more_seeds_settle_it():
    rng = np.random.default_rng(0)
    spread, effect = 0.03, 0.02
    x, y = (v / v.std(ddof=1) * spread for v in (np.array([-1.0, 0, 1]), np.array([-1.0, 0, 1])))
    power = power_of(runs(x + 18), runs(y + 18), settled=False, estimate=math.expm1(effect))
    assert how_often_found(rng, 3 + power.more_seeds, effect, spread) == pytest.approx(0.8, abs=0.04)


def test_pairs_show_smaller_costs_and_need_fewer_seeds():
    rng = np.random.default_rng(3)
    n, of_seed, of_run, effect = 5, 0.05, 0.01, 0.015
    seeds = rng.normal(0, of_seed, n)
    x, y = runs(18 + effect + seeds + rng.normal(0, of_run, n)), runs(18 + seeds + rng.normal(0, of_run, n))
    apart = power_of(x, y, settled=False, estimate=math.expm1(effect))
    power = power_of(x, y[::-1], settled=False, estimate=math.expm1(effect), paired=True)
    spread = np.std([math.log(a.low) - math.log(b.low) for a, b in zip(x, y, strict=True)], ddof=1)
    assert power.spread_of_the_pairs == pytest.approx(spread)
    assert apart.spread_of_the_pairs is None
    assert (power.spread_of_log_tokens, power.spread_of_the_baseline) == pytest.approx(
        (apart.spread_of_log_tokens, apart.spread_of_the_baseline)
    )
    for effect_of, seeds_of in [
        (math.log1p(power.smallest_cost), n),
        (effect, n + power.more_seeds),
    ]:
        pairs = rng.normal(effect_of, spread, (4000, seeds_of))
        assert np.mean(stats.ttest_1samp(pairs, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.05)
    assert power.smallest_cost < apart.smallest_cost / 2
    assert power.more_seeds < apart.more_seeds / 4


def test_each_more_pair_is_one_more_degree_of_freedom():
    y = runs([18.0, 18.05, 17.95])
    x = runs([18.01, 18.08, 17.96])  # differences of 0.01, 0.03 and 0.01
    spread, effect = np.std([0.01, 0.03, 0.01], ddof=1), 0.015
    power = power_of(x, y, settled=False, estimate=math.expm1(effect), paired=True)

    def found_by(n, cost):
        error = spread / math.sqrt(n)
        return cost >= (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * error * (1 - 1e-9)

    assert found_by(3, math.log1p(power.smallest_cost))
    assert not found_by(3, 0.999 * math.log1p(power.smallest_cost))
    assert found_by(3 + power.more_seeds, effect)
    assert not found_by(2 + power.more_seeds, effect)


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
    assert "Spread of the pairs" not in cells[False]
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
    assert "unpaired" in tables[False].caption
    assert "unpaired" not in tables[True].caption


def test_seeds_that_are_not_in_common_make_no_pair():
    rng = np.random.default_rng(4)
    x, y = outcomes(rng, 4, 0.02), outcomes(rng, 4, 0.02)
    other = [Outcome(seed=run.seed + 3, end=run.end, low=run.low, high=run.high) for run in y]
    apart = power_of(x, y, settled=False, estimate=0.01)
    assert power_of(x, other, settled=False, estimate=0.01, paired=True) == apart


def test_what_is_settled_needs_no_more_and_what_is_nothing_needs_too_many():
    rng = np.random.default_rng(1)
    x, y = outcomes(rng, 5, 0.01, shift=0.3), outcomes(rng, 5, 0.01)
    assert power_of(x, y, settled=True, estimate=0.35).more_seeds == 0
    assert power_of(x, y, settled=False, estimate=0.0001).more_seeds is None
    assert power_of(x, y, settled=False, estimate=None).more_seeds is None


def test_nothing_to_go_by():
    rng = np.random.default_rng(2)
    one, two = outcomes(rng, 1, 0.1), outcomes(rng, 2, 0.1)
    assert power_of(one, two, settled=False, estimate=0.1) is None
    assert power_of(two, one, settled=False, estimate=0.1) is None
    assert power_of(runs([18, 18]), runs([18, 18]), settled=False, estimate=0.0) is None
    assert power_of(runs([18, 19]), runs([18.1, 19.1]), settled=False, estimate=0.1, paired=True) is None
    censored = [Outcome(seed=0, end="censored", low=5.0), Outcome(seed=1, end="censored", low=5.0)]
    assert power_of(censored, two, settled=False, estimate=None) is None
