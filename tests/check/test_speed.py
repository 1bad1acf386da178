"""What is measured, with stand-in clocks; and what a fault of device or clock comes to."""

import itertools
import shutil
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from ablate.backends.device import Device, device_of
from ablate.backends.emulated import EmulatedBackend
from ablate.check import Setup, speed
from ablate.check.speed import rates, steps
from ablate.check.training import RECIPES
from ablate.run.architecture import model_size
from ablate.train.probe import StepTimes

B200 = Device(kind="cuda", arch="sm_100", name="NVIDIA B200")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Make every call take as many milliseconds as ``clock[0]`` says, and do it."""
    reads = [2.0]

    def elapsed_ms(call, _where):
        call()
        return reads[0]

    monkeypatch.setattr(speed, "elapsed_ms", elapsed_ms)
    return reads


@pytest.fixture
def time_steps(monkeypatch):
    timed = StepTimes(
        sec_per_step=(0.1, 0.3, 0.2), tokens_per_step=1024, peak_memory_bytes=3 * 10**9, launch="eager"
    )  # fmt: skip
    timer = Mock(return_value=timed)
    monkeypatch.setattr(speed, "time_steps", timer)
    return timer


def found(part, device=None, **backends):
    backends = backends or {"emulated": EmulatedBackend()}
    setup = Setup(where="cpu", device=device or device_of("cpu"), backends=backends)
    return {check.name: check.outcome()[0] for check in part(setup)}


def test_a_rate_is_of_the_product_alone_and_a_speed_of_quantising_too(monkeypatch):
    monkeypatch.setattr(speed, "_FORMATS", ("mxfp4",))
    assert found(rates)["mxfp4 1024×1024×1024"]["figures"] == {
        "TFLOP_per_s": 2 * 1024**3 / 2e-3 / 1e12, "quantise_ms": 2.0, "multiply_ms": 2.0,
        "speed_over_bf16": 0.5, "speed_over_fp8": 1.0,
    }  # fmt: skip


FIGURES = {"TFLOP_per_s": 2300.0}
TOO_FAST = "2300 TFLOP/s, 1.02 times the published peak"


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (FIGURES, {"result": "told", "detail": "native", "figures": FIGURES}),
        (FIGURES | {"share_of_peak": 1.02}, {"result": "failed", "detail": TOO_FAST}),
    ],
)
def test_a_rate_above_the_published_peak_is_a_failure(monkeypatch, figures, expected):
    monkeypatch.setattr(speed, "time_gemm", lambda *_, **__: ("native", figures))
    assert found(rates, B200)["bf16 8192×8192×2048"] == expected


def skipped(why):
    return {"result": "skipped", "detail": why}


@pytest.mark.usefixtures("time_steps")
def test_on_a_cpu_the_tiny_model_alone_is_timed_compiled_and_not(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    results = found(steps)
    recipes = ["bf16", *(f"{fmt} emulated" for fmt in RECIPES)]
    ways = itertools.product(recipes, ("not compiled", "compiled"))
    expected = [f"llama-tiny, {recipe}, {way}" for recipe, way in ways]
    assert [name for name in results if results[name]["result"] == "told"] == expected
    assert results["llama 150M"] == skipped("on a CPU llama-tiny alone is timed")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    no_compiler = skipped("torch.compile needs a C++ compiler on a CPU")
    assert found(steps)["llama-tiny, bf16, compiled"] == no_compiler


def test_steps_on_a_gpu_are_those_of_three_models_with_their_memory(
    monkeypatch, time_steps
):
    def be_full(config, **_):
        if config.model.width == 2048:
            raise torch.OutOfMemoryError
        return DEFAULT

    time_steps.side_effect = be_full
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    results = found(steps, B200)
    assert results["llama 150M, mxfp4 emulated, compiled"]["figures"] == {
        "step_ms": 200.0, "tokens_per_s": 5120.0, "peak_memory_GB": 3.0,
    }  # fmt: skip
    full = skipped("out of the device's memory")
    assert results["llama3.2-1b, bf16, not compiled"] == full


def test_the_models_have_the_sizes_of_their_names():
    for name, size in (("llama 150M", 150e6), ("llama3.2-1b", 1e9)):
        counted = model_size(speed.MODELS[name], vocab_size=32_000, seq_len=2048)
        assert counted.parameters == pytest.approx(size, rel=0.05)


def test_a_clock_that_stands_still_fails_the_part(monkeypatch, clock):
    monkeypatch.setattr(speed, "_FORMATS", ("bf16",))
    clock[0] = 0.0
    (fault,) = found(rates).values()
    assert fault["detail"] == "the clock stands still"
