"""What a run's record says of the code that trained it, and whether a timing says something of a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import types
from importlib.resources import files
from pathlib import Path

import psutil
import pytest
import torch

from ablate.backends import device as devices
from ablate.backends.device import Device
from ablate.backends.select import Choice
from ablate.execute import environment
from ablate.execute.environment import (
    code_digest,
    describe_environment,
    git_commit,
    other_work,
    why_not_valid,
)

GPU = Device(kind="cuda", arch="sm_90", name="NVIDIA H100 80GB HBM3")
CPU = Device(kind="cpu", arch="cpu", name="CPU")


def test_the_digest_covers_the_sources_that_can_change_a_result_and_no_others():
    root = files("ablate")
    names = {
        name for part in environment._RESULT_SOURCES for name, _ in environment._sources(root / part, part)
    }
    assert {
        "layers/linear.py",
        "train/loop.py",
        "backends/kernel/kernel.cpp",
        "backends/triton/gemm.py",
        "data/batches.py",
        "recipes/presets/amd.py",
        "run/config.py",
        "models/decoder.py",
    } <= names
    assert not any(name.startswith(("reports", "cli", "track", "plan")) for name in names)
    assert len(code_digest()) == 12


def test_the_digest_changes_with_such_a_source_alone(monkeypatch, tmp_path):
    shutil.copytree(Path(str(files("ablate"))), tmp_path / "ablate", symlinks=False)
    monkeypatch.setattr(environment, "files", lambda _name: tmp_path / "ablate")

    def digest():
        code_digest.cache_clear()
        return code_digest()

    before = digest()
    (tmp_path / "ablate" / "reports" / "words" / "words.py").write_text("changed = True\n")
    assert digest() == before
    with (tmp_path / "ablate" / "train" / "loop.py").open("a") as file:
        file.write("# changed\n")
    assert digest() != before
    code_digest.cache_clear()


def test_an_installed_package_inside_a_users_repository_has_no_commit(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "ablate"
    package.mkdir(parents=True)
    (package / "_version.py").write_text("")
    for command in (
        ["git", "init", "-q"],
        ["git", "-c", "user.name=u", "-c", "user.email=u@x", "commit", "-q", "--allow-empty", "-m", "mine"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(environment.own_version, "__file__", str(package / "_version.py"))
    assert git_commit() is None
    subprocess.run(["git", "add", "venv"], cwd=tmp_path, check=True)
    assert git_commit() is not None


def choice(mode):
    return Choice(gemm="fprop", operands="bf16", backend="emulated", mode=mode, detail="d")


def test_a_run_vouches_for_its_timing_or_says_why_not(monkeypatch):
    found = describe_environment([choice("emulated")], [], "cpu", None, others=None, fingerprints=["a1"])
    assert (found["timing_valid"], found["timing_why_not"]) == (False, "emulated arithmetic")
    assert (found["gpu_uuid"], found["fingerprints"]) == (None, ["a1"])
    gpu = types.SimpleNamespace(name="H100", uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: gpu)
    monkeypatch.setattr(devices, "device_of", lambda _where: Device(kind="cuda", arch="sm_90", name="H100"))
    for others in (None, "the GPU is 40 % busy"):
        found = describe_environment([choice("native")], [], "cuda", None, others=others, fingerprints=["a1"])
        assert (found["gpu"], found["gpu_uuid"]) == ("H100", "GPU-1")
        assert (found["timing_valid"], found["timing_why_not"]) == (others is None, others)


def test_triton_is_told_under_the_name_that_rocm_gives_it(monkeypatch):
    monkeypatch.setattr(environment, "_version", {"triton-rocm": "3.9.0"}.get)
    found = describe_environment([choice("emulated")], [], "cpu", None, others=None, fingerprints=["a1"])
    assert (found["triton"], found["ray"]) == ("3.9.0", None)


def test_a_gpu_that_does_not_tell_is_not_called_idle(monkeypatch):
    def silent(_device):
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    waits = []
    monkeypatch.setattr(environment.time, "sleep", waits.append)
    monkeypatch.setattr(torch.cuda, "utilization", silent)
    assert "not known" in other_work("cuda:0")
    for load, said in ((3, None), (80, "the GPU is 80 % busy")):
        monkeypatch.setattr(torch.cuda, "utilization", lambda _device, load=load: load)
        assert other_work("cuda:0") == said
    assert min(waits) >= 1.0  # our own work is out of the driver's window


@pytest.mark.parametrize(("load", "said"), [(4, None), (55, "the processors are 55 % busy")])
def test_processors_tell_their_load(monkeypatch, tmp_path, load, said):
    """Of 400 ticks, ``load`` percent go to the six kinds of work, and some of the rest wait for a disk."""
    times = tmp_path / "stat"

    def work(_seconds):
        times.write_text(
            f"cpu  {1000 + 2 * load} 10 {200 + load} {9000 + 390 - 4 * load} 60 {load} 7 0 99 0\ncpu0"
        )

    times.write_text("cpu  1000 10 200 9000 50 0 7 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(environment, "_CPU_TIMES", times)
    monkeypatch.setattr(environment.time, "sleep", work)
    assert other_work("cpu") == said


def test_the_load_is_what_psutil_reads():
    then = psutil.cpu_times()
    busy, whole = environment._busy_and_all()
    now = psutil.cpu_times()
    tick = os.sysconf("SC_CLK_TCK")
    for seconds, low, high in (
        (busy / tick, *(sum(t) - t.idle - t.iowait - t.guest - t.guest_nice for t in (then, now))),
        (whole / tick, *(sum(t) - t.guest - t.guest_nice for t in (then, now))),
    ):
        assert low - 0.1 <= seconds <= high + 0.1


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
