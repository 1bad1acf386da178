"""Token costs and margins, on plain outcomes; how often their intervals are right: ``test_coverage``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from runs_in_words import runs_of
from scipy import stats
from synthetic_study import hits, parts, token_cost

from ablate.results.cost import mean_tokens
from tests.golden import rows_of

ARM = (120.0, 131.0, 118.0, 126.0, 122.0)
BASE = (100.0, 104.0, 97.0)


def test_the_welch_interval_is_that_of_scipy():
    x, y = np.log(ARM), np.log(BASE)
    ends = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    cost = token_cost(hits(*ARM), hits(*BASE))
    assert cost.kind == "interval"
    assert parts(cost) == pytest.approx(tuple(np.expm1([x.mean() - y.mean(), *ends])))
    ends = stats.t.interval(0.95, 4, x.mean(), stats.sem(x))
    mean = mean_tokens(hits(*ARM))
    assert parts(mean) == pytest.approx(tuple(np.exp([x.mean(), *ends])))


def test_the_paired_interval_is_that_of_scipy_over_the_seeds_in_common():
    arm, base = (120.0, 131.0, 118.0, 140.0), (101.0, 108.0, 97.0, 117.0)
    x, y = np.log(arm), np.log(base)
    cost = token_cost(hits(*arm, 500), hits(*base), paired=True)
    assert cost.pairs == 4
    ends = stats.ttest_rel(x, y).confidence_interval()
    assert (cost.low, cost.high) == pytest.approx(tuple(np.expm1(ends)))
    ratio = (np.var(x, ddof=1) + np.var(y, ddof=1)) / np.var(x - y, ddof=1)
    assert cost.pairing_variance_ratio == pytest.approx(ratio)
    strangers = [replace(run, seed=run.seed + 10) for run in hits(*BASE)]
    apart = token_cost(hits(*ARM), strangers, paired=True)
    assert (apart.kind, apart.pairs) == ("interval", None)
    assert "unpaired" in apart.note


PAIRS = """
# One seed against three: the pair of that seed, not the mean of all.
100           | 101 120 130   | -0.0099 |     | 1 | 2
100 110       | 101 120 130   | -0.0473 | yes     | 2 | 1
- 110 -       | 101 120 130   | -0.0833 |     | 1 | 2
# A baseline that missed in a run without a partner tells nothing of the pairs.
100 110       | 101 120 c900  | -0.0473 | yes     | 2 | 1
# A run of the arm that missed is never left out, with a partner or without.
100 110 c900  | 101 120       |         |         | 3 | 0
100 110 c900  | 101 120 130   |         |         | 3 | 0
"""


@pytest.mark.parametrize(
    ("arm", "base", "estimate", "has_interval", "n", "left_out"), rows_of(PAIRS)
)
def test_pairs_are_the_seeds_in_common_and_the_others_are_counted(
    arm, base, estimate, has_interval, n, left_out
):
    cost = token_cost(runs_of(arm), runs_of(base), paired=True)
    assert (cost.n, cost.left_out) == (int(n), int(left_out))
    if estimate:
        assert (cost.low is not None) == (has_interval == "yes")
        assert cost.estimate == pytest.approx(float(estimate), abs=1e-4)
        assert cost.pairs == cost.n == cost.n_baseline
    else:
        assert cost.kind == "bound"


WITHOUT = """
118           | 100       | point | 118 / 100 | | | n = 1
118 118       | 100 100   | point | 118 / 100 | | | same figure
# The mean over the hits alone would say that this arm saves tokens.
95 96 c200 x300 | 100 101 | bound | | 95 96 200 300 / 100 101 | | 1 ended before the target and 1 diverged
120 130       | 100 c200  | bound | | | 120 130 / 100 200 | the baseline: of 2 runs
c200          | c200      | none  | | | | this arm: of 1 runs
<50 60        | 100 100   | bound | | | 50 60 / 100 | of 2 runs 1 reached the target by the first
<50 60        | <50 60    | none  | | | | ; the baseline: of 2 runs
<0 120 131    | 100 104   | none  | | | | of 3 runs 1 reached
118 -         | 100       | point | 118 / 100 | | | n = 1
-             | 100       | none  | | | | no result of this arm yet
"""


def cost_of(text):
    """Read a cost: ``95 96 / 100`` is the geometric mean over another one, minus one."""
    if not text:
        return None
    arm, base = (np.log(np.array(side.split(), float)) for side in text.split("/"))
    return np.expm1(arm.mean() - base.mean())


@pytest.mark.parametrize(
    ("arm", "base", "kind", "estimate", "low", "high", "reason"), rows_of(WITHOUT)
)
def test_without_an_interval_there_is_what_is_known_and_the_reason(
    arm, base, kind, estimate, low, high, reason
):
    cost = token_cost(runs_of(arm), runs_of(base))
    assert (cost.kind, cost.n) == (kind, len(arm.replace("-", "").split()))
    assert parts(cost) == pytest.approx(tuple(map(cost_of, (estimate, low, high))))
    assert reason in cost.note


def test_a_bound_has_the_interval_of_runs_cut_at_the_budget_and_a_mean_its_least():
    arm = runs_of("120 130 c200")
    cost = token_cost(arm, hits(100, 100, 101))
    estimate, low, high = parts(cost.restricted)
    assert low < estimate < high
    assert estimate == pytest.approx(cost.low)
    assert token_cost(hits(120, 130), arm).restricted is None
    least = stats.gmean([120, 130, 200])
    assert parts(mean_tokens(arm)) == (None, pytest.approx(least), None)
    assert mean_tokens([]).estimate is mean_tokens(runs_of("<50")).estimate is None
