"""The self-test that stands before native training."""

import pytest

from ablate.backends.select import load_backend
from ablate.backends.testing import selftest
from ablate.backends.testing.selftest import quick_self_test, self_test, trains_like_emulation


def test_the_short_form_passes_and_is_run_once():
    first = quick_self_test("emulated", "cpu")
    assert all(result.passed for result in first)
    assert {"exact probe: mxfp4", "accumulator: mxfp4"} <= {result.check for result in first}
    assert quick_self_test("emulated", "cpu") is first


def test_a_driver_error_is_a_failed_check_in_one_line(monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(load_backend("emulated"), "multiply", broken)
    results = list(self_test("emulated", "cpu", quick=True))
    failed = [result for result in results if not result.passed]
    assert failed
    assert failed[0].detail == "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("name", ["emulated", "reference", "torch"])
def test_training_stays_with_emulation(name):
    results = list(trains_like_emulation(name, "cpu"))
    expected = {"training fp8"} if name == "torch" else {"training mxfp4", "training nvfp4", "training fp8"}
    assert {result.check for result in results} == expected
    assert all(result.passed for result in results), results


def test_training_with_a_wrong_operand_is_found(monkeypatch):
    backend = load_backend("reference")
    original = backend.quantize

    def transposed_noise(x, draw, *, axis):
        return original(x.flip(0), draw, axis=axis)

    monkeypatch.setattr(backend, "quantize", transposed_noise)
    result = next(iter(trains_like_emulation("reference", "cpu")))
    assert not result.passed
    assert selftest._STEPS == 10
