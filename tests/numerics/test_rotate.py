import dataclasses

import pytest
import torch

from ablate.numerics import Key, OperandPolicy, fake_quantize, round_operand
from ablate.numerics.rotate import (
    hadamard_last,
    hadamard_matrix,
    permutation_of,
    rotate,
    signs_of,
    unrotate,
)

KEY = Key(seed=0, layer="a", gemm="wgrad", operand="x", step=3, call=1)
NVIDIA = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
DHT = OperandPolicy(format="mxfp4", hadamard=16)
RHT = dataclasses.replace(DHT, signs="step")
ROTATIONS = [
    DHT,
    RHT,
    dataclasses.replace(DHT, hadamard=128, signs="call"),
    dataclasses.replace(DHT, signs="fixed"),
    dataclasses.replace(DHT, hadamard=32, signs="call", permute=True),
    dataclasses.replace(DHT, signs="layer"),
    dataclasses.replace(DHT, signs="backward"),
    dataclasses.replace(DHT, hadamard=32, permute=True),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_signs_stand_before_the_matrix():
    x = normal(64, 64)
    signs = signs_of(RHT, KEY).repeat(4)
    rotated = round_operand(x, RHT, axis=1, key=KEY).values
    assert torch.equal(round_operand(x * signs, DHT, axis=1).values, rotated)
    assert not torch.equal(round_operand(x, DHT, axis=1).values.abs(), rotated.abs())


@pytest.mark.parametrize("policy", ROTATIONS, ids=str)
def test_unrotate_is_the_inverse(policy):
    x = normal(8, 256)
    assert torch.allclose(unrotate(rotate(x, policy, KEY), policy, KEY), x, atol=2e-6)
    assert not torch.allclose(rotate(x, policy, KEY), x, atol=0.1)


@pytest.mark.parametrize("policy", ROTATIONS, ids=str)
def test_rotating_both_operands_cancels_in_the_product(policy):
    a, b = normal(8, 256), normal(8, 256, seed=1)
    other = dataclasses.replace(KEY, operand="dy")
    product = rotate(a, policy, KEY).double() @ rotate(b, policy, other).double().T
    assert torch.allclose(product, a.double() @ b.double().T, atol=1e-4)


@pytest.mark.parametrize(
    ("signs", "renewed_by"),
    [
        ("fixed", set()),
        ("layer", {"seed", "layer", "gemm"}),
        ("step", {"seed", "layer", "gemm", "step"}),
        ("call", {"seed", "layer", "gemm", "step", "call"}),
    ],
)
def test_signs_are_renewed_as_their_policy_says(signs, renewed_by):
    policy = dataclasses.replace(DHT, hadamard=64, signs=signs)
    other = {"seed": 9, "layer": "b", "gemm": "dgrad", "operand": "dy", "step": 4, "call": 2}
    same = signs_of(policy, KEY)
    assert set(same.tolist()) == {-1.0, 1.0}
    for name, value in other.items():
        changed = not torch.equal(signs_of(policy, dataclasses.replace(KEY, **{name: value})), same)
        assert changed == (name in renewed_by), name


def test_nvidias_fixed_signs():
    assert signs_of(dataclasses.replace(DHT, signs="fixed"), None).tolist() == NVIDIA


def test_a_permutation_moves_within_its_group_and_is_drawn_with_the_signs():
    policy = dataclasses.replace(DHT, hadamard=32, signs="call", permute=True)
    first = permutation_of(policy, KEY)
    assert sorted(first.tolist()) == list(range(32))
    assert not torch.equal(first, permutation_of(policy, dataclasses.replace(KEY, call=2)))
    x = torch.zeros(1, 64)
    x[0, 5] = 1.0
    assert rotate(x, policy, KEY)[0, 32:].abs().max() == 0


def test_rounding_the_rotated_values_to_bf16_is_seen():
    x = normal(64, 64)
    policy = dataclasses.replace(DHT, rotated_bf16=True)
    assert torch.equal(rotate(x, policy, None), rotate(x, DHT, None).to(torch.bfloat16).float())
    high = OperandPolicy(hadamard=16)  # a high-precision operand beside a rotated one
    values = round_operand(x, high, axis=1).values
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, rotate(x, DHT, None).to(torch.bfloat16))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("policy", ROTATIONS, ids=str)
def test_fake_quantize_rotates_back(policy, axis):
    x = normal(256, 256)
    y = fake_quantize(x, policy, axis=axis, key=KEY)
    assert 0.1 < (y - x).norm() / x.norm() < 0.14


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128, 256])
def test_butterfly_is_the_sylvester_matrix(group):
    x = torch.randn(5, 2 * group, generator=torch.Generator().manual_seed(0))
    signs = torch.where(torch.randn(group, generator=torch.Generator().manual_seed(1)) > 0, 1.0, -1.0)
    expected = ((x.double().view(-1, group) * signs) @ hadamard_matrix(group)).view(x.shape)
    assert torch.allclose(hadamard_last(x, group, signs).double(), expected, rtol=0, atol=4e-6)


def test_a_permutation_without_signs_is_drawn_each_call():
    policy = dataclasses.replace(DHT, hadamard=32, permute=True)
    assert signs_of(policy, KEY) is None
    drawn = [permutation_of(policy, dataclasses.replace(KEY, call=call)).tolist() for call in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == list(range(32))
    assert policy.draws_anew
    with pytest.raises(ValueError, match="a key is needed"):
        round_operand(normal(8, 32), policy, axis=1)
