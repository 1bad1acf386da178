import dataclasses

import pytest
import torch

from ablate.backends.testing.inputs import label, policies_of
from ablate.numerics import OperandPolicy, fake_quantize, round_operand
from ablate.numerics.rotate import (
    hadamard_last,
    hadamard_matrix,
    permutation_of,
    rotate,
    signs_of,
    unrotate,
)
from tests.numerics.strategies import KEY, normal
from tests.tensors import assert_same

NVIDIA = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
DHT = OperandPolicy(format="mxfp4", hadamard=16)
RHT = dataclasses.replace(DHT, signs="step")
ROTATIONS = policies_of("""
mxfp4 H16
mxfp4 H16 step
mxfp4 H128 call
mxfp4 H16 fixed
mxfp4 H32 call permute
mxfp4 H16 layer
mxfp4 H16 backward
mxfp4 H32 permute
""")


def test_signs_stand_before_the_matrix():
    x = normal(64, 64)
    signs = signs_of(RHT, KEY).repeat(4)
    rotated = round_operand(x, RHT, axis=1, key=KEY).values
    assert torch.equal(round_operand(x * signs, DHT, axis=1).values, rotated)
    assert not torch.equal(round_operand(x, DHT, axis=1).values.abs(), rotated.abs())


@pytest.mark.parametrize("policy", ROTATIONS, ids=label)
def test_rotating_cancels_in_the_product_and_is_undone_with_and_without_quantising(
    policy,
):
    a = normal(256, 256)
    b = normal(8, 256, seed=1)
    rotated = rotate(a, policy, KEY)
    assert not torch.allclose(rotated, a, atol=0.1)
    assert torch.allclose(unrotate(rotated, policy, KEY), a, atol=4e-6)
    other = rotate(b, policy, dataclasses.replace(KEY, operand="dy"))
    product = rotated.double() @ other.double().T
    assert torch.allclose(product, a.double() @ b.double().T, atol=1e-4)
    for axis in (0, 1):
        error = fake_quantize(a, policy, axis=axis, key=KEY) - a
        assert 0.1 < error.norm() / a.norm() < 0.14


@pytest.mark.parametrize(
    ("signs", "renewed_by"),
    [
        ("fixed", set()),
        ("layer", {"seed", "layer", "gemm"}),
        ("step", {"seed", "layer", "gemm", "step"}),
        ("call", {"seed", "layer", "gemm", "step", "call"}),
        ("backward", {"seed", "layer", "step", "call"}),
    ],
)
def test_signs_are_renewed_as_their_policy_says(signs, renewed_by):
    policy = dataclasses.replace(DHT, hadamard=64, signs=signs)
    same = signs_of(policy, KEY)
    assert set(same.tolist()) == {-1.0, 1.0}
    for name in ("seed", "layer", "gemm", "operand", "step", "call"):
        other = signs_of(policy, dataclasses.replace(KEY, **{name: 7}))
        assert torch.equal(other, same) == (name not in renewed_by), name


def test_nvidias_fixed_signs():
    assert signs_of(dataclasses.replace(DHT, signs="fixed"), None).tolist() == NVIDIA


@pytest.mark.parametrize("signs", ["call", "none"])
def test_a_permutation_moves_within_its_group_and_is_drawn_each_call(signs):
    policy = dataclasses.replace(DHT, hadamard=32, signs=signs, permute=True)
    drawn = [
        permutation_of(policy, dataclasses.replace(KEY, call=call)).tolist()
        for call in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == list(range(32))
    x = torch.zeros(1, 64)
    x[0, 5] = 1.0
    assert rotate(x, policy, KEY)[0, 32:].abs().max() == 0


def test_rounding_the_rotated_values_to_bf16_is_seen():
    x = normal(64, 64)
    policy = dataclasses.replace(DHT, rotated_bf16=True)
    expected = rotate(x, DHT, None).to(torch.bfloat16)
    assert torch.equal(rotate(x, policy, None), expected.float())
    high = OperandPolicy(hadamard=16)  # a high-precision operand beside a rotated one
    assert_same(round_operand(x, high, axis=1).values, expected)


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128, 256])
def test_butterfly_is_the_sylvester_matrix(group):
    x = normal(5, 2 * group)
    signs = normal(group, seed=1).sign()
    groups = x.double().view(-1, group) * signs
    expected = (groups @ hadamard_matrix(group)).view(x.shape)
    actual = hadamard_last(x, group, signs).double()
    assert torch.allclose(actual, expected, rtol=0, atol=4e-6)
