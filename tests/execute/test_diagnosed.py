"""Diagnostics as the worker writes them: beside the metrics, cut back with them, no part of the result."""

import json
from dataclasses import asdict, replace

import pytest

from ablate.execute.worker import execute_run
from ablate.run.diagnostics import Diagnostics
from ablate.store import RunDir
from tests.execute.kill import task_of, tiny_config

DIAGNOSTICS = Diagnostics(every_tokens=128, draws=2)


@pytest.fixture
def make(tmp_path):
    def make(name, **more):
        run = RunDir(tmp_path / name)
        run.create(asdict(tiny_config(seed=1, steps=6)))
        return run, replace(task_of(run, tmp_path), **more)

    return make


def rows(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("time_unix", "tokens_per_sec")} for row in found]


def test_a_run_that_is_stopped_has_the_rows_and_the_result_of_one_that_is_not(make, tmp_path):
    plain, task = make("plain")
    assert execute_run(task).state == "finished"
    assert not plain.diagnostics_path.exists()
    whole, task = make("whole", diagnostics=DIAGNOSTICS)
    assert execute_run(task).state == "finished"
    assert rows(whole.metrics_path) == rows(plain.metrics_path)
    assert {row["step"] for row in rows(whole.diagnostics_path)} == {0, 2, 4}
    assert {row["gemm"] for row in rows(whole.diagnostics_path)} == {"dgrad", "wgrad"}

    broken, task = make("broken", diagnostics=DIAGNOSTICS)
    stop = tmp_path / "stop"
    for _ in range(3):
        stop.touch()
        assert execute_run(task).state == "interrupted"
    with broken.diagnostics_path.open("a") as file:  # what came after the checkpoint is cut, as metrics are
        file.write('{"kind":"diagnosis","step":5}\n{"cut')
    stop.unlink()
    assert execute_run(task).state == "finished"
    assert rows(broken.metrics_path) == rows(plain.metrics_path)
    assert rows(broken.diagnostics_path) == rows(whole.diagnostics_path)
