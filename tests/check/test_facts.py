"""What the device is; what is missing is told, not an error."""

from types import SimpleNamespace

import pytest
import torch

from ablate.backends.device import Device, device_of
from ablate.backends.gemms.emulated import EmulatedBackend
from ablate.check import facts as module
from ablate.check.facts import facts, machine_of
from ablate.check.run import prove
from ablate.check.setup import Setup, setup_of

CPU = Setup(where="cpu", device=device_of("cpu"), backends={"emulated": EmulatedBackend()})


def found(setup, folder):
    record, _ = prove(setup, folder, minutes=1, parts={"device": facts})
    return {(one.backend, one.check): one for one in record.parts[0].findings}


def test_the_versions_are_those_that_run():
    versions = machine_of(CPU).versions
    assert versions["torch"] == torch.__version__
    assert {"ablate", "python", "numpy", "pydantic"} <= versions.keys()


@pytest.mark.parametrize("package", ["triton", "pytorch-triton-rocm", "triton-rocm"])
def test_triton_is_named_as_each_build_of_torch_brings_it(monkeypatch, package):
    monkeypatch.setattr(module, "_version", lambda name: "3.9.0" if name == package else None)
    assert machine_of(CPU).versions[package] == "3.9.0"


def test_a_back_end_that_does_not_claim_the_device_says_why(tmp_path):
    one = found(setup_of("cpu", CPU.device), tmp_path)["triton", "back end"]
    assert one.result == "skipped"
    assert one.detail.startswith("does not claim this device: ")


def test_a_missing_feature_is_told(tmp_path, monkeypatch):
    assert found(CPU, tmp_path / "with")["", "feature: F.scaled_mm"].detail == "there"
    monkeypatch.delattr("torch.nn.functional.scaled_mm")
    one = found(CPU, tmp_path / "without")["", "feature: F.scaled_mm"]
    assert one.result == "told"
    assert one.detail.startswith("missing: AttributeError")


def test_a_clock_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def no_nvml(*_):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    properties = SimpleNamespace(
        name="NVIDIA B200", total_memory=180e9, multi_processor_count=148, clock_rate=1_965_000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for name in ("clock_rate", "power_draw", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, no_nvml)
    gpu = Device(kind="cuda", arch="sm_100", name="NVIDIA B200", processors=148)
    setup = Setup(where="cuda", device=gpu, backends={})
    record, path = prove(setup, tmp_path, minutes=1, parts={"device": facts})
    assert path.name == "sm_100-nvidia-b200.json"
    one = {one.check: one for one in record.parts[0].findings}
    assert one["clocks"].figures == {"largest_clock_MHz": 1965.0}
    assert "clock_MHz (ModuleNotFoundError: nvidia-ml-py" in one["clocks"].detail
    assert one["device"].figures == {"memory_GB": 180.0, "processors": 148.0}


def test_a_device_that_does_not_answer_fails_the_part(tmp_path, monkeypatch):
    def silent(_):
        raise RuntimeError("No HIP GPUs are available\nmore lines")

    monkeypatch.setattr(torch.cuda, "get_device_properties", silent)
    gpu = Device(kind="hip", arch="gfx950", name="AMD Instinct MI355X")
    record, _ = prove(
        Setup(where="cuda", device=gpu, backends={}), tmp_path, minutes=1, parts={"device": facts}
    )
    assert record.parts[0].state == "failed"
    found = {one.check: one for one in record.parts[0].findings}
    assert found["device"].detail == "RuntimeError: No HIP GPUs are available"
    assert found["feature: F.scaled_mm"].detail == "there"


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
    assert machine_of(CPU).versions["driver"] == version
