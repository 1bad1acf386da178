"""The model of Blackwell's NVFP4 product, against exact arithmetic on integers and fractions."""

import itertools
from fractions import Fraction

import pytest
import torch

from ablate.backends.emulated import add_toward_zero, summed
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection
from ablate.numerics import GemmPolicy, OperandPolicy, round_operand
from tests.numerics.strategies import normal

NVFP4 = OperandPolicy(format="nvfp4")
BLACKWELL = GemmPolicy(left=NVFP4, right=NVFP4, accumulate="blackwell")


def to_fp32(exact, rounded):
    """Round a fraction to 24 bits: by ``round``, to nearest even, or by ``int``, toward zero."""
    if exact == 0:
        return exact
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(exact)
    place = Fraction(2) ** (exponent - 23)
    return rounded(exact / place) * place


def by_the_book(a, b):
    """Return A Bᵀ: groups of 64 products rounded once to nearest, added in order toward zero."""
    result = []
    rows, columns = (
        [[Fraction(value) for value in row] for row in side.double().tolist()]
        for side in (a, b)
    )
    for row, column in itertools.product(rows, columns):
        total = Fraction(0)
        products = [x * y for x, y in zip(row, column, strict=True)]
        for start in range(0, len(row), 64):
            total = to_fp32(
                total + to_fp32(sum(products[start : start + 64]), round), int
            )
        result.append(float(total))
    return torch.tensor(result, dtype=torch.float64).view(len(a), len(b)).float()


@pytest.mark.parametrize("k", [16, 64, 240, 4096])  # so long that groups of 32 differ
def test_every_product_is_the_models_to_the_bit(k):
    x, w = (
        normal(n, k, seed=n) * 2.0 ** (normal(n, k, seed=n + 1) * 4) for n in (12, 9)
    )
    a, b = (round_operand(side, NVFP4, axis=1).values for side in (x, w))
    actual = summed(a, b)
    assert torch.equal(actual, by_the_book(a, b))
    if k == 4096:
        assert (actual != (a.double() @ b.double().t()).float()).float().mean() > 0.1


def test_sums_that_fp64_does_not_hold_are_truncated_all_the_same():
    largest = torch.full((2, 4096), 2688.0)  # a constant tensor: 2^36.8
    small = torch.full((1, 4096), 2.0**-10)
    a = torch.cat((largest, -largest))
    b = torch.cat((largest[:1], small))
    a[1, 64::128] = a[3, 64::128] = 2.0**-10
    assert torch.equal(summed(a.bfloat16(), b.bfloat16()), by_the_book(a, b))
    places = [
        0.0,
        1.0,
        1.5,
        1 - 2.0**-24,
        2.0**24 - 1,
        2.0**-20,
        3 * 2.0**-20,
        2.0**40,
        2.0**40 - 2.0**17,
    ]
    grid = torch.tensor(
        [sign * place for place in places for sign in (1, -1)], dtype=torch.float64
    )
    left, other = (side.flatten() for side in torch.meshgrid(grid, grid, indexing="ij"))
    for a, b, actual in zip(
        left.tolist(),
        other.tolist(),
        add_toward_zero(left, other).tolist(),
        strict=True,
    ):
        assert Fraction(actual) == to_fp32(Fraction(a) + Fraction(b), int), (a, b)


def test_a_value_that_is_no_number_is_seen():
    a = torch.ones(2, 128, dtype=torch.bfloat16)
    a[1, 70] = float("nan")
    assert summed(a, a).isnan().tolist() == [[False, True], [True, True]]
    assert summed(a[:, :0], a[:, :0]).tolist() == [[0, 0], [0, 0]]
    assert summed(a[:0], a).shape == (0, 2)


@pytest.mark.parametrize("name", ["auto", "emulated", "reference"])
def test_a_gemm_that_asks_for_it_has_it_and_the_tensors_factor_once(name):
    selection = Selection(name)
    sides = [normal(32, 128, seed=seed).bfloat16() for seed in (1, 2)]
    backend = selection.of(BLACKWELL, "cpu")
    assert backend is not selection.of(GemmPolicy(left=NVFP4, right=NVFP4), "cpu")
    product = backend.multiply(
        *(backend.quantize(x, Draw(policy=NVFP4), axis=1) for x in sides)
    )
    left, right = (round_operand(x, NVFP4, axis=1) for x in sides)
    factor = torch.tensor(left.descale) * torch.tensor(right.descale)
    assert torch.equal(
        product, (by_the_book(left.values, right.values) * factor).bfloat16()
    )
    assert "Blackwell" in backend.detail()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_device_adds_in_its_own_way(name):
    with pytest.raises(ValueError, match="that is emulated"):
        Selection(name).of(BLACKWELL, "cpu")


def test_it_is_of_nvfp4_codes():
    with pytest.raises(
        ValueError, match="accumulate 'blackwell' needs nvfp4 on both sides"
    ):
        GemmPolicy(left=NVFP4, accumulate="blackwell")
