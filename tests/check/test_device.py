"""What the device is; what is missing is told, not an error."""

from types import SimpleNamespace

import pytest
import torch

from ablate.backends.device import Device, device_of
from ablate.check import device as module
from ablate.check.device import Setup, facts, machine_of, setup_of
from ablate.check.run import prove

B200 = Setup(
    where="cuda", device=Device(kind="cuda", arch="sm_100", name="NVIDIA B200", processors=148), backends={}
)


def found(setup, folder):
    record, _ = prove(setup, folder, minutes=1, parts={"device": facts})
    return {(one.backend, one.check): one for one in record.parts[0].findings}


def test_a_back_end_that_does_not_claim_the_device_says_why(tmp_path):
    one = found(setup_of("cpu", device_of("cpu")), tmp_path)["triton", "back end"]
    assert one.result == "skipped"
    assert one.detail.startswith("does not claim this device: ")


def test_a_clock_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def no_nvml(*_):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    properties = SimpleNamespace(
        name="NVIDIA B200", total_memory=180e9, multi_processor_count=148, clock_rate=1_965_000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for name in ("clock_rate", "power_draw", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, no_nvml)
    one = found(B200, tmp_path)
    assert (tmp_path / "sm_100-nvidia-b200.json").exists()
    assert one["", "clocks"].figures == {"largest_clock_MHz": 1965.0}
    assert "clock_MHz (ModuleNotFoundError: nvidia-ml-py" in one["", "clocks"].detail
    assert one["", "device"].figures == {"memory_GB": 180.0, "processors": 148.0}


def test_a_device_that_does_not_answer_fails_the_part(tmp_path, monkeypatch):
    def silent(_):
        raise RuntimeError("No HIP GPUs are available\nmore lines")

    monkeypatch.setattr(torch.cuda, "get_device_properties", silent)
    one = found(B200, tmp_path)["", "device"]
    assert (one.result, one.detail) == ("failed", "RuntimeError: No HIP GPUs are available")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("", None),
    ],
)
def test_the_driver_is_read_without_packages(tmp_path, monkeypatch, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr(module, "_DRIVER", path)
    assert machine_of(B200).versions["driver"] == version
