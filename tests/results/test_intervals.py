"""Intervals of what has several sources of error, against scipy; coverage: ``test_coverage``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ablate.results.intervals import NO_SPREAD, ONE_RUN, TOO_LARGE, difference, mean_estimate, t_interval

values = st.lists(st.floats(-5, 5), min_size=2, max_size=8, unique=True).filter(lambda x: np.ptp(x) > 1e-6)


@given(samples=st.tuples(values, values, values, values))
def test_two_samples_are_welchs_and_four_satterthwaites(samples):
    """Four: (mean a − mean b) − (mean c − mean d), as a speed-up is made of rates and token counts."""
    a, b, c, d = map(mean_estimate, samples)
    theirs = stats.ttest_ind(*samples[:2], equal_var=False)
    parts = np.array([np.var(x, ddof=1) / len(x) for x in samples])
    degrees = parts.sum() ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, samples, strict=True))
    middle = a.value - b.value - c.value + d.value
    four = stats.t.interval(0.95, degrees, loc=middle, scale=math.sqrt(parts.sum()))
    for found, df, ends in (
        (difference(a, b), theirs.df, theirs.confidence_interval(0.95)),
        (difference(difference(a, b), difference(c, d)), degrees, four),
    ):
        assert found.degrees == pytest.approx(df, rel=1e-9)
        interval = t_interval(found)
        assert (interval.low, interval.high) == pytest.approx(tuple(ends), rel=1e-7, abs=1e-9)


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
        assert (t_interval(found).note, t_interval(found).low is None) == (note, note is not None)
