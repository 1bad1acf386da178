"""The scripts of ``examples/`` run as they stand, in a folder of their own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from ablate.base.files import append_line
from ablate.data import load, open_tokens
from ablate.execute import driver
from ablate.execute.queue import ExecutionEnd
from ablate.store import Status
from ablate.train import train
from tests.workflow.fakes import without_mlflow

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as ``python NAME`` does, and return its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    return lambda name: runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture
def trained(monkeypatch):
    """Train runs in this process, without Ray's start and MLflow's; returns the ids of those trained."""
    ids = []

    def execute_study(store, runs, **_options):
        for request in runs:
            run = store.run(request.run_id)
            run.create(asdict(request.config))
            note = partial(append_line, run.metrics_path)
            state = train(request.config, note, tokens=open_tokens(load(request.tokens_dir))).state
            run.write_status(Status(state=state, attempt=1))
            ids.append(request.run_id)
        states = dict.fromkeys((run.run_id for run in runs), "finished")
        return ExecutionEnd(states=states, interrupted=False)

    monkeypatch.setattr(driver, "execute_study", execute_study)
    without_mlflow(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of tiny steps wait for each other on a busy machine
    yield ids
    torch.set_num_threads(threads)


def check_study(names, folder):
    advice, runs, costs = names["advice"], names["study"].runs(), names["costs"]
    # The pilot's two runs are the study's own: the baseline reached the target where the pilot said.
    base = runs[runs["arm"] == "bf16"]
    assert base["tokens_to_target"].tolist() == list(advice.take.tokens.values())
    line = f"target: {{val_loss: {advice.take.val_loss:g}}}  # nats per token"
    assert (folder / "from-python.yaml").read_text().count(line) == 1
    assert costs["hit"].tolist() == [2, 2]
    assert costs.loc[costs["arm"] == "all three", "token_cost_kind"].item() == "interval"
    assert len(names["study"].training()) > 4 * 10
    assert names["end"].report.exists()


def test_a_study_from_python(run, trained, tmp_path):
    check_study(run("study_from_python.py"), tmp_path)
    assert len(trained) == len(set(trained)) == 4


@pytest.mark.exhaustive
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("local_ray")
def test_a_study_from_python_on_ray(run, tmp_path):
    check_study(run("study_from_python.py"), tmp_path)
    assert len(list(tmp_path.glob("ablate-runs/from-python/runs/*/attempts/*.json"))) == 4


@pytest.mark.exhaustive
def test_own_logs(run, tmp_path):
    names = run("own_logs.py")
    cost = names["costs"].loc["fp4"]
    assert cost["token_cost_low"] < 0.15 < cost["token_cost_high"]  # the truth that the logs were made of
    assert names["same"].loc["fp4"].equals(cost)
    assert (tmp_path / "ablate-runs/own-csv/report/report.html").exists()


@pytest.mark.exhaustive
def test_a_script_with_hugging_faces_trainer_is_an_arm_of_a_study(tmp_path):
    study = str(EXAMPLES / "training_script/study.yaml")
    short = ["--set", "base.training.tokens=81_920", "--set", "target.val_loss=2.9"]
    command = [sys.executable, "-m", "ablate", "run", study, "--storage", str(tmp_path), *short]
    subprocess.run(command, check=True, cwd=tmp_path)
    report = json.loads((tmp_path / "training-script/report/report.json").read_text())
    assert [arm["n"] for arm in report["arms"]] == [2] * 3
    losses = [[run["last_loss"] for run in arm["runs"]] for arm in report["arms"]]
    assert len(set(map(tuple, losses))) == 3
    assert report["timing"] == "command"
    assert len(report["markers"]) == 3  # each arm's recipe was applied
