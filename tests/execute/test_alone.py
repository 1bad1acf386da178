"""Whether a timing says something of a device."""

from __future__ import annotations

import os

import pytest
import torch

from ablate.backends.device import Device
from ablate.execute import alone
from ablate.execute.alone import other_work, why_not_valid

GPU = Device(kind="cuda", arch="sm_90", name="NVIDIA H100 80GB HBM3")
CPU = Device(kind="cpu", arch="cpu", name="CPU")


def test_a_gpu_that_does_not_tell_is_not_called_idle(monkeypatch):
    def silent(_device):
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    waits = []
    monkeypatch.setattr(alone.time, "sleep", waits.append)
    monkeypatch.setattr(torch.cuda, "utilization", silent)
    assert "not known" in other_work("cuda:0")
    for load, said in ((3, None), (80, "the GPU is 80 % busy")):
        monkeypatch.setattr(torch.cuda, "utilization", lambda _device, load=load: load)
        assert other_work("cuda:0") == said
    assert min(waits) >= 1.0  # our own work is out of the driver's window


@pytest.mark.parametrize(("load", "said"), [(4.0, None), (55.0, "the processors are 55 % busy")])
def test_processors_tell_their_load(monkeypatch, load, said):
    monkeypatch.setattr("psutil.cpu_percent", lambda **_: load)
    assert other_work("cpu") == said


def test_every_reason_is_named():
    cores = len(os.sched_getaffinity(0))
    assert why_not_valid("native", GPU, threads=cores + 1, others=None) is None  # the GPU does the work
    assert why_not_valid("emulated", GPU, threads=1, others="x") == "emulated arithmetic"
    assert why_not_valid("upcast", GPU, threads=1, others=None) == "upcast arithmetic"
    assert why_not_valid("native", GPU, threads=1, others="the GPU is 40 % busy") == "the GPU is 40 % busy"
    part = Device(kind="cuda", arch="sm_80", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert why_not_valid("native", part, threads=1, others=None) == "a part of a GPU (MIG)"
    assert why_not_valid("native", CPU, threads=cores, others=None) is None
    said = why_not_valid("native", CPU, threads=cores + 1, others=None)
    assert said == f"{cores + 1} threads on {cores} CPU cores"
