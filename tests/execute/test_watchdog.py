import json
import math
import sys
import time
import types

import pytest

from ablate.execute.watchdog import Usage, gpus
from ablate.track.describe import points


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_at_an_interval_and_at_the_end(tmp_path):
    path, told = tmp_path / "system.jsonl", iter(range(0, 10_000, 100))
    with Usage(path, lambda: next(told), every_sec=0.1):
        give_up = time.monotonic() + 900
        while not path.exists() and time.monotonic() < give_up:
            math.gamma(5)
    found = rows(path)
    assert len(found) >= 2
    assert [row["tokens"] for row in found] == [100 * i for i in range(len(found))]
    assert all(row["process_memory_usage_megabytes"] > 1 for row in found)
    assert all(0 <= row["system_memory_usage_percentage"] <= 100 for row in found)
    assert found[0]["process_cpu_percentage"] > 0  # the loop above was busy
    assert found[0]["cpu_utilization_percentage"] > 0
    names = {point.key for row in found for point in points(row)}
    assert {"system/cpu_utilization_percentage", "system/process_cpu_percentage"} <= names
    assert not any("tokens" in name or "time" in name for name in names)


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    path = tmp_path / "system.jsonl"
    path.write_text('{"kind": "sys')
    with Usage(path, lambda: 0):
        pass
    cut, whole = path.read_text().splitlines()
    assert cut == '{"kind": "sys'
    assert json.loads(whole)["kind"] == "system"


def test_a_file_that_cannot_be_written_harms_nothing(tmp_path):
    (tmp_path / "system.jsonl").mkdir()
    with Usage(tmp_path / "system.jsonl", lambda: 0):
        pass


@pytest.fixture
def two_gpus(monkeypatch):
    def only_first(index):
        if index:
            raise RuntimeError("the driver does not tell")
        return 75

    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda index: ((8 - 2 * index) << 30, 10 << 30),
        utilization=only_first,
        power_draw=lambda _index: 412_500,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return cuda


def test_gpus_as_far_as_they_tell(two_gpus):
    assert gpus() == {
        "gpu_0_memory_usage_megabytes": 2048.0,
        "gpu_0_memory_usage_percentage": 20.0,
        "gpu_0_utilization_percentage": 75,
        "gpu_0_power_usage_watts": 412.5,
        "gpu_1_memory_usage_megabytes": 4096.0,
        "gpu_1_memory_usage_percentage": 40.0,
    }
    assert {point.key for point in points({"kind": "system", "tokens": 1, "time_unix": 1.0, **gpus()})} == {
        f"system/{name}" for name in gpus()
    }


def test_a_gpu_that_is_not_in_use_is_not_touched(two_gpus):
    two_gpus.is_initialized = lambda: False
    assert gpus() == {}
