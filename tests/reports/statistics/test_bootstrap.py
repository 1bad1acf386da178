"""The bootstrap beside Student's interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ablate.reports.statistics.bootstrap import bootstrap_cost
from ablate.reports.statistics.cost import token_cost
from ablate.run.outcome import Outcome


def hits(logs):
    return [Outcome(seed=i, end="hit", low=float(t), high=float(t)) for i, t in enumerate(np.exp(logs))]


def test_it_is_scipys_percentile_bootstrap():
    rng = np.random.default_rng(1)
    x, y = rng.normal(10.1, 0.03, 12), rng.normal(10, 0.03, 9)
    found = bootstrap_cost(hits(x), hits(y))
    theirs = stats.bootstrap(
        (x, y), lambda a, b, axis: a.mean(axis) - b.mean(axis), method="percentile", n_resamples=20_000,
        random_state=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert found.estimate == pytest.approx(np.expm1(x.mean() - y.mean()))
    assert (found.low, found.high) == pytest.approx((np.expm1(theirs.low), np.expm1(theirs.high)), abs=1.5e-3)


def test_it_agrees_with_students_interval_where_runs_are_many():
    rng = np.random.default_rng(2)
    arm, base = hits(rng.normal(10.08, 0.03, 40)), hits(rng.normal(10, 0.03, 40))
    cost, found = token_cost(arm, base), bootstrap_cost(arm, base)
    assert (found.low, found.high) == pytest.approx((cost.low, cost.high), abs=0.002)


def test_pairs_are_drawn_as_pairs():
    rng = np.random.default_rng(3)
    seeds = rng.normal(10, 0.2, 8)
    arm, base = hits(seeds + 0.05 + rng.normal(0, 0.005, 8)), hits(seeds)
    paired, apart = bootstrap_cost(arm, base, paired=True), bootstrap_cost(arm, base)
    assert paired.high - paired.low < (apart.high - apart.low) / 5


def test_none_where_there_is_too_little_or_a_run_has_no_figure():
    many = hits(np.linspace(10, 10.1, 6))
    assert bootstrap_cost(many[:4], many) is None
    assert bootstrap_cost([*many, Outcome(seed=9, end="censored", low=5.0)], many) is None
    assert bootstrap_cost([*many, Outcome(seed=9, end="missing")], many) is not None
    assert bootstrap_cost(many, many) == bootstrap_cost(many, many)  # the draws are fixed
