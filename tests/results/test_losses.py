from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import parts

from ablate.results.intervals import NO_PAIRS, Method
from ablate.results.losses import (
    Curve,
    common_grids,
    difference_bands,
    final_differences,
    final_loss,
)


def curve(losses, *, seed=0, end="hit"):
    """Read a curve, as in ``5 4 @300 2``: losses after 100, 200 and 300 tokens; @ says where others are."""
    at, pairs = 0, []
    for word in losses.split():
        if word[0] == "@":
            at = int(word[1:]) - 100
        else:
            at += 100
            pairs.append((at, float(word)))
    tokens, loss = np.array(pairs).reshape(-1, 2).T
    return Curve(
        run_id="", arm="a", seed=seed, end=end, tokens=tokens.astype(int), loss=loss
    )


def curves(*losses):
    """Curves of the seeds 0, 1, …"""
    return [curve(one, seed=seed) for seed, one in enumerate(losses)]


def differences(arm, base, **more):
    """Return the final difference, and the band."""
    sides = {"a": (arm, base)}
    method = Method(moderated=False, **more)
    return final_differences(sides, method)["a"], difference_bands(sides, method)["a"]


@pytest.mark.parametrize(
    ("own", "tokens", "mean"),
    [
        (
            [curve("4 3 2 1"), curve("5 @300 4 2"), curve("9", end="missing")],
            [100, 300, 400],
            [4.5, 3.0, 1.5],
        ),
        ([curve("4 3 2 1"), curve("4 9", end="diverged")], [100, 200], [4, 6]),
        ([curve("4 3"), curve("", end="diverged")], [], []),
    ],
)
def test_the_mean_goes_over_evaluations_that_all_runs_have_and_ends_where_one_diverges(
    own, tokens, mean
):
    (grid,) = common_grids(own)
    assert (grid.tokens.tolist(), grid.mean.tolist()) == (tokens, mean)


def test_final_loss_and_difference_at_equal_tokens_by_welch():
    arm = curves("3 2 1.5", "3 2 1.7", "3 2.1 1.6")
    base = curves("3 1.9 1.2 1.0", "3 1.8 1.3 1.1")
    assert final_loss(base).estimate == pytest.approx(1.05)
    found, band = differences(arm, base)
    test = stats.ttest_ind([1.5, 1.7, 1.6], [1.2, 1.3], equal_var=False)
    expected = pytest.approx((1.6 - 1.25, *test.confidence_interval()))
    assert (found.tokens, found.n, found.n_baseline) == (300, 3, 2)
    assert parts(found) == expected
    assert (band.difference[2], band.low[2], band.high[2]) == expected
    assert np.isnan(differences(arm[:1], base)[1].low).all()


def test_paired_seeds_are_compared_by_their_differences():
    first, *arm = curves("3 1.5", "3 1.7", "3 1.6")
    arm.append(first)  # in any order
    base = [*curves("3 1.2", "2.9 1.3"), curve("2.8 1.0", seed=7)]
    # of seeds 0 and 1
    ends = stats.ttest_rel([1.5, 1.7], [1.2, 1.3]).confidence_interval()
    found, band = differences(arm, base, paired=True)
    assert parts(found) == pytest.approx((0.35, *ends))
    assert (band.low[1], band.high[1]) == pytest.approx(tuple(ends))
    assert (found.n, found.n_baseline, found.left_out) == (2, 2, 2)
    strangers = [curve("3 1.2", seed=8), curve("2.9 1.3", seed=9)]
    unpaired, _ = differences(arm, strangers)
    found, _ = differences(arm, strangers, paired=True)
    assert found == replace(unpaired, note=NO_PAIRS)


@pytest.mark.parametrize("last", ["3 9", ""])
def test_no_final_loss_over_the_survivors_of_a_divergence(last):
    arm = [curve("3 2 1.5"), curve(last, seed=1, end="diverged")]
    assert final_loss(arm).estimate is None
    assert "1 of 2 runs of this arm diverged" in final_loss(arm).note
    assert differences(arm, [curve("3 2 1")])[0].estimate is None


def test_nothing_in_common():
    found, band = differences([curve("@150 3 2")], [curve("3 2")])
    assert (found.estimate, len(band.tokens)) == (None, 0)
