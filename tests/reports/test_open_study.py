"""``ablate.open_study``: its frames hold the report's own figures."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import ablate
from ablate.base.errors import UserError


def plain(value):
    return None if pd.isna(value) else value


@pytest.fixture
def report(written):
    return written("wide")


def test_costs_and_runs_are_those_of_the_report(report):
    study = ablate.open_study(report.html.parents[1])
    arms = json.loads(report.json.read_text())["arms"]
    costs = study.costs()
    for arm, row in zip(arms, costs.to_dict("records"), strict=True):
        loss = arm["final_loss"]
        figures = {
            "tokens_to_target": arm["tokens_to_target"],
            "token_cost": arm["token_cost"],
            "final_loss": loss | {"estimate": loss["mean"]},
            "loss_difference": loss["difference"],
        }
        said = {f"{name}_{end}": part[end] for name, part in figures.items()
                for end in ("estimate", "low", "high")}  # fmt: skip
        said |= {"arm": arm["name"], "token_cost_kind": arm["token_cost"]["kind"]}
        said |= {name: arm[name] for name in ("n", "hit", "diverged")}
        assert {name: plain(row[name]) for name in said} == said
    assert costs["token_cost_estimate"].dtype == np.float64
    runs, listed = study.runs(), [run for arm in arms for run in arm["runs"]]
    names = {"run_id": "id"} | {name: name for name in ("end", "seed", "tokens_to_target", "last_loss")}
    for name, key in names.items():
        assert [plain(value) for value in runs[name]] == [run[key] for run in listed]
    assert set(runs["end"]) == {"hit", "censored", "diverged", "missing"}


def test_a_frame_is_the_callers_own_and_training_has_every_row(report):
    store = report.html.parents[1]
    study = ablate.open_study(store)
    curves = study.curves()
    curves["val_loss"] = 0.0
    assert study.curves()["val_loss"].min() > 0
    training = study.training()
    assert list(training.columns) == [
        "run_id", "arm", "seed", "tokens", "step", "loss_nats_per_token", "learning_rate", "gradient_norm",
        "tokens_per_sec",
    ]  # fmt: skip
    files = {path.parent.name: path.read_text() for path in store.glob("runs/*/metrics.jsonl")}
    rows = [(run, json.loads(line)) for run, text in files.items() for line in text.splitlines()]
    expected = {(run, row["tokens"]): row["loss"] for run, row in rows if row["kind"] == "train"}
    assert training.set_index(["run_id", "tokens"])["loss_nats_per_token"].to_dict() == expected


def test_what_is_not_there_or_damaged_is_one_line(report, make_study, tmp_path, monkeypatch):
    store = report.html.parents[1]
    monkeypatch.setenv("ABLATE_STORAGE", str(store.parent))
    assert len(ablate.open_study(store.name).runs()) == 60
    with pytest.raises(UserError, match=r"no study 'amd' in .* \(studies here: amd-ladder\)"):
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
        ("ablate.reports", "scipy.stats matplotlib.pyplot torch ray mlflow"),
    ],
)
def test_heavy_packages_are_loaded_where_they_are_needed(modules, light):
    code = f"import sys, {modules}; print(set(sys.modules) & set({light.split()}))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
