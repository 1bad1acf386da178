"""Simulated studies with a known truth: the report's intervals hold it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from simulated_studies import (
    APART,
    EQUAL,
    HALF,
    MARGIN,
    by_arms,
    by_budget,
    by_claims,
    by_estimator,
    by_least,
    by_loop,
    by_report,
    by_settled,
    by_speed_up,
    by_try,
)

sys.path.pop(0)  # names there are those of other modules, too


def repeats(few, many):
    return pytest.mark.parametrize(
        "repeats", [few, pytest.param(many, marks=pytest.mark.exhaustive)]
    )


def error(repeats):
    """Two standard errors of a share of 5 % over so many repeats."""
    return 2 * np.sqrt(0.05 * 0.95 / repeats)


@repeats(400, 2000)
@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("cost", [0.0, 0.08])
def test_the_interval_holds_the_truth_as_often_as_it_says(n, cost, repeats):
    tally = by_report(cost, n, repeats, seed=n)
    # 93 to 97 % and 5 ± 1 %, and the two standard errors of so many repeats; Welch's interval is a little too
    # wide for three runs of equal spread, which is the side to err on.
    assert 0.93 - error(repeats) <= tally.coverage <= 0.97 + error(repeats)
    assert abs(tally.bias) < 0.003 * np.sqrt(2000 / repeats)
    if cost == 0.0:
        least = 0.03 if n == 3 else 0.04
        assert least - error(repeats) <= tally.positive <= 0.06 + error(repeats)
    else:
        assert tally.positive > (0.5 if n == 3 else 0.8)


@repeats(300, 3000)
@pytest.mark.parametrize(
    ("paired", "n", "width"),
    [
        (True, 2, 0.4),
        (True, 3, 0.72),
        (True, 5, 0.92),
        (False, 2, 0.65),
        (False, 3, 0.92),
        (False, 5, 0.985),
    ],
)
def test_moderated_intervals_hold_the_truth_as_often_in_less_width(
    paired, n, width, repeats
):
    held, wide, *_ = by_arms(n, repeats, paired=paired, seed=n)
    own_held, own_wide, *_ = by_arms(n, repeats, paired=paired, moderated=False, seed=n)
    # The seven arms of a study share their baseline, so they are fewer than seven times as many draws.
    assert (
        0.94 - error(2 * repeats)
        <= held
        <= (0.99 if (paired, n) == (False, 2) else 0.98)
    )
    assert 0.94 - error(2 * repeats) <= own_held
    assert wide < width * own_wide


def test_an_arm_of_another_spread_is_covered_less_often_and_its_own_interval_is_not():
    assert 0.86 < by_arms(3, 1000, odd=2.0)[2] < 0.93
    assert 0.83 < by_arms(3, 1000, odd=3.0)[2] < 0.90
    assert by_arms(3, 1000, odd=3.0, moderated=False)[2] > 0.93


@repeats(500, 4000)
@pytest.mark.parametrize("more", [2.0, 3.0])
@pytest.mark.parametrize("n", [5, 8])
def test_from_five_seeds_on_an_arm_of_another_spread_is_covered_by_its_own(
    n, more, repeats
):
    assert by_arms(n, repeats, odd=more)[2] > 0.93 - error(repeats)


@repeats(500, 4000)
@pytest.mark.parametrize(
    ("n", "arms", "spread"), [(2, 7, 3), (3, 7, 2), (3, 7, 3), (5, 7, 3), (3, 1, 3)]
)
def test_without_pairs_a_baseline_of_another_spread_is_allowed_for(
    n, arms, spread, repeats
):
    held, *_ = by_arms(n, repeats, paired=False, arms=arms, odd_base=spread, seed=n)
    assert 0.93 - error(repeats) <= held <= 0.97 + error(repeats)


@repeats(100, 400)
@pytest.mark.parametrize(
    ("cost", "fewer"), [(0.0, None), (0.08, 0.95), (0.15, 0.8), (0.3, 0.75)]
)
def test_seeds_until_settled_hold_at_every_look_and_are_fewer(cost, fewer, repeats):
    held, used, wrong = by_settled(cost, repeats)
    assert held >= 0.95 - error(repeats)
    assert wrong <= 0.055 + error(repeats)
    assert (used > 7) == (cost == 0.0)
    assert fewer is None or used < fewer * by_settled(cost, repeats, moderated=False)[1]


@repeats(200, 1000)
def test_a_try_keeps_what_is_no_better_in_one_of_twenty_over_all_its_looks(repeats):
    for more in ({}, {"margin": 0.05, "cost": 0.05}, {"paired": False}):
        keep, *_ = by_try(tries=repeats, **({"cost": 0.0} | more))
        assert keep <= 0.05 + error(repeats)
    worse = by_try(0.05, repeats)
    assert worse[0] <= 0.05 / 10
    assert worse[1] > 0.95
    better = by_try(-0.05, repeats)
    assert better[0] > 0.8
    assert max(worse[3], better[3]) < 6


@repeats(40, 400)
def test_a_loop_of_tries_keeps_what_is_no_better_in_one_of_twenty(repeats):
    assert by_loop(20, repeats, in_loop=True) <= 0.05 + error(repeats)
    assert by_loop(20, repeats, in_loop=False) > 0.2


@repeats(300, 4000)
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    ("costs", "claim"),
    [(EQUAL, "differs"), (HALF, "differs"), ((MARGIN,) * 7, "within")],
)
def test_what_is_stated_of_several_arms_errs_in_one_study_of_twenty(
    costs, claim, n, repeats
):
    (alone, together), _ = by_claims(costs, n, repeats, claim=claim).T
    assert together <= 0.055 + error(repeats)
    assert alone > 0.09


@repeats(200, 4000)
def test_a_cost_of_eight_percent_is_stated_nine_times_in_ten(repeats):
    assert by_claims((0.08,) * 8, 5, repeats)[1, 1] >= 0.9 - error(repeats)


@repeats(100, 2000)
def test_the_least_costly_arm_is_among_those_that_may_be(repeats):
    size, is_among, holds, _, wrong = by_least(APART, 3, repeats)
    assert size < 6
    assert is_among >= 0.95
    assert holds >= 0.95 - error(repeats)
    assert wrong < 0.01 + error(repeats)
    assert by_least(EQUAL, 3, repeats)[2] >= 0.95 - error(repeats)


def test_the_local_fit_spreads_less_and_is_hardly_biased():
    fit, crossing = by_estimator(400).T
    assert fit.std() < 0.7 * crossing.std()
    assert abs(fit.mean()) < 0.005


@repeats(400, 2000)
@pytest.mark.parametrize("noise", [0.005, 0.03])
@pytest.mark.parametrize("n", [3, 5])
def test_the_speed_ups_interval_holds_the_truth_as_often_as_it_says(n, noise, repeats):
    tally = by_speed_up(0.08, n, repeats, noise=noise, seed=n)
    assert 0.93 - error(repeats) <= tally.coverage <= 0.97 + error(repeats)
    assert abs(tally.bias) < 0.003 * np.sqrt(2000 / repeats)


def test_near_the_budget_intervals_hold_the_truth_less_often_and_are_named():
    lucky, given, near = by_budget(0.08, 3, 1500, budget=1.0)
    assert given < 0.2
    assert lucky.coverage < 0.9
    assert lucky.bias < -0.015
    assert near > 0.98
    tally, given, near = by_budget(0.08, 3, 500, budget=1.21)
    assert given > 0.99
    assert tally.coverage >= 0.95 - error(500)
    assert near < 0.02
