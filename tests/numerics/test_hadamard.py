import pytest
import torch

from ablate.numerics.hadamard import hadamard_last, hadamard_matrix


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128, 256])
def test_butterfly_is_the_sylvester_matrix(group):
    x = torch.randn(5, 2 * group, generator=torch.Generator().manual_seed(0))
    signs = torch.where(torch.randn(group, generator=torch.Generator().manual_seed(1)) > 0, 1.0, -1.0)
    expected = ((x.double().view(-1, group) * signs) @ hadamard_matrix(group)).view(x.shape)
    assert torch.allclose(hadamard_last(x, group, signs).double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("group", [16, 32])
def test_rotation_is_its_own_inverse(group):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard_last(hadamard_last(x, group), group), x, atol=1e-6)
