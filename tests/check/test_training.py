"""Gradients of a layer, and training beside the reference: the first layer that differs is named."""

import pytest
import torch

from ablate.backends.device import device_of
from ablate.backends.select import load_backend
from ablate.check import training as module
from ablate.check.run import prove
from ablate.check.setup import Setup
from ablate.check.training import linear_gradients, training
from tests.exhaustive import rest_exhaustive

PARTS = {"gradients": linear_gradients, "training": training}


def found(folder, part, *names):
    setup = Setup(where="cpu", device=device_of("cpu"), backends={name: load_backend(name) for name in names})
    record, _ = prove(setup, folder, minutes=10, parts={part: PARTS[part]})
    return {(one.backend, one.check): one for one in record.parts[0].findings}


@pytest.mark.parametrize("part", rest_exhaustive(PARTS, lambda part: part != "training"))
def test_right_back_ends_pass(tmp_path, part):
    results = found(tmp_path, part, "emulated", "torch")
    recipes = [("emulated", recipe) for recipe in ("mxfp4", "nvfp4", "mxfp8", "fp8")]
    assert list(results) == [*recipes, ("torch", "fp8")]
    assert {one.result for one in results.values()} == {"passed"}, results


@pytest.mark.exhaustive
def test_the_reference_beside_itself_differs_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STEPS", 2)
    one = found(tmp_path, "training", "reference")["reference", "mxfp4"]
    assert one.result == "passed"
    assert "at most 0.00000 from the reference's; the two runs' bits differ nowhere" in one.detail


def broken(monkeypatch, **methods):
    backend = load_backend("torch")
    for name, make in methods.items():
        monkeypatch.setattr(backend, name, make(getattr(backend, name)))


def scaled(multiply):
    return lambda a, b: multiply(a, b) * 1.02


def upside_down_along_tokens(quantize):
    def run(x, draw, *, axis):
        return quantize(x if axis else x.flip(0), draw, axis=axis)

    return run


def of_one_layer_in_its_second_step(quantize):
    """Wrong for the only tensor of this shape: dy of a block's first feed-forward layer."""
    calls = []

    def run(x, draw, *, axis):
        if x.shape == (128, 512):
            calls.append(axis)
        return quantize(x * 2 if len(calls) == 5 else x, draw, axis=axis)

    return run


A_TOKEN = {"x": (1, 64), "dy": (1, 64), "weight": (64, 64)}


@pytest.mark.parametrize(
    ("part", "method", "fault", "detail", "shapes"),
    [
        ("gradients", "multiply", scaled, "y is 2.0", A_TOKEN),
        ("gradients", "quantize", upside_down_along_tokens, "dx is ", A_TOKEN),
        ("training", "multiply", scaled, "step 0, Fprop's product of blocks.0.attention.qkv: 2.0", A_TOKEN),
        (
            "training", "quantize", upside_down_along_tokens,
            "step 0, Dgrad's w of blocks.1.ffn.down: ", {"x": (2, 1)},
        ),
        (
            "training", "quantize", of_one_layer_in_its_second_step,
            "step 1, Dgrad's dy of blocks.1.ffn.gate_up: descale", {"x": (128, 512)},
        ),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(tmp_path, monkeypatch, part, method, fault, detail, shapes):
    broken(monkeypatch, **{method: fault})
    one = found(tmp_path, part, "torch")["torch", "fp8"]
    assert one.result == "failed"
    assert one.detail.startswith(detail), one.detail
    tensors = torch.load(tmp_path / one.tensors, weights_only=True)["tensors"]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes


def test_an_error_of_the_driver_is_a_failure_in_one_line(tmp_path, monkeypatch):
    def no_kernel(_multiply):
        def run(_a, _b):
            raise RuntimeError("no kernel image is available for execution on the device\nmore lines")

        return run

    broken(monkeypatch, multiply=no_kernel)
    one = found(tmp_path, "training", "torch")["torch", "fp8"]
    assert one.detail == "RuntimeError: no kernel image is available for execution on the device"
