"""FSDP2 beside one device, through gloo on processes of the CPU."""

import pytest
import torch

from ablate.backends.device import Device, device_of
from ablate.backends.select import load_backend
from ablate.check import sharded
from ablate.check.run import prove
from ablate.check.setup import Setup
from ablate.check.sharded import fsdp2, sharded_losses


def found(folder, device):
    setup = Setup(where="cpu", device=device, backends={"emulated": load_backend("emulated")})
    record, _ = prove(setup, folder, minutes=10, parts={"FSDP2": fsdp2})
    return record.parts[0]


def test_one_device_is_skipped_with_the_reason(tmp_path):
    part = found(tmp_path, device_of("cpu"))
    assert (part.state, part.why) == ("skipped", "FSDP2 needs two GPUs")


@pytest.mark.parametrize(("apart", "state"), [(0.001, "passed"), (0.5, "failed")])
def test_every_recipe_is_trained_on_all_gpus_and_on_one(tmp_path, monkeypatch, apart, state):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked = []

    def losses(devices, _backend, recipe, sequences):
        asked.append((len(devices), recipe, sequences))
        return [5.0, 4.0, 3.0 + (apart if len(devices) > 1 else 0)]

    monkeypatch.setattr(sharded, "sharded_losses", losses)
    part = found(tmp_path, Device(kind="cuda", arch="sm_100", name="NVIDIA B200"))
    assert part.state == state
    assert part.findings[0].detail == f"4 devices: losses at most {apart:.5f} from one device's in 3 steps"
    assert asked[:2] == [(1, "mxfp4", 32), (4, "mxfp4", 32)]


@pytest.mark.exhaustive
def test_two_processes_have_the_losses_of_one():
    alone, together = (sharded_losses(["cpu"] * count, "emulated", "mxfp4", 16) for count in (1, 2))
    assert alone[0] == pytest.approx(together[0], abs=1e-3)
    assert alone == pytest.approx(together, abs=0.02)
    assert alone[-1] < alone[0]


@pytest.mark.exhaustive
def test_a_process_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="exit codes of the processes: \\[1\\]"):
        sharded_losses(["cpu"], "emulated", "no such recipe", 8)
