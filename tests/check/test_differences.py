"""Each difference of a quantiser from its definition gets the cause that was put in."""

from dataclasses import replace

import pytest
import torch

from ablate.backends.testing.inputs import grid_of
from ablate.check.differences import Definition, compare
from ablate.numerics import Key, OperandPolicy, round_operand
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantiser import on_grid

KEY = Key(seed=0, layer="l", gemm="wgrad", operand="x", step=1)
POLICIES = [
    OperandPolicy(format="mxfp4"),
    OperandPolicy(format="mxfp8"),
    OperandPolicy(format="nvfp4"),
    OperandPolicy(format="mxfp4", block="32x32"),
    OperandPolicy(format="fp8_e4m3"),
    OperandPolicy(format="fp8_e4m3", scale="1x128"),
]


def normal(rows=128, columns=128, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def defined(x, policy, key=KEY):
    done = round_operand(x, policy, axis=1, key=key)
    return done.values.float() * done.descale


def definition(x, policy, *, random=False):
    return Definition(
        data="made up", policy=policy, values=defined(x, policy),
        grid=on_grid(x, policy, axis=1, key=KEY), random=random,
    )  # fmt: skip


def compared(found, x, policy, **options):
    counted = {}
    compare(found, definition(x, policy, **options), counted)
    return counted


def causes(found, x, policy, **options):
    return {cause: one.count for cause, one in compared(found, x, policy, **options).items()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_same_values_differ_nowhere_and_a_last_bit_is_one(policy):
    x = normal()
    same = defined(x, policy)
    assert causes(same, x, policy) == {}
    moved = same * (1 + 2.0**-9)
    assert causes(moved, x, policy) == {"last bit": int((same != 0).sum())}


def test_ties_that_go_away_from_zero_and_no_others():
    policy = OperandPolicy(format="mxfp4")
    x = torch.tensor([6.0, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0] * 4).repeat(32, 1).to(torch.bfloat16)
    found = defined(x, policy)
    assert found[0, :8].tolist() == [6, 0, -1, 1, 2, -2, 4, 4]
    found[:, 1::8], found[:, 3::8], found[:, 5::8], found[:, 7::8] = 0.5, 1.5, -3, 6
    (tie,) = compared(found, x, policy).values()
    assert (tie.cause, tie.count) == ("tie", 4 * 4 * 32)
    assert (tie.first.row, tie.first.column, tie.first.exact, tie.first.expected, tie.first.found) == (
        0, 1, 0.25, 0.0, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("policy", [OperandPolicy(format="mxfp4"), OperandPolicy(format="nvfp4")], ids=str)
def test_a_neighbouring_scale_explains_its_whole_block(policy):
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))  # fp32: no ties
    columns = 32 if policy.format == "mxfp4" else 16
    grid = on_grid(x, policy, axis=1, key=KEY)
    scale = grid.scales[0] * (2.0 if policy.format == "mxfp4" else 9 / 8)
    found = defined(x, policy)
    levels = grid_of(ELEMENTS["mxfp4"]) * scale
    exact = x[0, :columns].float()
    near = (exact.abs()[:, None] - levels).abs().argmin(1)
    found[0, :columns] = torch.copysign(levels[near], exact)
    counted = causes(found, x, policy)
    assert set(counted) <= {"scale", "last bit"}
    assert counted["scale"] > columns // 4


def test_a_value_that_does_not_clip_nan_that_is_lost_and_the_sign_of_zero():
    policy = OperandPolicy(format="mxfp4")
    x = normal()
    x[0, 0], x[3, 40], x[5, 7] = 7.5, torch.nan, 0.0
    found = defined(x, policy)
    assert found[0, 0] == 6
    found[0, 0] = 7.5
    found[3, 32:64] = 0.0
    found[5, 7] = -0.0
    assert causes(found, x, policy) == {"clip": 1, "special": 32, "sign of zero": 1}


def test_truncation_is_no_tie():
    policy = OperandPolicy(format="mxfp4")
    x = torch.full((32, 32), 2.7, dtype=torch.bfloat16)  # of 2 and 3
    x[:, 0] = 6
    assert causes(torch.where(x == 6, 6.0, 2.0), x, policy) == {"other": 31 * 32}


@pytest.mark.parametrize("prescale", [1.0, 0.75])
def test_of_stochastic_rounding_both_neighbours_are_right_and_nothing_else(prescale):
    policy = OperandPolicy(format="mxfp4", rounding="stochastic", prescale=prescale)
    x = normal()
    other = defined(x, policy, replace(KEY, step=7))
    assert bool((other != defined(x, policy)).any())
    assert causes(other, x, policy, random=True) == {}
    other[2, 3] *= 4
    assert sum(causes(other, x, policy, random=True).values()) == 1
