from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ablate.results.contrasts import NO_PAIRS
from ablate.results.losses import (
    Curve,
    common_grid,
    difference_bands,
    final_differences,
    final_loss,
)


def curve(losses, *, seed=0, end="hit", tokens=None, arm="a"):
    at = np.arange(1, len(losses) + 1) * 100 if tokens is None else np.array(tokens)
    return Curve(run_id=f"{arm}{seed}", arm=arm, seed=seed, end=end, tokens=at, loss=np.array(losses, float))


def final_difference(arm, base, *, paired=False):
    return final_differences({"a": (arm, base)}, {"a": 0.05}, paired=paired, moderated=False)["a"]


def difference_band(arm, base, *, paired=False):
    return difference_bands({"a": (arm, base)}, {"a": 0.05}, paired=paired, moderated=False)["a"]


def test_the_grid_holds_the_evaluations_that_all_runs_have():
    grid = common_grid(
        [curve([4, 3, 2, 1]), curve([5, 4, 2], tokens=[100, 300, 400]), curve([9], end="missing")]
    )
    assert grid.tokens.tolist() == [100, 300, 400]
    assert grid.mean.tolist() == [4.5, 3.0, 1.5]


def test_the_mean_ends_where_a_run_diverges():
    grid = common_grid([curve([4, 3, 2, 1]), curve([4, 9], end="diverged")])
    assert grid.tokens.tolist() == [100, 200]


def test_final_loss_and_difference_at_equal_tokens():
    arm = [curve([3, 2, 1.5], seed=0), curve([3, 2, 1.7], seed=1), curve([3, 2.1, 1.6], seed=2)]
    base = [curve([3, 1.9, 1.2, 1.0], seed=0), curve([3, 1.8, 1.3, 1.1], seed=1)]
    assert final_loss(base).estimate == pytest.approx(1.05)
    difference = final_difference(arm, base)
    assert difference.tokens == 300
    expected = stats.ttest_ind([1.5, 1.7, 1.6], [1.2, 1.3], equal_var=False).confidence_interval()
    assert difference.estimate == pytest.approx(1.6 - 1.25)
    assert difference.low == pytest.approx(expected.low)
    assert difference.high == pytest.approx(expected.high)
    assert (difference.n, difference.n_baseline) == (3, 2)


def test_paired_seeds_are_compared_by_their_differences():
    arm = [curve([3, 1.7], seed=1), curve([3, 1.5], seed=0), curve([3, 1.6], seed=2)]
    base = [curve([3, 1.2], seed=0), curve([2.9, 1.3], seed=1), curve([2.8, 1.0], seed=7)]
    common = np.array([1.5 - 1.2, 1.7 - 1.3])  # of seeds 0 and 1
    expected = stats.ttest_1samp(common, 0).confidence_interval()
    paired = final_difference(arm, base, paired=True)
    assert paired.estimate == pytest.approx(0.35)
    assert (paired.low, paired.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    band = difference_band(arm, base, paired=True)
    assert (band.low[1], band.high[1]) == (pytest.approx(expected.low), pytest.approx(expected.high))
    strangers = [curve([3, 1.2], seed=8), curve([2.9, 1.3], seed=1)]
    unpaired = final_difference(arm, strangers, paired=True)
    assert unpaired == replace(final_difference(arm, strangers), note=NO_PAIRS)


def test_no_final_loss_over_the_survivors_of_a_divergence():
    arm = [curve([3, 2, 1.5]), curve([3, 9], seed=1, end="diverged")]
    assert final_loss(arm).estimate is None
    assert "1 of 2 runs diverged" in (final_loss(arm).note or "")
    assert final_difference(arm, [curve([3, 2, 1])]).estimate is None


def test_a_run_that_diverged_before_its_first_evaluation_counts():
    arm = [curve([3, 2]), curve([], seed=1, end="diverged")]
    assert final_loss(arm).estimate is None
    assert len(common_grid(arm).tokens) == 0


def test_nothing_in_common():
    arm, base = [curve([3, 2], tokens=[150, 250])], [curve([3, 2])]
    assert final_difference(arm, base).estimate is None
    assert len(difference_band(arm, base).tokens) == 0


def test_the_band_is_pointwise_welch_and_absent_with_one_run():
    arm = [curve([3, 2.0]), curve([3.2, 2.2], seed=1)]
    base = [curve([2.5, 1.5]), curve([2.7, 1.6], seed=1)]
    band = difference_band(arm, base)
    expected = stats.ttest_ind([2.0, 2.2], [1.5, 1.6], equal_var=False).confidence_interval()
    assert band.difference.tolist() == pytest.approx([0.5, 0.55])
    assert (band.low[1], band.high[1]) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert np.isnan(difference_band(arm[:1], base).low).all()
