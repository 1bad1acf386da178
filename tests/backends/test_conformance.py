"""The conformance suite over the back ends that run on a CPU, and what only they owe."""

import dataclasses
import itertools

import pytest
import torch

from ablate.backends.blackwell import BlackwellEmulated, add_toward_zero
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.backends.testing.probe import sum_rounding
from ablate.backends.testing.suite import checks
from ablate.numerics import OperandPolicy

MXFP4 = OperandPolicy(format="mxfp4")
BACKENDS = ["reference", "emulated", "torch"]
USUAL = "emulated"
"""The back end of studies without a GPU; the others are held to the same by CI."""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check.name}", marks=[] if name == USUAL else pytest.mark.exhaustive)
        for name in BACKENDS
        for check in checks(load_backend(name), "cpu")
    ],
)
def test_conformance(check):
    assert check.run()


class Shifted(EmulatedBackend):
    """Wrong in one way at a time."""

    fault, calls = "", itertools.count()

    def quantize(self, x, draw, *, axis):
        if self.fault == "axis":
            axis = 1 - axis % 2 if x.shape[0] == x.shape[1] else axis
        if self.fault in ("step", "signs") and draw.key:
            step = next(self.calls) if self.fault == "signs" else draw.key.step + 1
            draw = dataclasses.replace(draw, key=dataclasses.replace(draw.key, step=step))
        done = super().quantize(x, draw, axis=axis)
        if self.fault == "descale":
            return dataclasses.replace(done, descale=done.descale * 1.0000001)
        if self.fault == "gain":
            return dataclasses.replace(done, values=done.values * 1.01)
        if self.fault == "sign of zero":
            return dataclasses.replace(done, values=done.values + 0.0)
        return done

    def multiply(self, a, b):
        product = super().multiply(a, b)
        if self.fault == "narrow":  # an accumulator of 16 bits
            return self._narrow(a, b)
        return product * 1.004 if self.fault == "output" else product

    @staticmethod
    def _narrow(a, b):
        left, right = a.contraction_last.float(), b.contraction_last.float()
        total = torch.zeros(left.shape[0], right.shape[0])
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[:, k]
            total = ((total.view(torch.int32) + 128) & ~0xFF).view(torch.float32)
        return (total * a.descale * b.descale).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("axis", "quantised bits: mxfp4"),
        ("step", "quantised bits: mxfp4 stochastic"),
        ("descale", "quantised bits: mxfp4"),
        ("sign of zero", "quantised bits: mxfp4"),
        ("output", "product: mxfp4"),
        ("narrow", "exact probe: mxfp4"),
        ("gain", "stochastic gain: mxfp4 stochastic"),
        ("signs", "Hadamard cancels in the product: mxfp8 H16 step"),
    ],
)
def test_a_wrong_back_end_fails(fault, caught_by):
    wrong = Shifted()
    wrong.fault = fault
    chosen = (MXFP4, dataclasses.replace(MXFP4, rounding="stochastic"))
    by_name = {check.name: check for check in checks(wrong, "cpu", chosen)}
    with pytest.raises(AssertionError):
        by_name[caught_by].run()
    if fault == "narrow":
        assert by_name["accumulator: mxfp4"].run().detail == "sums keep 16 bits, fewer than the 24 of fp32"


def nearest(total, group):
    return (total + group).float().double()


def down(total, group):
    exact = total + group
    rounded = exact.float()
    lower = torch.nextafter(rounded, torch.tensor(-torch.inf))
    return torch.where(rounded.double() > exact, lower, rounded).double()


class Rounding(EmulatedBackend):
    """Adds groups of 64 products in their order, rounding in one way."""

    add = staticmethod(nearest)

    def multiply(self, a, b):
        total = 0.0
        pairs = zip(a.contraction_last.split(64, 1), b.contraction_last.split(64, 1), strict=True)
        for left, right in pairs:
            total = self.add(torch.zeros(()) + total, (left.double() @ right.double().t()).float().double())
        return (total * a.descale * b.descale).to(torch.bfloat16)


def at_once(_total, group):
    return _total + group  # more than 24 bits


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("add", "found"),
    [
        (nearest, "to nearest"),
        (add_toward_zero, "toward zero"),
        (down, "down"),
        (lambda total, group: -down(-total, -group), "up"),
        (at_once, "not at all here (more than 24 bits, or another order)"),
        (lambda total, group: total + group * (group.abs() > 1), "small terms cut off"),
    ],
    ids=["nearest", "toward zero", "down", "up", "wide", "cut off"],
)
def test_the_probe_tells_which_way_sums_are_rounded(fmt, add, found):
    backend = Rounding()
    backend.add = add
    by_name = {check.name: check for check in checks(backend, "cpu", (OperandPolicy(format=fmt),))}
    assert by_name[f"rounding of sums: {fmt}"].run().detail == f"between groups of products: {found}"


def test_the_probe_tells_where_directions_differ():
    class Late(Rounding):
        def multiply(self, a, b):
            self.add = nearest if a.values.shape[1] < 512 else add_toward_zero
            return super().multiply(a, b)

    told = sum_rounding(Late(), "cpu", "nvfp4")
    assert told.detail == "between groups of products: to nearest 64 apart; toward zero 128, 1024 apart"


def test_the_model_of_blackwell_is_what_the_probe_calls_toward_zero():
    told = sum_rounding(BlackwellEmulated(), "cpu", "nvfp4")
    assert told.detail == "between groups of products: toward zero"


def test_bad_operands_are_refused_by_every_back_end():
    for name in BACKENDS:
        with pytest.raises(ValueError, match="32 does not divide 40"):
            load_backend(name).quantize(torch.zeros(2, 40), Draw(policy=MXFP4), axis=1)
    with pytest.raises(ValueError, match="no back end 'fast'"):
        load_backend("fast")
