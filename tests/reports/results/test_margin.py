"""Two one-sided tests against a margin, as scipy computes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ablate.results.cost import Cost, standing, token_cost
from ablate.results.intervals import Estimate, Interval, mean_estimate
from ablate.run.outcome import Outcome
from ablate.store.plan_file import Margin

FIVE = Margin(kind="cost", value=0.05)


def hits(logs):
    return [
        Outcome(seed=seed, end="hit", low=math.exp(log), high=math.exp(log)) for seed, log in enumerate(logs)
    ]


def by_scipy(x, y, limit):
    """Return where pairs stand to a margin, by one-sided t tests at 5 %."""
    apart = np.array(x) - np.array(y)
    above = stats.ttest_1samp(apart, -limit, alternative="greater").pvalue < 0.05
    below = stats.ttest_1samp(apart, limit, alternative="less").pvalue < 0.05
    if above and below:
        return "within"
    beyond = stats.ttest_1samp(apart, limit, alternative="greater").pvalue < 0.05
    under = stats.ttest_1samp(apart, -limit, alternative="less").pvalue < 0.05
    return "outside" if beyond or under else "open"


@pytest.mark.parametrize("seed", range(40))
def test_it_is_two_one_sided_tests(seed):
    rng = np.random.default_rng(seed)
    x, y = 18 + rng.normal(0.02 * (seed % 5), 0.02, 4), 18 + rng.normal(0, 0.01, 4)
    cost = token_cost(hits(x), hits(y), paired=True)
    assert standing(cost, None, FIVE) == by_scipy(x, y, math.log(1.05))


def test_the_margin_is_a_factor_to_both_sides_and_beyond_on_either_is_outside():
    for shift, place in ((0.0, "within"), (0.3, "outside"), (-0.3, "outside"), (0.05, "open")):
        x = 18 + shift + np.array([-0.01, 0.0, 0.01])
        assert standing(token_cost(hits(x), hits([18.0, 18.001, 17.999]), paired=True), None, FIVE) == place


def test_a_margin_in_loss_takes_the_loss_difference():
    margin = Margin(kind="loss", value=0.01)
    cost = Cost(kind="none")
    assert standing(cost, mean_estimate([0.001, 0.002, 0.0]), margin) == "within"
    assert standing(cost, mean_estimate([0.021, 0.022, 0.020]), margin) == "outside"
    assert standing(cost, mean_estimate([0.001, 0.030, 0.0]), margin) == "open"
    assert standing(cost, None, margin) == "open"


def test_without_an_interval_it_is_open_but_for_a_bound_beyond_the_margin():
    assert (
        standing(Cost(kind="point", log_ratio=Estimate(value=0.0, variance=0.0, degrees=0)), None, FIVE)
        == "open"
    )
    cut = Cost(kind="bound", low=0.2, restricted=Interval(estimate=0.2, low=0.1, high=0.3))
    assert standing(cut, None, FIVE) == "outside"
    assert standing(Cost(kind="bound", low=0.2), None, FIVE) == "open"


def test_equal_arms_are_called_outside_and_far_ones_within_as_seldom_as_promised():
    rng = np.random.default_rng(0)
    limit, wrong = math.log(1.05), 0
    for _ in range(1000):
        x, y = 18 + limit + rng.normal(0, 0.02, 5), 18 + rng.normal(0, 0.02, 5)  # just at the margin
        wrong += standing(token_cost(hits(x), hits(y), paired=True), None, FIVE) == "within"
    assert wrong <= 65
