"""The parts of a device's proof: which checks they have where, and that training finds its faults."""

import pytest

from ablate.backends.device import device_of, device_of_arch
from ablate.backends.select import load_backend
from ablate.backends.testing import suite
from ablate.check import Setup
from ablate.check.run import PARTS, setup_of


@pytest.mark.parametrize(
    ("arch", "claim", "native"),
    [
        ("cpu", "emulated torch", ""),
        ("sm_90", "emulated torch triton", "fp8"),
        ("sm_100", "emulated torch triton", "fp8 mxfp8 mxfp4 nvfp4"),
        ("sm_120", "emulated torch triton", "fp8 mxfp8 mxfp4 nvfp4"),
        ("gfx950", "emulated torch triton", "fp8 mxfp8 mxfp4"),
    ],
)
def test_every_part_has_its_checks_on_every_architecture(
    monkeypatch, arch, claim, native
):
    device = device_of_arch(arch)
    monkeypatch.setattr(suite, "device_of", lambda _: device)
    setup = setup_of("cpu" if arch == "cpu" else "cuda", device)
    assert set(claim.split()) <= set(setup.backends)
    checks = {name: list(make(setup)) for name, make in PARTS.items()}
    for of_part in checks.values():
        keys = [(check.backend, check.name) for check in of_part]
        assert keys
        assert len(set(keys)) == len(keys)  # else one would take another's place
    names = [check.name for check in checks["step times"]]
    steps = {name.split(", ")[1] for name in names if name.startswith("llama-tiny, ")}
    expected = {f"{name} native" for name in native.split()}
    assert {name for name in steps if "native" in name} == expected
    assert {check.backend for check in checks["training"]} == set(setup.backends)


def found(part, *names):
    backends = {name: load_backend(name) for name in names}
    setup = Setup(where="cpu", device=device_of("cpu"), backends=backends)
    return {
        (check.backend, check.name): check.outcome() for check in PARTS[part](setup)
    }


@pytest.mark.exhaustive
def test_right_back_ends_pass():
    results = found("training", "emulated", "torch")
    recipes = [("emulated", recipe) for recipe in ("mxfp4", "nvfp4", "mxfp8", "fp8")]
    assert list(results) == [*recipes, ("torch", "fp8")]
    assert {one["result"] for one, _ in results.values()} == {"passed"}, results


def scaled(multiply):
    return lambda a, b: multiply(a, b) * 1.02


def upside_down_along_tokens(quantize):
    def run(x, draw, *, axis):
        return quantize(x if axis else x.flip(0), draw, axis=axis)

    return run


def of_one_layer_in_its_second_step(quantize_both):
    """Wrong for a tensor whose shape no other has: dy of a block's first feed-forward layer."""
    calls = []

    def run(x, rows, columns):
        is_it = x.shape == (100, 512)
        calls.extend([x] * is_it)
        return quantize_both(x * 2 if is_it and len(calls) == 3 else x, rows, columns)

    return run


@pytest.mark.parametrize(
    ("method", "fault", "detail"),
    [
        ("multiply", scaled, "step 0, y of blocks.0.attention.qkv is 2.0"),
        ("quantize", upside_down_along_tokens, "step 0, Dgrad's w of blocks.1.ffn.down: "),
        (
            "quantize_both", of_one_layer_in_its_second_step,
            "step 1, Dgrad's dy of blocks.1.ffn.gate_up: descale",
        ),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(monkeypatch, method, fault, detail):
    backend = load_backend("torch")
    monkeypatch.setattr(backend, method, fault(getattr(backend, method)))
    one, error = found("training", "torch")["torch", "fp8"]
    assert one["result"] == "failed"
    assert one["detail"].startswith(detail), one
    assert error.tensors.keys() == {"x", "dy", "weight"}
