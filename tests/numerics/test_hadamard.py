import pytest
import torch

from ablate.numerics import Key, OperandPolicy, fake_quantize
from ablate.numerics.hadamard import hadamard_last, hadamard_matrix
from ablate.numerics.philox import random_signs

KEY = Key(seed=0, layer="a", gemm="wgrad", operand="x", step=3)


@pytest.mark.parametrize("group", [2, 16, 32, 64])
def test_butterfly_is_the_sylvester_matrix(group):
    x = torch.randn(5, 2 * group, generator=torch.Generator().manual_seed(0))
    signs = torch.where(torch.randn(group, generator=torch.Generator().manual_seed(1)) > 0, 1.0, -1.0)
    expected = ((x.double().view(-1, group) * signs) @ hadamard_matrix(group)).view(x.shape)
    assert torch.allclose(hadamard_last(x, group, signs).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("group", [16, 32])
def test_rotation_is_its_own_inverse(group):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard_last(hadamard_last(x, group), group), x, atol=1e-6)


def test_random_rotation_puts_the_signs_before_the_matrix():
    # Signs after the matrix would be a no-op for the quantiser: |q(xHD)| = |q(xH)|.
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    dht = OperandPolicy(format="mxfp4", scale="floor", hadamard=16)
    rht = OperandPolicy(format="mxfp4", scale="floor", hadamard=16, signs="step")
    q_dht, q_rht = fake_quantize(x, dht).values, fake_quantize(x, rht, key=KEY).values
    assert not torch.equal(q_dht.abs(), q_rht.abs())
    signs = random_signs(16, KEY).repeat(4)
    assert torch.equal(fake_quantize(x * signs, dht).values, q_rht)


def test_rotating_both_operands_cancels_in_the_product():
    a = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).double()
    b = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).double()
    signs = random_signs(16, KEY)
    product = hadamard_last(a.float(), 16, signs).double() @ hadamard_last(b.float(), 16, signs).double().T
    assert torch.allclose(product, a @ b.T, atol=1e-5)
