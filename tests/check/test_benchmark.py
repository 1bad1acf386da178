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


def task(seconds):
    setup = Setup(where="cpu", device=device_of("cpu"), backends={})
    return device.Task(setup=setup, ends=time.monotonic() + seconds, processes=2)


def test_a_part_without_time_is_recorded_as_such_and_the_next_one_runs(
    monkeypatch, tmp_path
):
    device_part = partial(device.checked, part="device", alone=True)
    monkeypatch.setattr(
        device, "PARTS", {"late": (0.0, device_part), "device": (1.0, device_part)}
    )
    monkeypatch.setattr(sys, "argv", ["device.py", "cpu", f"--out={tmp_path}"])
    assert device.main() == 0
    (path,) = tmp_path.glob("*.json")
    record = read_proof(path)
    late, ran = record.parts
    assert path.name == f"{record.machine.file_name}-benchmark.json"
    assert (late.state, late.why, late.findings) == ("not run", "time", ())
    assert (ran.state, ran.why) == ("passed", None)
    assert {finding.check for finding in ran.findings} >= {
        "device",
        "arithmetic",
        "back end",
    }
    page = path.with_suffix(".md").read_text()
    assert "`benchmarks/device.py` on cpu" in page
    assert "| late | not run: time | 0 | 0.0 |" in page


def test_a_part_ends_with_its_time_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr(device, "run_check", sleeping)
    part = device.part_of(
        "device", partial(device.checked, part="device", alone=True), task(0.5)
    )
    count = len(list(device.CHECKS["device"](task(0).setup)))
    assert (part.state, part.why) == ("not run", f"time: 0 of {count} checks")
    for process in multiprocessing.active_children():
        process.join(10)
    assert multiprocessing.active_children() == []


def sleeping(*_):
    time.sleep(600)


def test_a_process_that_crashes_is_a_failure(monkeypatch):
    monkeypatch.setattr(device, "run_check", crashing)
    part = device.part_of(
        "device", partial(device.checked, part="device", alone=True), task(100)
    )
    assert part.state == "failed"
    assert part.findings[-1].detail.startswith("a process ended within one of ")


def crashing(*_):
    os._exit(1)


@pytest.mark.parametrize(
    ("code", "state", "why", "details"),
    [
        ("print('x'); import time; time.sleep(600)", "not run", "time", []),
        (
            "raise ValueError('no such policy')",
            "failed",
            None,
            ["RuntimeError: ValueError: no such policy"],
        ),
        ("print('x')", "passed", None, []),
    ],
)
def test_a_program_ends_with_its_part(code, state, why, details):
    started = time.monotonic()
    part = device.part_of(
        "program", lambda task: iter(device.program(task, "-c", code)[:0]), task(3)
    )
    assert (part.state, part.why, [finding.detail for finding in part.findings]) == (
        state,
        why,
        details,
    )
    assert time.monotonic() - started < 60


@pytest.mark.exhaustive
def test_the_whole_command_on_a_cpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device", "cpu", "--minutes=20", f"--out={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = next(tmp_path.glob("*.json")).read_text()
    states = {
        part["name"]: (part["state"], part["why"]) for part in json.loads(text)["parts"]
    }
    assert states.keys() == device.PARTS.keys()
    assert states.pop("graph against eager")[0] == "skipped"
    assert {state for state, _ in states.values()} == {"passed"}, states
    assert os.uname().nodename not in text
    assert str(tmp_path) not in text
