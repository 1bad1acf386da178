"""Each difference of a quantiser from its definition gets the cause that was put in."""

from dataclasses import replace

import pytest
import torch

from ablate.backends.testing.inputs import policies_of
from ablate.check.differences import Differences, DrawComparison, defined
from ablate.numerics import OperandPolicy
from tests.numerics.strategies import KEY, MXFP4, normal

POLICIES = policies_of("mxfp4\nmxfp8\nnvfp4\nmxfp4 32x32\nfp8_e4m3\nfp8_e4m3 1x128")


def values(x, policy, key=KEY):
    return defined(x, policy, 1, key)


def compared(quantised, x, policy, *, random=False):
    comparison = DrawComparison(random=random)
    comparison.add(quantised, x, policy, 1, KEY, data="made up")
    return comparison.by_cause


def causes(quantised, x, policy, **options):
    found = compared(quantised, x, policy, **options)
    return {cause: differences.count for cause, differences in found.items()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_same_values_differ_nowhere_and_a_last_bit_is_one(policy):
    x = normal(128, 128).bfloat16()
    same = values(x, policy)
    assert causes(same, x, policy) == {}
    moved = same * (1 + 2.0**-9)
    assert causes(moved, x, policy) == {"last bit": int((same != 0).sum())}


def test_ties_that_go_away_from_zero_and_no_others():
    x = torch.tensor([6.0, 0.25, -0.75, -2.5]).repeat(32, 8).bfloat16()
    # but for -0.75, whose even neighbour it is
    away = values(x, replace(MXFP4, rounding="nearest_away"))
    (tie,) = compared(away, x, MXFP4).values()
    assert tie == Differences(
        cause="tie", count=2 * 8 * 32, data="made up", row=0, column=1, exact=0.25, expected=0.0, found=0.5
    )  # fmt: skip


def test_a_value_that_does_not_clip_nan_that_is_lost_and_the_sign_of_zero():
    x = normal(128, 128).bfloat16()
    x[0, 0] = 7.5
    x[3, 40] = torch.nan
    x[5, 7] = 0.0
    quantised = values(x, MXFP4)
    assert quantised[0, 0] == 6
    quantised[0, 0] = 7.5
    quantised[3, 32:64] = 0.0
    quantised[5, 7] = -0.0
    assert causes(quantised, x, MXFP4) == {"clip": 1, "special": 32, "sign of zero": 1}


def test_truncation_is_no_tie():
    x = torch.full((32, 32), 2.7, dtype=torch.bfloat16)  # of 2 and 3
    x[:, 0] = 6
    assert causes(torch.where(x == 6, 6.0, 2.0), x, MXFP4) == {"other": 31 * 32}


@pytest.mark.parametrize("prescale", [1.0, 0.75])
def test_of_stochastic_rounding_both_neighbours_are_right_and_nothing_else(prescale):
    policy = OperandPolicy(format="mxfp4", rounding="stochastic", prescale=prescale)
    x = normal(128, 128).bfloat16()
    other = values(x, policy, replace(KEY, step=7))
    assert bool((other != values(x, policy)).any())
    assert causes(other, x, policy, random=True) == {}
    other[2, 3] *= 4
    assert sum(causes(other, x, policy, random=True).values()) == 1
