"""Intervals against formulas written out with numpy and scipy; coverage: ``test_coverage``."""

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
    Method,
    contrasts,
    difference,
    mean_estimate,
    t_interval,
)

values = st.lists(st.floats(-5, 5), min_size=2, max_size=8, unique=True).filter(
    lambda x: np.ptp(x) > 1e-6
)


def ends(estimate):
    interval = t_interval(estimate)
    return interval.low, interval.high


@given(samples=st.tuples(values, values, values, values))
def test_two_samples_are_welchs_and_four_satterthwaites(samples):
    """Four: (mean a − mean b) − (mean c − mean d), as a speed-up is made of rates and token counts."""
    a, b, c, d = map(mean_estimate, samples)
    theirs = stats.ttest_ind(*samples[:2], equal_var=False)
    variances = np.array([stats.sem(sample) ** 2 for sample in samples])
    freedom = np.array([len(sample) - 1 for sample in samples])
    degrees = variances.sum() ** 2 / (variances**2 / freedom).sum()
    middle = a.value - b.value - c.value + d.value
    four = stats.t.interval(0.95, degrees, middle, math.sqrt(variances.sum()))
    for found, df, expected in (
        (difference(a, b), theirs.df, theirs.confidence_interval(0.95)),
        (difference(difference(a, b), difference(c, d)), degrees, four),
    ):
        assert found.degrees == pytest.approx(df, rel=1e-9)
        assert ends(found) == pytest.approx(tuple(expected), rel=1e-7, abs=1e-9)


def test_no_interval_where_a_side_has_none_or_figures_are_beyond_all_reckoning():
    few, same, many = map(mean_estimate, ([1.0], [0.1] * 3, [1.0, 2.0]))
    assert same.variance == 0.0  # though 0.1 summed up thrice and divided is no 0.1
    with np.errstate(over="ignore"):
        huge = mean_estimate([1e200, -1e200])
    for found, note in (
        (difference(many, few), ONE_RUN),
        (difference(difference(many, few), many), ONE_RUN),
        (difference(same, same), NO_SPREAD),
        (difference(huge, many), TOO_LARGE),
        (difference(many, same), None),
    ):
        interval = t_interval(found)
        assert interval.note == note
        assert (interval.low is None) == (note is not None)


# ---- several arms against one baseline -------------------------------------------------------------------


def compare(arms, base, *, paired):
    base_values = list(enumerate(base))
    sides = {name: (list(enumerate(arm)), base_values) for name, arm in enumerate(arms)}
    return contrasts(sides, Method(paired=paired))


def drawn(seed, m, n):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, (m, n)), rng.normal(0, 1, n)


@pytest.mark.parametrize(("m", "n"), [(2, 2), (7, 3), (3, 5)])
def test_paired_by_the_formula(m, n):
    arms, base = drawn(0, m, n)
    apart = arms - base
    variances, own = apart.var(axis=1, ddof=1), n - 1
    d0 = min(3.0, 3 * own * (m - 1) / (m + 3))
    for arm, found in compare(arms, base, paired=True).items():
        variance = (d0 * variances.mean() + own * variances[arm]) / (d0 + own)
        error = math.sqrt(variance / n)
        expected = stats.t.interval(0.95, d0 + own, apart[arm].mean(), error)
        assert ends(found.estimate) == pytest.approx(expected)
        expected = stats.ttest_rel(arms[arm], base).confidence_interval()
        assert ends(found.own) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(("m", "n"), [(3, 4), (1, 2)])
def test_unpaired_by_the_formula(m, n):
    """A variance is drawn by one degree of freedom to the mean over the arms, or over one pair."""
    arms, base = drawn(1, m, n)
    own = np.array([*arms.var(axis=1, ddof=1), base.var(ddof=1)])
    moderated = ((own if m == 1 else own[:-1]).mean() + (n - 1) * own) / n / n
    moderated[-1] = moderated[-1] if m == 1 else own[-1] / n
    known = np.array([n, n if m == 1 else n - 1])
    for arm, found in compare(arms, base, paired=False).items():
        both = moderated[[arm, -1]]
        degrees = min(both.sum() ** 2 / (both**2 / known).sum(), (m + 1) * (n - 1))
        middle = arms[arm].mean() - base.mean()
        expected = stats.t.interval(0.95, degrees, middle, math.sqrt(both.sum()))
        assert ends(found.estimate) == pytest.approx(expected)


def test_one_pair_of_arms_alone_keeps_its_own_interval():
    (found,) = compare(*drawn(2, 1, 4), paired=True).values()
    assert found.estimate == found.own


@pytest.mark.parametrize("n", [4, 5])
def test_an_arm_that_spreads_more_than_the_others_is_named_and_of_five_pairs_keeps_its_own(
    n,
):
    arms, base = drawn(4, 6, n)
    arms[0] *= 8
    compared = compare(arms, base, paired=True)
    assert [arm for arm, contrast in compared.items() if contrast.stands_out] == [0]
    own = (arms - base).var(axis=1, ddof=1)
    assert own[0] / own[1:].mean() > stats.f.ppf(0.93, n - 1, 5 * (n - 1))
    assert (compared[0].estimate == compared[0].own) == (n == 5)
    assert compared[1].estimate != compared[1].own


@pytest.mark.parametrize("m", [1, 6])
def test_a_baseline_that_spreads_more_than_the_arms_is_named_and_keeps_its_own_variance(
    m,
):
    arms, base = drawn(4, m, 5)
    for found in compare(arms, base, paired=False).values():
        assert not found.baseline_stands_out
    variance = (8 * base).var(ddof=1)
    own = arms.var(axis=1, ddof=1)
    assert variance / own.mean() > stats.f.ppf(0.93, 4, 4 * m)
    for found in compare(arms, 8 * base, paired=False).values():
        assert found.baseline_stands_out
        assert found.estimate.variance == pytest.approx(found.own.variance, rel=0.03)
        assert found.estimate.variance >= variance / 5
        assert (found.estimate == found.own) == (m == 1)


def test_equal_runs_have_no_variance_and_lend_none_but_an_equal_baseline_takes_the_arms():
    arms, base = drawn(5, 3, 4)
    found = compare(np.vstack([arms, base + 0.25]), base, paired=True)
    assert ends(found[3].estimate) == (None, None)
    others = compare(arms, base, paired=True)
    assert {arm: found[arm] for arm in others} == others
    for one in compare(arms, 0 * base, paired=False).values():
        assert one.estimate.variance > one.own.variance * 0.5
        assert None not in ends(one.estimate)


def test_arms_without_seeds_in_common_are_compared_unpaired_beside_pairs():
    arms, base = drawn(6, 3, 4)
    base_values = list(enumerate(base))
    sides = {}
    for name, first_seed in enumerate((0, 0, 10)):
        sides[name] = (list(enumerate(arms[name], first_seed)), base_values)
    found = contrasts(sides, Method(paired=True))
    assert (found[0].pairs, found[2].pairs) == ((0, 1, 2, 3), ())
    expected = stats.ttest_ind(arms[2], base, equal_var=False).confidence_interval()
    assert ends(found[2].own) == pytest.approx(tuple(expected))
