"""Which tasks there are on hardware that is not here, as the back ends claim it."""

import pytest
import torch

from ablate.backends.device import device_of_arch
from ablate.backends.testing import suite
from ablate.check.run import PARTS
from ablate.check.setup import setup_of


@pytest.mark.parametrize(
    ("arch", "claim", "native"),
    [
        ("cpu", {"emulated", "torch"}, set()),
        ("sm_90", {"emulated", "torch", "triton"}, {"fp8 native"}),
        (
            "sm_100",
            {"emulated", "torch", "triton"},
            {"fp8 native", "mxfp8 native", "mxfp4 native", "nvfp4 native"},
        ),
        ("sm_120", {"emulated", "triton"}, {"mxfp8 native", "mxfp4 native", "nvfp4 native"}),
        ("gfx950", {"emulated", "torch", "triton"}, {"fp8 native", "mxfp8 native", "mxfp4 native"}),
    ],
)
def test_every_part_has_its_tasks_on_every_architecture(monkeypatch, arch, claim, native):
    device = device_of_arch(arch)
    monkeypatch.setattr(suite, "device_of", lambda _: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    setup = setup_of("cpu" if arch == "cpu" else "cuda", device)
    assert claim <= set(setup.backends)
    tasks = {name: list(make(setup)) for name, make in PARTS.items()}
    assert all(tasks.values())
    for name, of_part in tasks.items():
        keys = [(task.backend, task.name) for task in of_part]
        assert len(set(keys)) == len(keys), f"a finding of {name} would take the place of another"
    steps = {task.name.split(", ")[1] for task in tasks["step times"] if task.name.startswith("llama-tiny")}
    assert steps >= {"bf16", *(f"{name} emulated" for name in ("mxfp4", "nvfp4", "mxfp8", "fp8")), *native}
    assert any(step.endswith("native") for step in steps) == bool(native)
    assert {task.backend for task in tasks["training"]} == set(setup.backends)
