"""Moderated intervals against formulas written out with numpy and scipy; coverage: ``test_coverage``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ablate.results.contrasts import contrasts
from ablate.results.intervals import t_interval


def sides(arms, base):
    return {name: (list(enumerate(arm)), list(enumerate(base))) for name, arm in enumerate(arms)}


def drawn(seed, m, n, spreads=None):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, (m, n)) * np.array(spreads or [1.0] * m)[:, None], rng.normal(0, 1, n)


@pytest.mark.parametrize(("m", "n"), [(2, 2), (7, 3), (3, 5)])
def test_paired_by_the_formula(m, n):
    arms, base = drawn(0, m, n)
    apart = arms - base
    variances, own = apart.var(axis=1, ddof=1), n - 1
    d0 = min(3.0, 3 * own * (m - 1) / (m + 3))
    degrees = d0 + own
    for arm, found in contrasts(sides(arms, base), paired=True).items():
        variance = (d0 * variances.mean() + own * variances[arm]) / degrees
        low, high = stats.t.interval(0.95, degrees, apart[arm].mean(), math.sqrt(variance / n))
        interval = t_interval(found.estimate)
        assert (interval.low, interval.high) == pytest.approx((low, high))
        expected = stats.ttest_rel(arms[arm], base).confidence_interval()
        assert (t_interval(found.own).low, t_interval(found.own).high) == pytest.approx(tuple(expected))


def test_unpaired_by_the_formula():
    arms, base = drawn(1, 3, 4)
    variances = arms.var(axis=1, ddof=1)
    parts = (variances.mean() + 3 * variances) / 4 / 4
    for arm, found in contrasts(sides(arms, base), paired=False).items():
        both, known = np.array([parts[arm], base.var(ddof=1) / 4]), np.array([4, 3])
        degrees = min(both.sum() ** 2 / (both**2 / known).sum(), 12)
        low, high = stats.t.interval(0.95, degrees, arms[arm].mean() - base.mean(), math.sqrt(both.sum()))
        interval = t_interval(found.estimate)
        assert (interval.low, interval.high) == pytest.approx((low, high))


def test_one_pair_of_arms_alone_keeps_its_own_interval():
    arms, base = drawn(2, 1, 4)
    (found,) = contrasts(sides(arms, base), paired=True).values()
    assert found.estimate == found.own


def test_degrees_of_freedom_are_never_more_than_all_runs_have():
    arms, base = drawn(3, 1, 2)
    (found,) = contrasts(sides(arms, base), paired=False).values()
    assert found.own.degrees <= found.estimate.degrees <= 2


def test_an_arm_that_spreads_more_than_the_others_is_named():
    arms, base = drawn(4, 6, 5, spreads=[8.0, 1, 1, 1, 1, 1])
    found = contrasts(sides(arms, base), paired=True)
    assert [arm for arm, one in found.items() if one.stands_out] == [0]
    assert found[0].estimate.variance < found[0].own.variance
    own = (arms - base).var(axis=1, ddof=1)
    f = own[0] / own[1:].mean()
    assert f > stats.f.ppf(0.9, 4, 20)


@pytest.mark.parametrize("m", [1, 6])
def test_a_baseline_that_spreads_more_than_the_arms_is_named_and_keeps_its_own_variance(m):
    arms, base = drawn(4, m, 5)
    for base_of, out in ((8 * base, True), (base, False)):
        found = contrasts(sides(arms, base_of), paired=False)
        assert {one.baseline_stands_out for one in found.values()} == {out}
    f = (8 * base).var(ddof=1) / arms.var(axis=1, ddof=1).mean()
    assert f > stats.f.ppf(0.9, 4, 4 * m)
    for arm, one in contrasts(sides(arms, 8 * base), paired=False).items():
        assert one.estimate.variance == pytest.approx(one.own.variance, rel=0.03)
        assert one.estimate.variance >= (8 * base).var(ddof=1) / 5
        assert (one.estimate == one.own) == (m == 1), arm


def test_without_pairs_a_baseline_of_equal_runs_takes_the_arms_variance():
    arms, base = drawn(9, 3, 4)
    for one in contrasts(sides(arms, 0 * base), paired=False).values():
        assert one.estimate.variance > one.own.variance * 0.5
        assert t_interval(one.estimate).low is not None


def test_equal_runs_have_no_variance_and_lend_none():
    arms, base = drawn(5, 3, 4)
    with_copy = np.vstack([arms, base + 0.25])
    found = contrasts(sides(with_copy, base), paired=True)
    assert t_interval(found[3].estimate).low is None
    others = contrasts(sides(arms, base), paired=True)
    assert {arm: found[arm] for arm in others} == others


def test_arms_without_seeds_in_common_are_compared_unpaired_beside_pairs():
    arms, base = drawn(6, 3, 4)
    given_sides = sides(arms, base)
    given_sides[2] = ([(seed + 10, value) for seed, value in given_sides[2][0]], given_sides[2][1])
    found = contrasts(given_sides, paired=True)
    assert (found[0].pairs, found[2].pairs) == ((0, 1, 2, 3), ())
    expected = stats.ttest_ind(arms[2], base, equal_var=False).confidence_interval()
    assert t_interval(found[2].own).low == pytest.approx(expected.low)


@given(seed=st.integers(0, 10_000), unit=st.sampled_from([1e-3, 1.0, 1e4]), shift=st.floats(-5, 5))
def test_units_and_a_common_shift_change_nothing(seed, unit, shift):
    arms, base = drawn(seed, 4, 3)
    one = contrasts(sides(arms, base), paired=False)
    other = contrasts(sides(unit * (arms + shift), unit * (base + shift)), paired=False)
    for arm, found in one.items():
        assert other[arm].estimate.value == pytest.approx(unit * found.estimate.value, abs=1e-9 * unit)
        assert other[arm].estimate.variance == pytest.approx(unit**2 * found.estimate.variance, rel=1e-6)
        assert other[arm].estimate.degrees == pytest.approx(found.estimate.degrees, rel=1e-6)


def test_without_pairs_a_variance_is_drawn_by_no_more_degrees_than_the_others_have():
    left, right = [(0, 1.0), (1, 3.0)], [(2, 0.0), (3, 4.0), (4, 5.0)]
    found = contrasts({"arm": (left, right)}, paired=False)["arm"].estimate
    own_left, own_right = 2.0, 7.0  # with 1 and 2 degrees of freedom
    mean = (own_left + 2 * own_right) / 3
    assert found.variance == pytest.approx((mean + own_left) / 2 / 2 + (mean + 2 * own_right) / 3 / 3)
