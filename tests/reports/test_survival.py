"""Kaplan–Meier of tokens to target, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from synthetic_study import line

from ablate.reports.analyse import analyse
from ablate.reports.crossing import Outcome
from ablate.reports.figures.reached import draw_reached
from ablate.reports.load import load_frames
from ablate.reports.survival import reached


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
