"""What the worker keeps beside a run: samples of the machine, checkpoints when they are due, diagnostics."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from ablate.execute import side_tasks, training
from ablate.execute.side_tasks import Keeper, sampled
from ablate.execute.worker import execute_run
from ablate.plan.shares import CONTEXT_BYTES
from ablate.run.diagnostics import Diagnostics
from ablate.store import RunDir, StudyStore
from ablate.store.checkpoints import load_newest
from ablate.store.metrics import MetricsWriter
from ablate.track.describe import points
from ablate.train import Snapshot, loop
from ablate.train.graphed import WholeSteps
from ablate.train.group import ALONE
from tests.execute.kill import make_run, rows_in, task_of
from tests.waiting import wait_until


def test_samples_at_an_interval_and_at_the_end(tmp_path, monkeypatch):
    def only_first(index):
        if index:
            raise RuntimeError("the driver does not tell")
        return 75

    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, utilization=only_first,
        mem_get_info=lambda index: ((8 - 2 * index) << 30, 10 << 30), power_draw=lambda _index: 412_500,
    )  # fmt: skip
    monkeypatch.setattr(side_tasks, "EVERY_SEC", 0.1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    path = tmp_path / "system.jsonl"
    counts = iter(range(0, 10_000, 100))
    with sampled(path, lambda: next(counts)):
        wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 1)
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert [row["tokens"] for row in rows] == [100 * i for i in range(len(rows))]
    assert all(row["process_memory_usage_megabytes"] > 1 for row in rows)
    assert all(0 <= row["system_memory_usage_percentage"] <= 100 for row in rows)
    of_gpus = {
        "gpu_0_memory_usage_megabytes": 2048.0, "gpu_0_memory_usage_percentage": 20.0,
        "gpu_0_utilization_percentage": 75, "gpu_0_power_usage_watts": 412.5,
        "gpu_1_memory_usage_megabytes": 4096.0, "gpu_1_memory_usage_percentage": 40.0,
    }  # fmt: skip
    assert rows[0].items() >= of_gpus.items()
    shown = {point.key.removeprefix("system/") for point in points(rows[0])}
    assert rows[0].keys() - shown == {"kind", "tokens", "time_unix"}
    assert len([name for name in shown if name.startswith("gpu")]) == len(of_gpus)
    with sampled(tmp_path, lambda: 0):  # a file that cannot be written harms nothing
        pass
    # torch as another thread sees it while it is imported
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    path.unlink()
    with sampled(path, lambda: 0):
        pass
    assert json.loads(path.read_text()).keys() == rows[0].keys() - of_gpus.keys()


@pytest.mark.parametrize(
    ("gpus", "held"), [(0.25, 0.15), (0.05, 0.0), (1, 1.0), (2, 1.0)]
)
def test_a_run_is_held_to_its_share_of_the_memory_and_an_end_by_it_says_so(
    tmp_path, monkeypatch, gpus, held
):
    properties = SimpleNamespace(total_memory=10 * CONTEXT_BYTES)
    hold = Mock()
    out_of_memory = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 9 GiB"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", hold)
    monkeypatch.setattr(training, "fit_choices", Mock(side_effect=out_of_memory))
    run = make_run(StudyStore(tmp_path / "s").run("0123456789abcdef"), seed=0)
    task = task_of(run, tmp_path, gpus=gpus)
    end = execute_run(replace(task, device="cuda"))
    hold.assert_called_once_with(pytest.approx(held), 0)
    assert (end.state, end.transient) == ("failed", False)
    said = f"out of GPU memory ({out_of_memory}); a smaller training.micro_batch_size needs less"
    if gpus < 1:
        said += f", and a resources.gpus above its {gpus:g} of the GPU gives it more"
    assert end.message == said


@pytest.fixture
def keeper(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        keep = partial(Keeper, tmp_path / "c", [metrics], None, group=ALONE)
        yield partial(keep, every_sec=10.0)


def test_checkpoints_are_due_in_time_for_2_percent_of_it(keeper, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(side_tasks.time, "monotonic", lambda: clock[0])
    every = keeper()
    due = []
    for every._cost_sec, clock[0] in (
        (0.0, 0.0),
        (0.0, 10.0),
        (1.0, 49.9),
        (1.0, 50.1),
    ):
        due.append(every.due(1))
    assert due == [False, True, False, True]


def test_an_attempt_that_was_taken_over_writes_no_checkpoint(keeper, tmp_path):
    snapshot = Snapshot(step=3, tensors={"w": torch.ones(2)}, numbers={})
    for mine in (False, True):
        keeper(lease=SimpleNamespace(is_mine=lambda mine=mine: mine)).save(snapshot)
        assert (tmp_path / "c").exists() == mine
    assert load_newest(tmp_path / "c")[0].step == 3


def test_a_diagnosed_run_that_is_stopped_has_the_rows_and_the_result_of_one_that_is_not(
    tmp_path,
):
    def make(name, **more):
        run = make_run(RunDir(tmp_path / name), 1, 6)
        return run, replace(task_of(run, tmp_path), **more)

    diagnostics = {"diagnostics": Diagnostics(every_tokens=128, draws=2)}
    plain, task = make("plain")
    whole, diagnosed = make("whole", **diagnostics)
    assert execute_run(task).state == execute_run(diagnosed).state == "finished"
    assert not plain.diagnostics_path.exists()
    assert rows_in(whole.metrics_path) == rows_in(plain.metrics_path)
    assert {(row["step"], row["gemm"]) for row in rows_in(whole.diagnostics_path)} == {
        (step, gemm) for step in (0, 2, 4) for gemm in ("dgrad", "wgrad")
    }
    broken, task = make("broken", **diagnostics)
    for _ in range(3):
        task.stop_path.touch()
        assert execute_run(task).state == "interrupted"
    # what came after the checkpoint is cut, as metrics are
    with broken.diagnostics_path.open("a") as file:
        file.write('{"kind":"diagnosis","step":5}\n{"cut')
    task.stop_path.unlink()
    assert execute_run(task).state == "finished"
    assert rows_in(broken.metrics_path) == rows_in(plain.metrics_path)
    assert rows_in(broken.diagnostics_path) == rows_in(whole.diagnostics_path)


def test_the_record_says_why_steps_are_eager(tmp_path, monkeypatch):
    run = make_run(RunDir(tmp_path / "run"), 1, 2)
    assert execute_run(task_of(run, tmp_path)).state == "finished"
    assert run.environment()["step_eager_because"] == "there is no GPU"
    assert "step: eager, because there is no GPU\n" in run.attempt_log(1).read_text()
    monkeypatch.setattr(
        loop, "WholeSteps", lambda trainee, *_: WholeSteps(trainee, "unheard of")
    )
    graphed = make_run(RunDir(tmp_path / "graphed"), 1, 2)
    assert execute_run(task_of(graphed, tmp_path)).state == "finished"
    assert graphed.environment()["step_eager_because"] is None
