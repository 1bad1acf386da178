"""The part of the self-test that trains a small network."""

import pytest

from ablate.backends.select import load_backend
from ablate.layers import selftest
from ablate.layers.selftest import trains_like_emulation


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
