"""What is measured, with stand-in clocks; and what a fault of device or clock comes to."""

import shutil

import pytest
import torch

from ablate.backends.device import Device, device_of
from ablate.backends.emulated import EmulatedBackend
from ablate.check import Setup, speed
from ablate.check.speed import rates, steps
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
    monkeypatch.setattr(
        speed, "time_steps", lambda *_args, **_counts: step_times(0.5 * reads[0])
    )
    return reads


def step_times(*seconds, memory=None):
    return StepTimes(
        sec_per_step=seconds,
        tokens_per_step=1024,
        peak_memory_bytes=memory,
        launch="eager",
    )


def found(part, device=None, **backends):
    backends = backends or {"emulated": EmulatedBackend()}
    setup = Setup(where="cpu", device=device or device_of("cpu"), backends=backends)
    return {check.name: check.outcome()[0] for check in part(setup)}


def test_a_rate_is_of_the_product_alone_and_a_speed_of_quantising_too(monkeypatch):
    monkeypatch.setattr(speed, "_FORMATS", ("mxfp4",))
    figures = found(rates)["mxfp4 1024×1024×1024"]["figures"]
    tflops = 2 * 1024**3 / 2e-3 / 1e12
    speeds = {"speed_over_bf16": 0.5, "speed_over_fp8": 1.0}
    assert figures == {
        "TFLOP_per_s": tflops,
        "quantise_ms": 2.0,
        "multiply_ms": 2.0,
        **speeds,
    }


@pytest.mark.parametrize(
    ("share", "result"), [(0.9, "told"), (1.02, "failed"), (None, "told")]
)
def test_a_rate_above_the_published_peak_is_a_failure(monkeypatch, share, result):
    figures = {"TFLOP_per_s": 2300.0} | (
        {} if share is None else {"share_of_peak": share}
    )
    monkeypatch.setattr(
        speed, "time_gemm", lambda *_args, **_options: ("native", figures)
    )
    one = found(rates, B200)["bf16 8192×8192×2048"]
    assert one["result"] == result
    if result == "failed":
        assert one["detail"] == "2300 TFLOP/s, 1.02 times the published peak"
    else:
        assert one["figures"].get("share_of_peak") == share


def test_on_a_cpu_the_tiny_model_alone_is_timed_compiled_and_not(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    results = found(steps)
    timed = [name for name, one in results.items() if one["result"] == "told"]
    recipes = [
        "bf16",
        *(f"{fmt} emulated" for fmt in ("mxfp4", "nvfp4", "mxfp8", "fp8")),
    ]
    assert timed == [
        f"llama-tiny, {name}, {how}"
        for name in recipes
        for how in ("not compiled", "compiled")
    ]
    assert results["llama-tiny, bf16, not compiled"]["figures"] == {
        "step_ms": 1000.0,
        "tokens_per_s": 1024.0,
    }
    assert results["llama 150M"] == {
        "result": "skipped",
        "detail": "on a CPU llama-tiny alone is timed",
    }
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert found(steps)["llama-tiny, bf16, compiled"] == {
        "result": "skipped", "detail": "torch.compile needs a C++ compiler on a CPU",
    }  # fmt: skip


def test_steps_on_a_gpu_are_those_of_three_models_with_their_memory(monkeypatch):
    def time_steps(config, **_counts):
        if config.model.width == 2048:
            raise torch.OutOfMemoryError
        return step_times(0.1, 0.3, 0.2, memory=3 * 10**9)

    monkeypatch.setattr(speed, "time_steps", time_steps)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    results = found(steps, B200)
    assert results["llama 150M, mxfp4 emulated, compiled"]["figures"] == {
        "step_ms": 200.0, "tokens_per_s": 5120.0, "peak_memory_GB": 3.0,
    }  # fmt: skip
    assert results["llama3.2-1b, bf16, not compiled"] == {
        "result": "skipped", "detail": "out of the device's memory",
    }  # fmt: skip


def test_the_models_have_the_sizes_of_their_names():
    sizes = [
        model_size(model, vocab_size=32_000, seq_len=2048).parameters
        for model in speed.MODELS.values()
    ]
    assert sizes[1:] == pytest.approx([150e6, 1e9], rel=0.05)


def test_a_clock_that_stands_still_fails_the_part(monkeypatch, clock):
    monkeypatch.setattr(speed, "_FORMATS", ("bf16",))
    clock[0] = 0.0
    assert {one["detail"] for one in found(rates).values()} == {
        "the clock stands still"
    }
