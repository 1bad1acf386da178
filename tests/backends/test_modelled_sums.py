"""The models of Blackwell's NVFP4 and Hopper's FP8 products, against exact arithmetic on fractions."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch

from ablate.backends.modelled_sums import (
    add_toward_zero,
    summed,
    summed_by_hopper,
)
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection
from ablate.numerics import GemmPolicy, OperandPolicy, round_operand
from tests.numerics.strategies import normal

NVFP4 = OperandPolicy(format="nvfp4")
BLACKWELL = GemmPolicy(left=NVFP4, right=NVFP4, accumulate="blackwell")
E4M3, E5M2 = (OperandPolicy(format=f"fp8_{name}") for name in ("e4m3", "e5m2"))
HOPPER = GemmPolicy(left=E4M3, right=E5M2, accumulate="hopper")


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


def by_hoppers_book(a, b, smallest, promoted):
    """Return A Bᵀ as MMA-Sim's report (2511.10909) says it of wgmma, promoted to fp32 after so many products."""
    result = []
    rows, columns = (
        [[Fraction(value) for value in row] for row in side.double().tolist()]
        for side in (a, b)
    )
    for row, column in itertools.product(rows, columns):
        total = Fraction(0)
        for begin in range(0, len(row), promoted):
            accumulator = Fraction(0)
            for start in range(begin, min(begin + promoted, len(row)), 32):
                terms = [
                    (accumulator, exponent_of(accumulator) if accumulator else None)
                ]
                for x, y in zip(
                    row[start : start + 32], column[start : start + 32], strict=True
                ):
                    exponents = [
                        max(exponent_of(factor), least)
                        for factor, least in zip((x, y), smallest, strict=True)
                        if factor
                    ]
                    terms.append((x * y, sum(exponents) if x * y else None))
                place = Fraction(2) ** (
                    max((e for _, e in terms if e is not None), default=0) - 13
                )
                cut = sum(int(term / place) for term, _ in terms)
                accumulator = to_fp32(cut * place, int, bits=14)
            total = to_fp32(total + accumulator, round)
        result.append(float(total))
    return torch.tensor(result, dtype=torch.float64).view(len(a), len(b)).float()


@pytest.mark.parametrize("accumulate", ["hopper", "hopper_fast"])
@pytest.mark.parametrize("k", [16, 128, 416])
@pytest.mark.parametrize("wide", [0, 5])
def test_every_fp8_product_is_hoppers_to_the_bit(accumulate, k, wide):
    gemm = GemmPolicy(left=E4M3, right=E5M2, accumulate=accumulate)
    sides = []
    for n, policy in ((7, E4M3), (5, E5M2)):
        x = normal(n, k, seed=n) * 2.0 ** (normal(n, k, seed=n + 1) * wide)
        sides.append(round_operand(x, policy, axis=1).values)
    if wide:
        assert (sides[0].abs() < 2.0**-6).float().mean() > 0.05, "subnormal elements"
    promoted = 128 if accumulate == "hopper" else k
    expected = by_hoppers_book(*sides, (-6, -14), promoted)
    assert torch.equal(summed_by_hopper(*sides, gemm), expected)
    if k > 16:
        exact = sides[0].double() @ sides[1].double().t()
        error = (expected.double() - exact).abs() / (
            sides[0].double().abs() @ sides[1].double().abs().t()
        )
        assert 2.0**-17 < error.max() < 2.0**-10, "of 14 bits"


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
    assert summed_by_hopper(a, a, HOPPER).isnan().tolist() == [
        [False, True],
        [True, True],
    ]
    assert summed_by_hopper(a[:, :0], a[:, :0], HOPPER).tolist() == [[0, 0], [0, 0]]
    assert summed_by_hopper(a[:0], a, HOPPER).shape == (0, 2)


@pytest.mark.parametrize("gemm", [BLACKWELL, HOPPER], ids=["blackwell", "hopper"])
@pytest.mark.parametrize("name", ["auto", "emulated", "reference"])
def test_a_gemm_that_asks_for_it_has_it_and_the_tensors_factor_once(name, gemm):
    selection = Selection(name)
    policies = gemm.left, gemm.right
    sides = [normal(32, 160, seed=seed).bfloat16() for seed in (1, 2)]
    backend = selection.of(gemm, "cpu")
    assert backend is not selection.of(
        dataclasses.replace(gemm, accumulate="fp32"), "cpu"
    )
    product = backend.multiply(
        *(
            backend.quantize(x, Draw(policy=policy), axis=1)
            for x, policy in zip(sides, policies, strict=True)
        )
    )
    left, right = (
        round_operand(x, policy, axis=1)
        for x, policy in zip(sides, policies, strict=True)
    )
    factor = torch.tensor(left.descale) * torch.tensor(right.descale)
    if gemm is BLACKWELL:
        expected = by_the_book(left.values, right.values)
    else:
        expected = by_hoppers_book(left.values, right.values, (-6, -14), 128)
    assert torch.equal(product, (expected * factor).bfloat16())
    assert f"sums as {gemm.accumulate.capitalize()}'s model" in backend.detail()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_device_adds_in_its_own_way(name):
    with pytest.raises(ValueError, match="that is emulated"):
        Selection(name).of(BLACKWELL, "cpu")


def test_a_model_is_of_its_formats():
    with pytest.raises(ValueError, match="'blackwell' needs nvfp4 on both sides"):
        GemmPolicy(left=NVFP4, accumulate="blackwell")
    for policy in (NVFP4, OperandPolicy(format="fp8_e4m3", scale="1x128")):
        with pytest.raises(
            ValueError, match="'hopper' needs fp8_e4m3 or fp8_e5m2 on both"
        ):
            GemmPolicy(left=E4M3, right=policy, accumulate="hopper")
