"""The scripts of ``examples/`` run as they stand, in a folder of their own."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as ``python NAME`` does, and return its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    return lambda name: runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_a_study_from_python(run, tmp_path):
    names = run("study_from_python.py")
    advice, runs, costs = names["advice"], names["study"].runs(), names["costs"]
    # The pilot's two runs are the study's own: the baseline reached the target where the pilot said.
    base = runs[runs["arm"] == "bf16"]
    assert base["tokens_to_target"].tolist() == list(advice.take.tokens.values())
    line = f"target: {{val_loss: {advice.take.val_loss:g}}}  # nats/token"
    assert (tmp_path / "from-python.yaml").read_text().count(line) == 1
    assert costs["hit"].tolist() == [2, 2]
    assert (
        costs.loc[costs["arm"] == "all three", "token_cost_kind"].item() == "interval"
    )
    assert len(names["study"].training()) > 4 * 10
    assert names["end"].report.exists()


@pytest.mark.exhaustive
def test_own_logs(run, tmp_path):
    names = run("own_logs.py")
    cost = names["costs"].loc["fp4"]
    # the truth that the logs were made of
    assert cost["token_cost_low"] < 0.15 < cost["token_cost_high"]
    assert names["same"].loc["fp4"].equals(cost)
    assert (tmp_path / "ablate-runs/own-csv/report/report.html").exists()


@pytest.mark.exhaustive
def test_a_script_with_hugging_faces_trainer_is_an_arm_of_a_study(tmp_path):
    study = str(EXAMPLES / "training_script/study.yaml")
    short = [
        "--set=base.training.tokens=81_920",
        "--set=target.val_loss=2.9",
        "--set=seeds=1",
    ]
    command = [
        sys.executable,
        "-m",
        "ablate",
        "run",
        study,
        "--storage",
        str(tmp_path),
        *short,
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    report = json.loads((tmp_path / "training-script/report/report.json").read_text())
    assert [arm["n"] for arm in report["arms"]] == [1] * 3
    losses = [[run["last_loss"] for run in arm["runs"]] for arm in report["arms"]]
    assert len(set(map(tuple, losses))) == 3
    assert report["timing"] == "command"
    assert len(report["markers"]) == 3  # each arm's recipe was applied
