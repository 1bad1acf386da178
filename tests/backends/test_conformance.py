"""The conformance suite over the back ends that run on a CPU, and what only they owe."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from ablate.backends.emulated import EmulatedBackend
from ablate.backends.modelled_sums import add_toward_zero
from ablate.backends.protocol import Draw
from ablate.backends.scaled import TorchBackend
from ablate.backends.select import load_backend
from ablate.backends.testing.inputs import POLICIES, label, policies_of
from ablate.backends.testing.suite import checks, sum_rounding
from ablate.numerics import OperandPolicy
from ablate.run import BUILT_IN

MXFP4 = OperandPolicy(format="mxfp4")
BACKENDS = ["reference", "emulated", "torch"]
USUAL = "emulated"
"""The back end of studies without a GPU; the others are held to the same by CI."""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=f"{name}: {check.name}",
            marks=[] if name == USUAL else pytest.mark.exhaustive,
        )
        for name in BACKENDS
        for check in checks(load_backend(name), "cpu")
    ],
)
def test_conformance(check):
    assert check.run()


def test_a_label_says_all_of_a_policy():
    assert policies_of("\n".join(map(label, POLICIES))) == POLICIES
    assert len(set(map(label, POLICIES))) == len(POLICIES) == 70


class Shifted(EmulatedBackend):
    """Wrong in one way at a time."""

    fault = ""

    def quantize(self, x, draw, *, axis):
        if self.fault == "step":
            draw = dataclasses.replace(draw, key=dataclasses.replace(draw.key, step=1))
        quantized = super().quantize(x, draw, axis=axis)
        if self.fault == "descale":
            return dataclasses.replace(quantized, descale=quantized.descale * 1.0000001)
        if self.fault == "sign of zero":
            return dataclasses.replace(quantized, values=quantized.values + 0.0)
        if self.fault == "mask":
            return dataclasses.replace(quantized, mask=None)
        return quantized

    def multiply(self, a, b):
        if self.fault != "narrow":
            product = super().multiply(a, b)
            return product * 1.004 if self.fault == "output" else product
        left = a.values.float()
        right = b.values.float()
        total = torch.zeros(left.shape[0], right.shape[0])
        for k in range(left.shape[1]):  # an accumulator of 16 bits
            total = total + left[:, k : k + 1] * right[:, k]
            total = ((total.view(torch.int32) + 128) & ~0xFF).view(torch.float32)
        return (total * a.descale * b.descale).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("step", "quantised bits: mxfp4 stochastic"),
        ("step", "quantised bits: mxfp4 H16 step"),
        ("descale", "quantised bits: mxfp4"),
        ("sign of zero", "quantised bits: mxfp4"),
        ("mask", "quantised bits: mxfp4 mask"),
        ("output", "product: mxfp4"),
        ("narrow", "exact probe: mxfp4"),
    ],
)
def test_a_wrong_back_end_fails(fault, caught_by):
    wrong = Shifted()
    wrong.fault = fault
    chosen = policies_of("mxfp4\nmxfp4 stochastic\nmxfp4 H16 step\nmxfp4 mask")
    by_name = {check.name: check for check in checks(wrong, "cpu", chosen)}
    with pytest.raises(AssertionError):
        by_name[caught_by].run()
    if fault == "narrow":
        told = by_name["accumulator: mxfp4"].run().detail
        assert told == "sums keep 16 bits, of fp32's 24"


class Hopper(TorchBackend):
    """FP8 as H100 and H200 add it: products are cut to 14 bits below the largest of 128, groups in fp32."""

    def __init__(self, *, bits=14, factor=1.0):
        self.bits = bits
        self.factor = factor

    def multiply(self, a, b):
        total = torch.zeros(a.shape[0], b.shape[0])
        pairs = zip(
            a.values.double().split(128, 1),
            b.values.double().split(128, 1),
            strict=True,
        )
        for left, right in pairs:
            products = left[:, None] * right
            exponent = torch.frexp(products.abs().amax(-1, keepdim=True)).exponent
            place = 2.0 ** (exponent - self.bits).double()
            total += ((products / place).trunc() * place).sum(-1).float()
        factors = a.descale_on_device[:, None] * b.descale_on_device
        return (total * factors * self.factor).to(torch.bfloat16)


@pytest.mark.parametrize("policy", ["fp8_e4m3", "fp8_e4m3 row"])
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (Hopper(), None),
        (Hopper(bits=24), None),
        (Hopper(factor=1.01), r"off by up to \(1 \+ [\d.]+\) × the bound"),
        (Hopper(factor=0.99), r"off by up to \(1 \+ [\d.]+\) × the bound"),
        (Hopper(bits=13), "13 bits within 128 products, .* none known under 14"),
        (Hopper(bits=10), "10 bits within 128 products, .* none known under 14"),
    ],
    ids=["14 bits", "24 bits", "1 % more", "1 % less", "13 bits", "10 bits"],
)
def test_the_bound_of_a_product_is_that_of_the_accumulator(policy, backend, fault):
    made = checks(backend, "cpu", policies_of(policy))
    by_name = {check.name: check for check in made}
    product = by_name[f"product: {policy}"]
    with pytest.raises(AssertionError, match=fault) if fault else nullcontext():
        product.run()
    outcome = by_name[f"accumulator: {policy}"].run()
    kept = "24 bits"
    if backend.bits < 24:
        kept = f"{backend.bits} bits within 128 products, 24 across"
    assert outcome.detail == f"sums keep {kept}, of fp32's 24"
    assert list(outcome.figures.values()) == [backend.bits, 24, 24]


def nearest(total, group):
    return (total + group).float().double()


def down(total, group):
    exact = total + group
    rounded = exact.float()
    lower = torch.nextafter(rounded, torch.tensor(-torch.inf))
    return torch.where(rounded.double() > exact, lower, rounded).double()


class Rounding(EmulatedBackend):
    """Adds groups of 64 products in their order, rounding in one way."""

    def __init__(self, add):
        self.add = add

    def multiply(self, a, b):
        total = torch.zeros((), dtype=torch.float64)
        pairs = zip(a.values.split(64, 1), b.values.split(64, 1), strict=True)
        for left, right in pairs:
            total = self.add(
                total, (left.double() @ right.double().t()).float().double()
            )
        return (total * a.descale * b.descale).to(torch.bfloat16)


class Late(EmulatedBackend):
    """Rounds to nearest within 512 elements, toward zero beyond."""

    def multiply(self, a, b):
        add = nearest if a.values.shape[1] < 512 else add_toward_zero
        return Rounding(add).multiply(a, b)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("backend", "found"),
    [
        (Rounding(nearest), ["to nearest"] * 3),
        (Rounding(add_toward_zero), ["toward zero"] * 3),
        (Rounding(down), ["down"] * 3),
        (Rounding(lambda total, group: -down(-total, -group)), ["up"] * 3),
        (Rounding(torch.add), ["not at all (more than 24 bits, or another order)"] * 3),
        (
            Rounding(lambda total, group: total + group * (group.abs() > 1)),
            ["small terms cut off"] * 3,
        ),
        (Late(), ["to nearest", "toward zero", "toward zero"]),
    ],
    ids=["nearest", "toward zero", "down", "up", "wide", "cut off", "late"],
)
def test_the_probe_tells_which_way_sums_are_rounded(fmt, backend, found):
    expected = "; ".join(
        f"{how} {gap} apart" for how, gap in zip(found, (64, 128, 1024), strict=True)
    )
    outcome = sum_rounding(backend, "cpu", OperandPolicy(format=fmt))
    assert outcome.detail == f"between groups of products: {expected}"


def test_bad_operands_are_refused_by_every_back_end():
    for name in BACKENDS:
        with pytest.raises(ValueError, match="32 does not divide 40"):
            load_backend(name).quantize(torch.zeros(2, 40), Draw(policy=MXFP4), axis=1)


def test_every_built_in_back_end_is_held_to_the_suite():
    # Triton's is interpreted in ``triton/``
    assert {*BACKENDS, "triton"} == {*BUILT_IN}
