"""The parts of the conformance suite: each finds the fault that is its own, and says what is wrong."""

import itertools
from dataclasses import replace

import pytest

from ablate.backends.device import device_of
from ablate.backends.gemms.emulated import EmulatedBackend
from ablate.backends.testing.suite import POLICIES, label
from ablate.check.run import PARTS, prove
from ablate.check.setup import Setup
from tests.backends.test_conformance import Shifted


class Biased(EmulatedBackend):
    """Its values are 1 % too large."""

    def quantize(self, x, draw, *, axis):
        done = super().quantize(x, draw, axis=axis)
        return replace(done, values=done.values * 1.01)


class Unsigned(EmulatedBackend):
    """Each call draws signs of its own, so that rotations do not cancel."""

    calls = itertools.count()

    def quantize(self, x, draw, *, axis):
        key = draw.key and replace(draw.key, step=next(self.calls))
        return super().quantize(x, replace(draw, key=key), axis=axis)


OTHERS = "quantised bits of other policies"
SUITE = ("quantised bits", "exact probe", "products", "gain of SR", "Hadamard", OTHERS)


def wrong(fault):
    backend = Shifted()
    backend.fault = fault
    return backend


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("part", "backend", "check", "detail"),
    [
        ("quantised bits", wrong("sign of zero"), "mxfp4", "of 1024 values differ"),
        ("quantised bits", wrong("axis"), "mxfp4", "along axis 0: "),
        pytest.param(OTHERS, wrong("step"), "mxfp4 stochastic", "values differ", marks=LONG),
        pytest.param(
            "exact probe",
            wrong("narrow"),
            "exact probe: mxfp4",
            "are not those of an fp32 accumulator",
            marks=LONG,
        ),
        ("products", wrong("output"), "mxfp4", "× the bound"),
        ("gain of SR", Biased(), "mxfp4 stochastic", "gain 1.009"),
        ("Hadamard", Unsigned(), "mxfp8 H16 step", "against the product without rotation"),
    ],
)
def test_each_part_finds_its_fault(tmp_path, part, backend, check, detail):
    setup = Setup(where="cpu", device=device_of("cpu"), backends={"wrong": backend})
    record, _ = prove(setup, tmp_path, minutes=10, parts={part: PARTS[part]})
    assert record.parts[0].state == "failed"
    found = {one.check: one.detail for _, one in record.failed}
    assert detail in found[check]


@pytest.mark.exhaustive
def test_a_right_back_end_passes_all(tmp_path):
    setup = Setup(where="cpu", device=device_of("cpu"), backends={"emulated": EmulatedBackend()})
    record, _ = prove(setup, tmp_path, minutes=10, parts={name: PARTS[name] for name in SUITE})
    assert record.states() == {"passed": len(SUITE)}
    kinds = {(one.check.partition(":")[0], one.result) for one in record.parts[1].findings}
    assert kinds == {("exact probe", "passed"), ("accumulator", "told"), ("rounding of sums", "told")}


def test_the_bits_of_every_policy_are_in_one_of_two_parts():
    setup = Setup(where="cpu", device=device_of("cpu"), backends={"emulated": EmulatedBackend()})
    first, others = ([check.name for check in PARTS[part](setup)] for part in ("quantised bits", OTHERS))
    assert len(first) == 6
    assert sorted(first + others) == sorted(map(label, POLICIES))
