"""Quantiles of Student's t without scipy, beside scipy's."""

from __future__ import annotations

import pytest
from scipy import stats

from ablate.base.t_quantile import student


@pytest.mark.parametrize("degrees", [2, 3, 6, 12.5, 1000])
@pytest.mark.parametrize("share", [0.8, 0.975, 0.025])
def test_as_scipy_has_it(share, degrees):
    assert student(share, degrees) == pytest.approx(stats.t.ppf(share, degrees), rel=0.01)
