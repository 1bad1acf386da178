"""What a run's record says of its code and arithmetic, and whether a timing is a device's own."""

import os
import shutil
import subprocess
import types
from importlib.resources import files
from pathlib import Path

import psutil
import pytest
import torch

from ablate.backends.device import Device
from ablate.backends.select import Choice
from ablate.execute import environment
from ablate.execute.environment import (
    code_digest,
    commit_of,
    describe_environment,
    fingerprint,
    other_work,
    why_not_valid,
)
from tests.waiting import run_python

GPU = Device(kind="cuda", arch="sm_90", name="NVIDIA H100 80GB HBM3")
PART = Device(kind="cuda", arch="sm_80", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
CPU = Device(kind="cpu", arch="cpu", name="CPU")
CORES = len(os.sched_getaffinity(0))


def test_the_digest_changes_with_sources_that_can_change_a_result_alone(
    monkeypatch, tmp_path
):
    shutil.copytree(Path(str(files("ablate"))), tmp_path / "ablate", symlinks=False)
    monkeypatch.setattr(environment, "files", lambda _name: tmp_path / "ablate")

    def digest_with(name):
        with (tmp_path / "ablate" / name).open("a") as file:
            file.write("\n")
        code_digest.cache_clear()
        return code_digest()

    digests = [digest_with("reports/__init__.py")]
    assert digest_with("cli/__init__.py") == digests[0]
    sources = (
        "layers/linear.py", "train/loop.py", "backends/kernel/kernel.cpp", "backends/triton/gemm.py",
        "data/batches.py", "recipes/presets.json", "run/config.py", "models/decoder.py",
    )  # fmt: skip
    digests += map(digest_with, sources)
    assert len(set(digests)) == len(digests)
    code_digest.cache_clear()


def test_a_run_says_what_it_ran_on(monkeypatch):
    def described(mode, where):
        choice = Choice(
            gemm="fprop", operands="bf16", backend="emulated", mode=mode, detail="d"
        )
        return describe_environment([choice], [], where, None, fingerprints=["a1"])

    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    # as ROCm names it
    monkeypatch.setattr(environment, "version_of", {"triton-rocm": "3.9.0"}.get)
    record = described("emulated", "cpu")
    assert (record["gpu_uuid"], record["fingerprints"], record["triton"]) == (
        None,
        ["a1"],
        "3.9.0",
    )
    assert record["arithmetic_settings"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    gpu = types.SimpleNamespace(name="H100", uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: gpu)
    record = described("native", "cuda")
    assert (record["gpu"], record["gpu_uuid"]) == ("H100", "GPU-1")


@pytest.mark.parametrize(
    ("mode", "device", "threads", "others", "said"),
    [
        ("native", GPU, CORES + 1, None, None),  # the GPU does the work
        ("upcast", GPU, 1, "x", "upcast arithmetic"),
        ("native", GPU, 1, "the GPU is 40 % busy", "the GPU is 40 % busy"),
        ("native", PART, 1, None, "a part of a GPU (MIG)"),
        ("native", CPU, CORES, None, None),
        ("native", CPU, CORES + 1, None, f"{CORES + 1} threads on {CORES} CPU cores"),
    ],
)
def test_every_reason_is_named(mode, device, threads, others, said):
    assert why_not_valid(mode, device, threads=threads, others=others) == said


def test_a_device_tells_its_load_and_one_that_does_not_is_not_called_idle(monkeypatch):
    waits = []
    monkeypatch.setattr(environment.time, "sleep", waits.append)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _device: 1 / 0)
    assert "not known" in other_work("cuda:0")
    assert min(waits) >= 1.0  # our own work is out of the driver's window
    for load, of_gpu, of_cpu in (
        (3, None, None),
        (80, "the GPU is 80 % busy", "the processors are 80 % busy"),
    ):
        monkeypatch.setattr(torch.cuda, "utilization", lambda _device, load=load: load)
        assert other_work("cuda:0") == of_gpu
        times = iter([(1210, 9050), (1210 + 4 * load, 9050 + 400 - 4 * load)])
        monkeypatch.setattr(environment, "_cpu_times", lambda times=times: next(times))
        assert other_work("cpu") == of_cpu


def test_the_load_is_what_psutil_reads():
    before = psutil.cpu_times()
    ticks_read = environment._cpu_times()
    after = psutil.cpu_times()
    for ticks, read in zip(
        ticks_read,
        (
            lambda t: sum(t) - t.idle - t.iowait - t.guest - t.guest_nice,
            lambda t: t.idle + t.iowait,
        ),
        strict=True,
    ):
        assert (
            read(before) - 0.1 <= ticks / os.sysconf("SC_CLK_TCK") <= read(after) + 0.1
        )


@pytest.mark.exhaustive
def test_other_instructions_of_aten_or_of_onednn_give_another_fingerprint(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    code = "from ablate.execute.environment import fingerprint; print(fingerprint('cpu', 1))"

    def found_with(**variables):
        return run_python(code, env=os.environ | variables).stdout.strip()

    usual_fingerprint = fingerprint("cpu", 1)
    assert found_with() == usual_fingerprint
    assert (
        found_with(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
        != usual_fingerprint
    )


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_code_is_the_commit_and_what_differs_from_it(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (folder := tmp_path / "venv").mkdir()
    (folder / "train.py").write_text("1")
    commits = [commit_of(folder)]
    commit = ["commit", "-qm", "mine"]
    for words in (["init", "-q"], [*commit, "--allow-empty"], ["add", "venv"], commit):
        subprocess.run([*git, *words], check=True)
        commits.append(commit_of(folder))
    # as an installed package inside a user's repository
    assert commits[:3] == [None] * 3
    assert [len(name) for name in commits[3:]] == [12 + 9, 12]
    for content in "23":
        (folder / "train.py").write_text(content)
        commits.append(commit_of(folder))
    assert len(set(commits[3:])) == 4
