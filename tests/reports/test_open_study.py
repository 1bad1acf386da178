"""``ablate.open_study``: its frames hold the report's own figures."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from texts import check_text

import ablate
from ablate.base.errors import UserError
from ablate.results.frames import TRAINING


@pytest.fixture
def report(written):
    return written("wide")


def test_costs_and_runs_are_those_of_the_report(report):
    study = ablate.open_study(report.html.parents[1])
    costs = study.costs()
    runs = study.runs()
    frames = (costs, runs.drop(columns="run_id"))
    texts = [frame.to_csv(index=False, float_format="%.6g") for frame in frames]
    check_text("frames", "\n".join(texts))
    arms = json.loads(report.json.read_text())["arms"]
    assert costs["token_cost_estimate"].dtype == np.float64
    assert list(runs["run_id"]) == [run["id"] for arm in arms for run in arm["runs"]]


def test_a_frame_is_the_callers_own_and_training_has_every_row(report):
    store = report.html.parents[1]
    study = ablate.open_study(store)
    curves = study.curves()
    curves["val_loss"] = 0.0
    assert study.curves()["val_loss"].min() > 0
    training = study.training()
    path = next(store.glob("runs/*/metrics.jsonl"))
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            rows.append([row[key] for key in TRAINING])
    of_run = training[training["run_id"] == path.parent.name]
    assert of_run.iloc[:, 3:].to_numpy().tolist() == rows


def test_a_loss_in_training_is_named_by_no_unit_where_the_log_may_have_another(
    make_study,
):
    study = ablate.open_study(make_study({"a": [[(100, 2.0)]]}, loss_unit="bits").path)
    assert study.loss_unit == "bits/token"
    assert list(study.training()["loss"]) == [2.02]


def test_what_is_not_there_or_damaged_is_one_line(
    report, make_study, tmp_path, monkeypatch
):
    store = report.html.parents[1]
    monkeypatch.setenv("ABLATE_STORAGE", str(store.parent))
    assert len(ablate.open_study(store.name).runs()) == 60
    with pytest.raises(
        UserError, match=r"no study 'amd' in .* \(studies here: amd-ladder\)"
    ):
        ablate.open_study("amd", storage=store.parent)
    with pytest.raises(UserError, match="no study has run there yet"):
        ablate.open_study(tmp_path / "nothing", storage=tmp_path / "empty")
    damaged = make_study({"a": [[(100, 2.0)]]})
    damaged.plan_path.write_text("{")
    with pytest.raises(UserError, match=r"plan\.lock\.json: not a plan"):
        ablate.open_study(damaged.path)


@pytest.mark.parametrize(
    ("modules", "light"),
    [
        ("ablate", "pandas pydantic"),
        ("ablate.cli, ablate.cli.report", "pandas scipy matplotlib numpy jinja2"),
        ("ablate.track.process, ablate.cli.report", "mlflow"),
        (
            "ablate.train, ablate.execute.worker",
            "ray mlflow ruamel yaml optuna pandas matplotlib",
        ),
        ("ablate.reports", "scipy.stats matplotlib.pyplot torch ray mlflow"),
    ],
)
def test_heavy_packages_are_loaded_where_they_are_needed(modules, light):
    code = f"import sys, {modules}; print(set(sys.modules) & set({light.split()}))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
