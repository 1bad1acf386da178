"""Emulated GEMMs on CPUs with products in bf16 and on those without."""

import pytest
import torch

from ablate.backends import emulated
from ablate.numerics.quantiser import Quantized
from tests.numerics.strategies import whole


def operand(values, descale=1.0):
    return Quantized(values=values.to(torch.bfloat16), descale=descale, axis=1)


@pytest.mark.parametrize("descale", [1.0, 0.25])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_product_is_summed_in_fp32_and_rounded_once(monkeypatch, has_bf16, descale):
    monkeypatch.setattr(emulated, "multiplies_bf16", lambda: has_bf16)
    # Whole numbers whose sums fp32 holds exactly, whatever the order, and bf16 does not.
    a, b = (whole(90, 33, 127, seed=seed) for seed in (0, 1))
    exact = (a.double() @ b.double().t() * descale).to(torch.bfloat16)
    product = emulated.EmulatedBackend().multiply(operand(a, descale), operand(b))
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, exact)
