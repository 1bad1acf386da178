"""The models of Blackwell's NVFP4 and Hopper's FP8 products, against exact arithmetic on fractions."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch

from ablate.backends.modelled_sums import SUMS, add_toward_zero
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection
from ablate.numerics import GemmPolicy, OperandPolicy, round_operand
from tests.numerics.strategies import normal

NVFP4 = OperandPolicy(format="nvfp4")
E4M3 = OperandPolicy(format="fp8_e4m3")
E5M2 = OperandPolicy(format="fp8_e5m2")
GEMMS = {
    "blackwell": GemmPolicy(left=NVFP4, right=NVFP4, accumulate="blackwell"),
    "hopper": GemmPolicy(left=E4M3, right=E5M2, accumulate="hopper"),
}


def summed(model, a, b):
    return SUMS[model](a, b, GEMMS[model])


def exponent_of(exact):
    """Return the e of 2^e ≤ |exact| < 2^(e + 1)."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    return exponent - (Fraction(2) ** exponent > abs(exact))


def to_fp32(exact, rounded, bits=24):
    """Round a fraction to 24 bits: by ``round``, to nearest even, or by ``int``, toward zero."""
    if exact == 0:
        return exact
    place = Fraction(2) ** (exponent_of(exact) - bits + 1)
    return rounded(exact / place) * place


def blackwells(row, column):
    """Groups of 64 products are rounded once to nearest, and added in order toward zero."""
    total = Fraction(0)
    products = [x * y for x, y in zip(row, column, strict=True)]
    for start in range(0, len(row), 64):
        group = to_fp32(sum(products[start : start + 64]), round)
        total = to_fp32(total + group, int)
    return total


def hoppers(row, column):
    """As MMA-Sim's report (2511.10909) says it of wgmma on E4M3 and E5M2; 128 products are added in fp32."""
    total = accumulator = Fraction(0)
    for start in range(0, len(row), 32):
        terms = []
        if accumulator:
            terms.append((accumulator, exponent_of(accumulator)))
        stop = start + 32
        for x, y in zip(row[start:stop], column[start:stop], strict=True):
            if x and y:
                exponent = max(exponent_of(x), -6) + max(exponent_of(y), -14)
                terms.append((x * y, exponent))
        place = Fraction(2) ** (max((e for _, e in terms), default=0) - 13)
        cut = sum(int(term / place) for term, _ in terms)
        accumulator = to_fp32(cut * place, int, bits=14)
        if stop % 128 == 0 or stop >= len(row):
            total = to_fp32(total + accumulator, round)
            accumulator = Fraction(0)
    return total


BOOKS = {"blackwell": blackwells, "hopper": hoppers}


def by_the_book(model, a, b):
    """Return A Bᵀ in fp32."""
    rows, columns = (
        [list(map(Fraction, row)) for row in side.double().tolist()] for side in (a, b)
    )
    sums = [[float(BOOKS[model](row, column)) for column in columns] for row in rows]
    return torch.tensor(sums, dtype=torch.float64).float()


@pytest.mark.parametrize("wide", [0, 5])
@pytest.mark.parametrize(
    ("model", "k"),
    [
        *itertools.product(SUMS, (16, 240, 416)),
        ("blackwell", 4096),  # so long that groups of 32 differ
    ],
)
def test_every_product_is_the_models_to_the_bit(model, k, wide):
    gemm = GEMMS[model]
    a, b = (
        round_operand(
            normal(n, k, seed=n) * 2.0 ** (normal(n, k, seed=n + 1) * wide),
            policy,
            axis=1,
        ).values
        for n, policy in ((7, gemm.left), (5, gemm.right))
    )
    if model == "hopper" and wide == 5:
        assert (a.abs() < 2.0**-6).float().mean() > 0.05, "subnormal elements"
    actual = summed(model, a, b)
    assert torch.equal(actual, by_the_book(model, a, b))
    exact = a.double() @ b.double().t()
    error = (actual.double() - exact).abs() / (a.double().abs() @ b.double().abs().t())
    if model == "hopper" and k > 16:
        assert 2.0**-17 < error.max() < 2.0**-10, "of 14 bits"
    if k == 4096 and wide:
        assert (actual != exact.float()).float().mean() > 0.1


def test_sums_that_fp64_does_not_hold_are_truncated_all_the_same():
    largest = torch.full((2, 4096), 2688.0)  # a constant tensor: 2^36.8
    small = torch.full((1, 4096), 2.0**-10)
    a = torch.cat((largest, -largest))
    b = torch.cat((largest[:1], small))
    a[1, 64::128] = a[3, 64::128] = 2.0**-10
    a, b = a.bfloat16(), b.bfloat16()
    assert torch.equal(summed("blackwell", a, b), by_the_book("blackwell", a, b))
    places = [0.0, 1.0, 1.5, 1 - 2.0**-24, 2.0**24 - 1, 2.0**-20, 3 * 2.0**-20, 2.0**40, 2.0**40 - 2.0**17]  # fmt: skip
    places += [-place for place in places]
    for left in places:
        sums = add_toward_zero(
            torch.tensor(left).double(), torch.tensor(places).double()
        )
        for right, actual in zip(places, sums.tolist(), strict=True):
            expected = to_fp32(Fraction(left) + Fraction(right), int)
            assert Fraction(actual) == expected, (left, right)


@pytest.mark.parametrize("model", SUMS)
def test_a_value_that_is_no_number_is_seen(model):
    a = torch.ones(2, 128, dtype=torch.bfloat16)
    a[1, 70] = float("nan")
    assert summed(model, a, a).isnan().tolist() == [[False, True], [True, True]]
    assert summed(model, a[:, :0], a[:, :0]).tolist() == [[0, 0], [0, 0]]
    assert summed(model, a[:0], a).shape == (0, 2)


@pytest.mark.parametrize("model", SUMS)
@pytest.mark.parametrize("name", ["auto", "emulated"])
def test_a_gemm_that_asks_for_it_has_it_and_the_tensors_factor_once(name, model):
    gemm = GEMMS[model]
    selection = Selection(name)
    backend = selection.of(gemm, "cpu")
    plain = dataclasses.replace(gemm, accumulate="fp32")
    assert backend is not selection.of(plain, "cpu")
    x = normal(32, 160).bfloat16()
    left, right = (
        backend.quantize(x, Draw(policy=policy), axis=1)
        for policy in (gemm.left, gemm.right)
    )
    factor = torch.tensor(left.descale) * torch.tensor(right.descale)
    expected = by_the_book(model, left.values, right.values) * factor
    assert torch.equal(backend.multiply(left, right), expected.bfloat16())
    assert f"sums as {model.capitalize()}'s model" in backend.detail()


@pytest.mark.parametrize("name", ["torch", "triton", "reference"])
def test_a_device_adds_in_its_own_way(name):
    with pytest.raises(ValueError, match="that is emulated"):
        Selection(name).of(GEMMS["blackwell"], "cpu")


def test_a_model_is_of_its_formats():
    with pytest.raises(ValueError, match="'blackwell' needs nvfp4 on both sides"):
        GemmPolicy(left=NVFP4, accumulate="blackwell")
    for policy in (NVFP4, OperandPolicy(format="fp8_e4m3", scale="1x128")):
        with pytest.raises(
            ValueError, match="'hopper' needs fp8_e4m3 or fp8_e5m2 on both"
        ):
            GemmPolicy(left=E4M3, right=policy, accumulate="hopper")
