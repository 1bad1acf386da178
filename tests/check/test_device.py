"""What the device is; what is missing is told, not an error."""

from types import SimpleNamespace

import pytest
import torch

from ablate.backends import device
from ablate.backends.device import Device, device_of
from ablate.check import Setup
from ablate.check.run import facts, machine_of, setup_of

B200 = Setup(
    where="cuda",
    device=Device(kind="cuda", arch="sm_100", name="NVIDIA B200", processors=148),
    backends={},
)


def found(setup):
    return {(check.backend, check.name): check.outcome()[0] for check in facts(setup)}


def test_a_back_end_that_does_not_claim_the_device_says_why():
    one = found(setup_of("cpu", device_of("cpu")))["triton", "back end"]
    assert one["result"] == "skipped"
    assert one["detail"].startswith("does not claim this device: ")


def test_a_clock_that_cannot_be_read_is_named(monkeypatch):
    def no_nvml(*_):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    properties = SimpleNamespace(
        name="NVIDIA B200", total_memory=180e9, multi_processor_count=148, clock_rate=1_965_000
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for name in ("clock_rate", "power_draw", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, no_nvml)
    one = found(B200)
    assert one["", "device"]["figures"] == {
        "memory_GB": 180.0, "processors": 148.0, "largest_clock_MHz": 1965.0,
    }  # fmt: skip
    assert "clock_MHz (ModuleNotFoundError: nvidia-ml-py" in one["", "device"]["detail"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  Release",
            "580.95.05",
        ),
        ("", None),
    ],
)
def test_the_driver_is_read_without_packages(tmp_path, monkeypatch, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr(device, "_DRIVER", path)
    assert machine_of(B200).versions["driver"] == version
