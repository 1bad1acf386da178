"""What must hold before a run trains."""

import dataclasses

import pytest
import torch

from ablate.backends import preflight
from ablate.backends.device import Device
from ablate.backends.preflight import CheckResult, UnfitDeviceError, fit_choices, run_self_tests
from ablate.execute.worker import _one_line
from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, ResourcesConfig, RunConfig, TrainingConfig


@pytest.fixture
def config():
    return RunConfig(
        model=ModelConfig(), data=DataConfig(), data_digest="x", vocab_size=64, training=TrainingConfig(),
        recipe=resolve(RecipeSpec(gemms=["fprop", "wgrad"])), backend="auto", seed=0,
    )  # fmt: skip


def on(monkeypatch, device):
    import ablate.backends.device

    monkeypatch.setattr(ablate.backends.device, "device_of", lambda _where: device)


def test_emulation_fits_everywhere(config):
    choices = fit_choices(config, ResourcesConfig(), "cpu")
    assert {choice.mode for choice in choices} == {"emulated"}
    assert run_self_tests(choices, "cpu", allow_failed=False) == []


def test_require_native_refuses_with_the_way_out(config, monkeypatch):
    native = ResourcesConfig(require_native=True)
    with pytest.raises(
        UnfitDeviceError, match=r"require_native: no native .* for Fprop on CPU .*`ablate check`"
    ):
        fit_choices(config, native, "cpu")
    on(monkeypatch, Device(kind="cuda", arch="sm_90", name="H100"))
    with pytest.raises(UnfitDeviceError, match="no native mxfp4 for Fprop on H100"):
        fit_choices(config, native, "cuda")
    on(monkeypatch, Device(kind="cuda", arch="sm_100", name="B200"))
    assert {choice.mode for choice in fit_choices(config, native, "cuda")} == {"native"}


def test_a_back_end_that_cannot_is_refused_with_the_way_out(config):
    named = dataclasses.replace(config, backend="torch")
    with pytest.raises(
        UnfitDeviceError, match=r"back end 'torch' cannot do mxfp4 on CPU: .*; backend: auto takes"
    ):
        fit_choices(named, ResourcesConfig(), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_one_line(config):
    with pytest.raises(
        UnfitDeviceError, match=r"^no GPU can be used here \(.+\); set resources.gpus: 0"
    ) as caught:
        fit_choices(config, ResourcesConfig(gpus=1), "cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("allow", [False, True])
def test_a_failed_self_test_stops_the_run_unless_the_study_says_otherwise(config, monkeypatch, allow):
    on(monkeypatch, Device(kind="cuda", arch="sm_100", name="B200"))
    choices = fit_choices(config, ResourcesConfig(), "cuda")
    bad = CheckResult(
        backend="torch", check="exact probe: mxfp4", passed=False, detail="3 of 9 products differ"
    )
    monkeypatch.setattr(preflight, "quick_self_test", lambda _name, _where: (bad,))
    if allow:
        record = run_self_tests(choices, "cuda", allow_failed=True)
        assert record[0]["passed"] is False
        return
    with pytest.raises(
        UnfitDeviceError, match=r"self-test of back end 'torch' failed: exact probe: mxfp4: 3 of 9"
    ):
        run_self_tests(choices, "cuda", allow_failed=False)
    assert preflight._TESTED_MODES == ("native", "upcast")


def test_what_a_gpu_does_wrong_is_one_line_with_the_way_out():
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert _one_line(memory) == (
        "out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB.); "
        "a smaller training.micro_batch_size needs less"
    )
    driver = RuntimeError("CUDA error: device-side assert triggered\nmore")
    assert _one_line(driver) == (
        "the GPU failed: CUDA error: device-side assert triggered; `ablate check cuda` tests it"
    )
    assert _one_line(UnfitDeviceError("no such path")) == "no such path"
    assert _one_line(KeyError("a")) == "KeyError: 'a'"
