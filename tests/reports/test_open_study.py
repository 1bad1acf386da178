"""``ablate.open_study``: its frames hold the report's own figures."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import ablate
from ablate.base.errors import UserError
from ablate.reports import write_report

INTERVALS = ("tokens_to_target", "token_cost")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    from synthetic_study import wide_study

    return wide_study(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def report(store):
    return write_report(store)


def same(found, expected):
    return (pd.isna(found) and expected is None) or found == expected


def test_costs_are_those_of_the_report(store, report):
    costs = ablate.open_study(store.path).costs().set_index("arm")
    arms = json.loads(report.json.read_text())["arms"]
    assert list(costs.index) == [arm["name"] for arm in arms]
    for arm in arms:
        row = costs.loc[arm["name"]]
        assert (row["n"], row["hit"], row["diverged"]) == (arm["n"], arm["hit"], arm["diverged"])
        assert row["token_cost_kind"] == arm["token_cost"]["kind"]
        for name in INTERVALS:
            for end in ("estimate", "low", "high"):
                assert same(row[f"{name}_{end}"], arm[name][end])
        assert same(row["final_loss_estimate"], arm["final_loss"]["mean"])
        difference = arm["final_loss"]["difference"]
        assert same(row["loss_difference_low"], difference["low"])
        assert same(row["loss_difference_tokens"], difference["tokens"])
    assert costs["token_cost_estimate"].dtype == np.float64


def test_runs_are_those_of_the_report(store, report):
    runs = ablate.open_study(store.path).runs()
    with (report.tables / "runs.csv").open() as file:
        assert list(runs.columns) == next(csv.reader(file))
    listed = [run for arm in json.loads(report.json.read_text())["arms"] for run in arm["runs"]]
    assert runs["run_id"].tolist() == [run["id"] for run in listed]
    assert runs["end"].tolist() == [run["end"] for run in listed]
    assert set(runs["end"]) == {"hit", "censored", "diverged", "missing"}
    assert all(map(same, runs["tokens_to_target"], (run["tokens_to_target"] for run in listed)))
    assert runs["last_loss"].dtype == np.float64


def test_curves_are_the_evaluations(store, report):
    study = ablate.open_study(store.path)
    curves = study.curves()
    pd.testing.assert_frame_equal(curves, pd.read_csv(report.tables / "evaluations.csv"), check_dtype=False)
    curves["val_loss"] = 0.0
    assert study.curves()["val_loss"].min() > 0


def test_training_has_every_row_of_every_run_with_units_in_the_names(store):
    study = ablate.open_study(store.path)
    training = study.training()
    assert list(training.columns) == [
        "run_id", "arm", "seed", "tokens", "step", "loss_nats_per_token", "learning_rate", "gradient_norm",
        "tokens_per_sec",
    ]  # fmt: skip
    files = {path.parent.name: path.read_text() for path in store.path.glob("runs/*/metrics.jsonl")}
    written = [(run, json.loads(line)) for run, text in files.items() for line in text.splitlines()]
    expected = {(run, row["tokens"]): row["loss"] for run, row in written if row["kind"] == "train"}
    found = training.set_index(["run_id", "tokens"])["loss_nats_per_token"]
    assert found.to_dict() == expected
    assert training["run_id"].drop_duplicates().tolist() == [
        run for run in study.runs()["run_id"] if run in files
    ]  # fmt: skip


def test_a_study_is_found_by_its_name(store, monkeypatch):
    name, storage = store.path.name, store.path.parent
    assert len(ablate.open_study(name, storage=storage).runs()) == 60
    monkeypatch.setenv("ABLATE_STORAGE", str(storage))
    assert ablate.open_study(name).faults == ()


def test_what_is_not_there_or_damaged_is_one_line(store, make_study, tmp_path):
    with pytest.raises(UserError, match=r"no study 'amd' in .* \(studies here: amd-ladder\)"):
        ablate.open_study("amd", storage=store.path.parent)
    with pytest.raises(UserError, match="no study has run there yet"):
        ablate.open_study(tmp_path / "nothing", storage=tmp_path / "empty")
    damaged = make_study({"a": [[(100, 2.0)]]})
    damaged.plan_path.write_text("{")
    with pytest.raises(UserError, match=r"plan\.lock\.json: not a plan"):
        ablate.open_study(damaged.path)


def test_importing_the_package_loads_no_pandas():
    code = "import sys, ablate; sys.exit('pandas' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
