"""Intervals of what has several sources of error, against scipy and against simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ablate.results.intervals import (
    NO_SPREAD,
    ONE_RUN,
    TOO_LARGE,
    difference,
    mean_estimate,
    t_interval,
)

values = st.lists(st.floats(-5, 5), min_size=2, max_size=8, unique=True).filter(lambda x: np.ptp(x) > 1e-6)


def welch_interval(left, right):
    return t_interval(difference(mean_estimate(left), mean_estimate(right)))


def of_four(a, b, c, d):
    """(mean a − mean b) − (mean c − mean d): as a speed-up is made of two rates and two token counts."""
    return difference(
        difference(mean_estimate(a), mean_estimate(b)), difference(mean_estimate(c), mean_estimate(d))
    )


@given(left=values, right=values)
def test_of_two_samples_it_is_welchs_test_of_scipy(left, right):
    theirs = stats.ttest_ind(left, right, equal_var=False)
    ours = difference(mean_estimate(left), mean_estimate(right))
    assert ours.degrees == pytest.approx(theirs.df, rel=1e-9)
    low, high = theirs.confidence_interval(0.95)
    assert (t_interval(ours).low, t_interval(ours).high) == pytest.approx((low, high), rel=1e-7, abs=1e-9)


@given(samples=st.tuples(values, values, values, values))
def test_of_four_samples_it_is_satterthwaites_formula_over_all_four(samples):
    parts = np.array([np.var(x, ddof=1) / len(x) for x in samples])
    degrees = parts.sum() ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, samples, strict=True))
    a, b, c, d = map(np.mean, samples)
    low, high = stats.t.interval(0.95, degrees, loc=a - b - c + d, scale=math.sqrt(parts.sum()))
    found = of_four(*samples)
    assert found.degrees == pytest.approx(degrees, rel=1e-9)
    assert (t_interval(found).low, t_interval(found).high) == pytest.approx((low, high), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(
    ("repeats", "seeds", "noise"),
    [
        ((6, 6), (5, 5), (0.004, 0.004, 0.027, 0.027)),  # as it is: a clock is steadier than seeds
        ((6, 6), (3, 5), (0.03, 0.01, 0.02, 0.04)),
        ((4, 8), (5, 5), (0.05, 0.05, 0.005, 0.005)),
    ],
)
def test_the_interval_of_four_samples_holds_the_truth_as_often_as_it_says(repeats, seeds, noise):
    rng = np.random.default_rng(11)
    sizes, truth, draws = (*repeats, *seeds), 0.2 - 0.08, 6000
    means = (0.2, 0.0, 0.08, 0.0)
    held = 0
    for _ in range(draws):
        found = t_interval(of_four(*(rng.normal(*draw) for draw in zip(means, noise, sizes, strict=True))))
        held += found.low <= truth <= found.high
    error = 2 * math.sqrt(0.05 * 0.95 / draws)
    assert 0.945 - error <= held / draws <= 0.965 + error  # Welch's errs on the wide side with few draws


def test_leaving_one_error_out_would_hold_it_too_rarely():
    """The contrast: the token cost's interval alone, over the ratio of mean throughputs."""
    rng = np.random.default_rng(12)
    held = 0
    for _ in range(2000):
        rates = rng.normal((0.2, 0.0), 0.03, (6, 2)).mean(axis=0)
        tokens = welch_interval(rng.normal(0.08, 0.02, 5), rng.normal(0.0, 0.02, 5))
        middle = rates[0] - rates[1]
        held += middle - tokens.high <= 0.12 <= middle - tokens.low
    assert held / 2000 < 0.85


def test_no_interval_where_one_side_has_none():
    few, same, many = mean_estimate([1.0]), mean_estimate([0.1] * 3), mean_estimate([1.0, 2.0])
    assert t_interval(difference(many, few)).note == ONE_RUN
    assert t_interval(difference(difference(many, few), many)).note == ONE_RUN
    assert same.variance == 0.0  # though 0.1 summed up thrice and divided is no 0.1
    assert t_interval(difference(same, same)).note == NO_SPREAD
    assert t_interval(difference(many, same)).low is not None


def test_figures_beyond_all_reckoning_give_no_interval():
    with np.errstate(over="ignore"):
        found = welch_interval([1e200, -1e200], [0.0, 1.0])
    assert (found.low, found.note) == (None, TOO_LARGE)
    assert welch_interval([1e100, -1e100], [0.0, 1.0]).low is not None
