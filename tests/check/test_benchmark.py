"""``benchmarks/device.py`` on a CPU: its record, a part without time, what hangs or crashes."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ablate.backends.device import device_of
from ablate.check import Setup
from ablate.check.record import read_proof
from tests.benchmark import load_benchmark

ROOT = Path(__file__).resolve().parents[2]
device = load_benchmark("device")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Processes of the benchmark import it by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


CHECKED = partial(device.checked, part="device", alone=True)


def task(seconds):
    setup = Setup(where="cpu", device=device_of("cpu"), backends={})
    return device.Task(setup=setup, ends=time.monotonic() + seconds, processes=2)


def test_a_part_without_time_is_recorded_as_such_and_the_next_one_runs(
    monkeypatch, tmp_path
):
    parts = {"late": (0.0, CHECKED), "device": (1.0, CHECKED)}
    monkeypatch.setattr(device, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["device.py", "cpu", f"--out={tmp_path}"])
    assert device.main() == 0
    (path,) = tmp_path.glob("*.json")
    record = read_proof(path)
    late, ran = record.parts
    assert path.name == f"{record.machine.file_name}-benchmark.json"
    assert (late.state, late.why, late.findings) == ("not run", "time", ())
    assert (ran.state, ran.why) == ("passed", None)
    checks = {finding.check for finding in ran.findings}
    assert checks >= {"device", "arithmetic", "back end"}
    page = path.with_suffix(".md").read_text()
    assert "`benchmarks/device.py` on cpu" in page
    assert "| late | not run: time | 0 | 0.0 |" in page


def test_a_part_ends_with_its_time_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr(device, "run_check", sleeping)
    part = device.part_of("device", CHECKED, task(0.5))
    count = len(list(device.CHECKS["device"](task(0).setup)))
    assert (part.state, part.why) == ("not run", f"time: 0 of {count} checks")
    for process in multiprocessing.active_children():
        process.join(10)
    assert multiprocessing.active_children() == []


def sleeping(*_):
    time.sleep(600)


def test_a_process_that_crashes_is_a_failure(monkeypatch):
    monkeypatch.setattr(device, "run_check", crashing)
    part = device.part_of("device", CHECKED, task(100))
    assert part.state == "failed"
    assert part.findings[-1].detail.startswith("a process ended within one of ")


def crashing(*_):
    os._exit(1)


@pytest.mark.parametrize(
    ("code", "state", "why", "details"),
    [
        ("print('x'); import time; time.sleep(600)", "not run", "time", []),
        ("raise ValueError('no')", "failed", None, ["RuntimeError: ValueError: no"]),
        ("print('x')", "passed", None, []),
    ],
)
def test_a_program_ends_with_its_part(code, state, why, details):
    started = time.monotonic()
    run = lambda task: iter(device.program(task, "-c", code)[:0])  # noqa: E731
    part = device.part_of("program", run, task(3))
    assert (part.state, part.why) == (state, why)
    assert [finding.detail for finding in part.findings] == details
    assert time.monotonic() - started < 60


@pytest.mark.exhaustive
def test_the_whole_command_on_a_cpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device", "cpu", "--minutes=20", f"--out={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = next(tmp_path.glob("*.json")).read_text()
    states = {part["name"]: part["state"] for part in json.loads(text)["parts"]}
    expected = dict.fromkeys(device.PARTS, "passed")
    assert states == expected | {"graph against eager": "skipped"}, text
    assert os.uname().nodename not in text
    assert str(tmp_path) not in text
