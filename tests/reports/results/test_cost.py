from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ablate.results.cost import mean_tokens, token_cost
from ablate.results.intervals import Interval, difference, mean_estimate, t_interval
from ablate.run.outcome import Outcome


def hits(*tokens: float) -> list[Outcome]:
    return [Outcome(seed=i, end="hit", low=t, high=t) for i, t in enumerate(tokens)]


def never(end: str, budget: float, seed: int = 9) -> Outcome:
    return Outcome(seed=seed, end=end, low=budget)


ARM = (120.0, 131.0, 118.0, 126.0, 122.0)
BASE = (100.0, 104.0, 97.0)
samples = st.lists(st.floats(1e3, 1e9), min_size=2, max_size=12, unique=True)


def test_welch_interval_is_that_of_scipy():
    x, y = np.log(ARM), np.log(BASE)
    expected = stats.ttest_ind(x, y, equal_var=False).confidence_interval(0.95)
    cost = token_cost(hits(*ARM), hits(*BASE))
    assert cost.kind == "interval"
    assert cost.estimate == pytest.approx(stats.gmean(ARM) / stats.gmean(BASE) - 1)
    assert cost.low == pytest.approx(math.exp(expected.low) - 1)
    assert cost.high == pytest.approx(math.exp(expected.high) - 1)


@given(left=samples, right=samples)
def test_welch_agrees_with_scipy_everywhere(left, right):
    x, y = np.log(left), np.log(right)
    expected = stats.ttest_ind(x, y, equal_var=False).confidence_interval(0.95)
    interval = t_interval(difference(mean_estimate(x), mean_estimate(y)))
    assert interval.low == pytest.approx(expected.low, rel=1e-6, abs=1e-9)
    assert interval.high == pytest.approx(expected.high, rel=1e-6, abs=1e-9)


def test_paired_interval_is_that_of_scipy_and_says_what_pairing_gained():
    arm, base = (120.0, 131.0, 118.0, 140.0), (101.0, 108.0, 97.0, 117.0)
    expected = stats.ttest_rel(np.log(arm), np.log(base)).confidence_interval(0.95)
    cost = token_cost(hits(*arm), hits(*base), paired=True)
    assert cost.pairs == 4
    assert cost.low == pytest.approx(math.exp(expected.low) - 1)
    assert cost.high == pytest.approx(math.exp(expected.high) - 1)
    x, y = np.log(arm), np.log(base)
    ratio = (np.var(x, ddof=1) + np.var(y, ddof=1)) / np.var(x - y, ddof=1)
    assert cost.pairing_variance_ratio == pytest.approx(ratio)
    assert cost.pairing_variance_ratio > 1


def test_pairing_uses_the_seeds_in_common_only():
    cost = token_cost(hits(120, 131, 118, 500), hits(100, 104, 97), paired=True)
    assert cost.pairs == 3
    assert cost.estimate == pytest.approx(stats.gmean([1.20, 131 / 104, 118 / 97]) - 1)


def test_paired_without_common_seeds_is_compared_unpaired_and_says_so():
    base = [Outcome(seed=i + 10, end="hit", low=t, high=t) for i, t in enumerate(BASE)]
    cost = token_cost(hits(*ARM), base, paired=True)
    assert cost.kind == "interval"
    assert cost.pairs is None
    assert cost.reason is not None
    assert "unpaired" in cost.reason


def test_one_seed_gives_an_estimate_without_an_interval():
    cost = token_cost(hits(118), hits(100))
    assert (cost.kind, cost.low, cost.high) == ("point", None, None)
    assert cost.estimate == pytest.approx(0.18)
    assert "n = 1" in (cost.reason or "")


def test_no_spread_at_all_gives_no_interval():
    cost = token_cost(hits(118, 118), hits(100, 100))
    assert (cost.kind, cost.low, cost.high) == ("point", None, None)
    assert cost.estimate == pytest.approx(0.18)
    # One side with spread is enough for an interval.
    assert token_cost(hits(118, 118), hits(100, 101)).kind == "interval"


def test_a_censored_run_leaves_a_lower_bound_and_no_estimate():
    cost = token_cost([*hits(120, 130), never("censored", 200)], hits(100, 100, 101))
    assert (cost.kind, cost.estimate, cost.high) == ("bound", None, None)
    assert cost.low == pytest.approx(stats.gmean([120, 130, 200]) / stats.gmean([100, 100, 101]) - 1)
    assert cost.reason is not None
    assert "1 ended before the target" in cost.reason
    assert cost.restricted is not None
    assert cost.restricted.estimate == pytest.approx(cost.low)
    assert cost.restricted.low < cost.low < cost.restricted.high


def test_the_average_over_hits_alone_would_have_hidden_the_cost():
    # The naive figure says that this arm saves tokens.
    arm = [*hits(95, 96), never("censored", 300), never("diverged", 300)]
    assert stats.gmean([95, 96]) / 100 - 1 < 0
    cost = token_cost(arm, hits(100, 100.5, 99.5))
    assert cost.estimate is None
    assert cost.low is not None
    assert cost.low > 0.6


def test_diverged_runs_count_as_never_reaching():
    cost = token_cost([never("diverged", 200), never("diverged", 200)], hits(100, 101))
    assert (cost.kind, cost.estimate, cost.high) == ("bound", None, None)
    assert "2 diverged" in (cost.reason or "")


def test_a_baseline_that_misses_the_target_bounds_the_cost_from_above():
    cost = token_cost(hits(120, 130), [*hits(100), never("censored", 200)])
    assert (cost.kind, cost.estimate, cost.low) == ("bound", None, None)
    assert cost.high == pytest.approx(stats.gmean([120, 130]) / stats.gmean([100, 200]) - 1)
    assert cost.restricted is None


def test_nothing_is_bounded_where_both_sides_miss():
    cost = token_cost([never("censored", 200)], [never("censored", 200)])
    assert (cost.kind, cost.estimate, cost.low, cost.high) == ("none", None, None, None)


def test_a_crossing_before_the_first_evaluation_is_a_bound():
    early = [Outcome(seed=0, end="hit", low=0.0, high=50.0), *hits(60)]
    cost = token_cost(early, hits(100, 100))
    assert (cost.kind, cost.estimate, cost.low) == ("bound", None, None)
    assert cost.high == pytest.approx(stats.gmean([50, 60]) / 100 - 1)
    assert mean_tokens(early).estimate is None
    assert token_cost(early, early).kind == "none"


def test_a_run_that_starts_under_the_target_leaves_no_bound_from_below():
    started = Outcome(seed=0, end="hit", low=0.0, high=0.0)
    cost = token_cost([started, *hits(*ARM)], hits(*BASE))
    assert (cost.kind, cost.estimate) == ("none", None)
    assert cost.reason == "this arm: of 6 runs 1 was at the target by the first evaluation"


def test_missing_runs_are_no_results():
    assert token_cost([*hits(118), Outcome(seed=5, end="missing")], hits(100)).n == 1
    cost = token_cost([Outcome(seed=5, end="missing")], hits(100))
    assert (cost.kind, cost.n) == ("none", 0)


def test_tokens_to_target_of_an_arm():
    interval = mean_tokens(hits(*ARM))
    assert interval.estimate == pytest.approx(stats.gmean(ARM))
    low, high = stats.t.interval(0.95, 4, np.mean(np.log(ARM)), stats.sem(np.log(ARM)))
    assert (interval.low, interval.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    bound = mean_tokens([*hits(120), never("diverged", 200)])
    assert (bound.estimate, bound.high) == (None, None)
    assert bound.low == pytest.approx(stats.gmean([120, 200]))
    assert mean_tokens([]).estimate is None


@given(left=samples, right=samples, unit=st.sampled_from([1e-3, 3.0, 8192.0]))
def test_the_unit_of_tokens_cancels(left, right, unit):
    one = token_cost(hits(*left), hits(*right))
    other = token_cost(hits(*(t * unit for t in left)), hits(*(t * unit for t in right)))
    assert other.estimate == pytest.approx(one.estimate, rel=1e-6, abs=1e-9)


@given(left=samples, right=samples, seed=st.integers(0, 99))
def test_the_order_of_runs_does_not_matter(left, right, seed):
    shuffled = list(left)
    np.random.default_rng(seed).shuffle(shuffled)
    one, other = token_cost(hits(*left), hits(*right)), token_cost(hits(*shuffled), hits(*right))
    assert other.estimate == pytest.approx(one.estimate)
    assert other.low == pytest.approx(one.low)


def coverage(rng, *, repeats, draw, estimate):
    """Return the share of intervals that hold the truth."""
    held = 0
    for _ in range(repeats):
        interval, truth = estimate(draw(rng)), 0.10
        held += interval.low <= truth <= interval.high
    return held / repeats


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_covers_the_truth_as_often_as_it_says(seeds):
    def draw(rng):
        arm = 1e6 * 1.10 * np.exp(rng.normal(0, 0.04, seeds))
        base = 1e6 * np.exp(rng.normal(0, 0.025, seeds))
        return arm, base

    share = coverage(
        np.random.default_rng(20),
        repeats=800,
        draw=draw,
        estimate=lambda drawn: token_cost(hits(*drawn[0]), hits(*drawn[1])),
    )
    assert 0.92 <= share <= 0.98


def test_a_normal_interval_would_not_cover_with_three_seeds():
    """The contrast: 1.96 standard errors, as many plots show, hold the truth too rarely."""

    def naive(drawn):
        x, y = np.log(drawn[0]), np.log(drawn[1])
        half = 1.96 * math.sqrt(np.var(x, ddof=1) / len(x) + np.var(y, ddof=1) / len(y))
        middle = np.mean(x) - np.mean(y)
        return Interval(low=math.exp(middle - half) - 1, high=math.exp(middle + half) - 1)

    share = coverage(
        np.random.default_rng(20),
        repeats=800,
        draw=lambda rng: (1.10 * np.exp(rng.normal(0, 0.04, 3)), np.exp(rng.normal(0, 0.025, 3))),
        estimate=naive,
    )
    assert share < 0.91
