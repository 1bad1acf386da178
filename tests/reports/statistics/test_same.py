"""A/A comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ablate.reports.statistics.same import MOST_SPLITS, compare_with_itself
from ablate.run.outcome import Outcome


def runs(logs):
    return [Outcome(seed=i, end="hit", low=math.exp(v), high=math.exp(v)) for i, v in enumerate(logs)]


@pytest.mark.parametrize(("n", "splits"), [(6, 10), (7, 35), (8, 35), (10, 126), (30, MOST_SPLITS)])
def test_each_way_to_split_once(n, splits):
    found = compare_with_itself(runs(np.random.default_rng(n).normal(18, 0.03, n)))
    assert found.splits == splits


def test_noise_alone_cries_wolf_one_time_in_twenty():
    rng = np.random.default_rng(0)
    rates = [compare_with_itself(runs(rng.normal(18, 0.03, 10))).rate for _ in range(60)]
    assert np.mean(rates) == pytest.approx(0.05, abs=0.015)


def test_the_rate_and_the_largest_cost():
    logs = np.array([0, 0.001, 0.002, 0.1, 0.101, 0.102]) + 18
    found = compare_with_itself(runs(logs))
    assert found.positives == 1  # the one split that takes the clusters apart
    assert found.largest_cost == pytest.approx(math.expm1(0.1))
    assert found.rate == 0.1


def test_too_few_or_equal_runs_tell_nothing():
    assert compare_with_itself(runs([18.0, 18.1, 18.2, 18.3, 18.4])) is None
    assert compare_with_itself(runs([18.0] * 8)) is None
    censored = [Outcome(seed=i, end="censored", low=5.0) for i in range(8)]
    assert compare_with_itself(censored) is None
