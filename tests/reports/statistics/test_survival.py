"""Kaplan–Meier of tokens to target, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from synthetic_study import line

from ablate.reports.figures.reached import draw_reached
from ablate.reports.findings.analyse import analyse
from ablate.reports.statistics.survival import common_horizon, reached, restricted_mean
from ablate.results.frames import load_frames
from ablate.run.outcome import Outcome


def hit(time):
    return Outcome(seed=0, end="hit", low=time, high=time)


def censored(time):
    return Outcome(seed=0, end="censored", low=time)


DIVERGED = Outcome(seed=0, end="diverged", low=99.0)


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=2, max_size=15))
def test_it_is_scipys(times):
    if not any(was_hit for _, was_hit in times):
        return
    curve = reached([hit(float(t)) if was_hit else censored(float(t)) for t, was_hit in times])
    data = stats.CensoredData(
        uncensored=[t for t, was_hit in times if was_hit], right=[t for t, was_hit in times if not was_hit]
    )
    theirs = stats.ecdf(data)
    at = np.array(curve.tokens[1:])
    assert np.allclose(curve.share[1:], theirs.cdf.evaluate(at))
    band = theirs.cdf.confidence_interval(0.95, method="log-log")
    low, high = band.low.evaluate(at), band.high.evaluate(at)
    for i, (mine, other) in enumerate(zip(curve.low[1:], curve.high[1:], strict=True)):
        if mine is not None:
            assert (mine, other) == pytest.approx((low[i], high[i]))


def test_a_diverged_run_never_reaches_it():
    curve = reached([hit(10.0), hit(20.0), DIVERGED, DIVERGED])
    assert curve.tokens == (0.0, 10.0, 20.0)
    assert curve.share == (0.0, 0.25, 0.5)
    assert (curve.end, curve.n) == (20.0, 4)
    assert all(
        low < share < high
        for low, share, high in zip(curve.low[1:], curve.share[1:], curve.high[1:], strict=True)
    )


def test_all_diverged_or_no_result():
    assert reached([DIVERGED, DIVERGED]).share == (0.0,)
    assert reached([]) is None
    assert reached([Outcome(seed=0, end="missing")]) is None


def test_drawn_only_where_not_all_reached(make_study):
    whole = analyse(load_frames(make_study({"a": [line(3, 1)] * 3, "b": [line(3, 1.1)] * 3})))
    assert draw_reached(whole) is None
    cut = analyse(
        load_frames(make_study({"a": [line(3, 1)] * 3, "b": [line(3, 1.1), line(3, 2.9), line(3, 2.8)]}))
    )
    drawing = draw_reached(cut)
    assert drawing is not None
    assert "b 33" in drawing.alt
    assert ">b<" in drawing.svg.decode()


def test_restricted_mean_without_censoring_is_the_mean_of_cut_times():
    times = (10.0, 20.0, 40.0, 70.0)
    for horizon in (30.0, 50.0, 70.0, 80.0):
        found = restricted_mean([hit(time) for time in times], horizon)
        cut = np.minimum(times, horizon)
        assert found.estimate == pytest.approx(cut.mean())
        # Without censoring it is the t interval of a mean.
        half = stats.t.ppf(0.975, 3) * cut.std(ddof=1) / 2
        assert found.low == pytest.approx(cut.mean() - half)
        assert found.high == pytest.approx(min(cut.mean() + half, horizon))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_restricted_means_interval_holds_the_truth_as_often_as_it_says(n):
    rng, horizon = np.random.default_rng(n), 110.0
    truth = np.minimum(rng.normal(100, 10, 400_000), horizon).mean()
    held = 0
    for times in rng.normal(100, 10, (2000, n)):
        runs = [hit(t) if t < horizon else censored(horizon) for t in map(float, times)]
        found = restricted_mean(runs, horizon)
        held += found.low is not None and found.low <= truth <= (found.high or 0)
    assert 0.92 <= held / 2000 <= 0.97


def test_restricted_mean_counts_diverged_runs_to_the_horizon():
    assert restricted_mean([hit(10.0), DIVERGED], 50.0).estimate == pytest.approx(30.0)
    assert restricted_mean([DIVERGED, DIVERGED], 50.0).estimate == 50.0
    assert restricted_mean([DIVERGED, DIVERGED], 50.0).low is None


def test_a_censored_run_leaves_the_mean_where_it_was_last_seen():
    # By hand: S = 1 to 10, 2/3 to 30, where the run seen to 20 is gone: 2/3 × (1 − 1/1) = 0.
    found = restricted_mean([hit(10.0), censored(20.0), hit(30.0)], 30.0)
    assert found.estimate == pytest.approx(10 + 20 * 2 / 3)
    assert restricted_mean([hit(10.0), censored(20.0)], 30.0).estimate is None


def test_the_horizon_is_where_the_least_looked_at_arm_ends():
    late, early, missing = [hit(10.0), hit(90.0)], [hit(10.0), censored(40.0)], Outcome(seed=0, end="missing")
    assert common_horizon([late, early]) == 40.0
    assert common_horizon([late, [hit(5.0), DIVERGED]]) == 99.0
    assert common_horizon([late, [missing]]) == 90.0
    assert common_horizon([[missing]]) is None
