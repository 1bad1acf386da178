"""``ablate search`` whole: Ray, the front, an interruption at any moment, what it is refused for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.search.engine import TrialResult
from ablate.search.halving import dominates, search_grid
from ablate.search.ledger import Ledger, open_storage
from ablate.search.plan import plan_search
from ablate.search.recipes import tried_plan
from ablate.search.spaces import candidate_of
from ablate.store import StudyStore
from ablate.store.runs import running
from ablate.study import load_study
from tests.cli.command import ablate
from tests.waiting import wait_until

SEARCH = """\
name: s
description: A "search" with <odd> characters | and a bar
baseline: bf16
target: {val_loss: 2.0}
base:
  model: {width: 64, layers: 2, heads: 2, ffn: 192}
  training: {eval_every_tokens: 20_000, eval_tokens: 8192}
  trainer: searched.py:run
arms:
  bf16: {recipe: bf16}
  tseng: {recipe: tseng}
grid:
  senseless: drop
  factors:
    recipe.gemms: {none: [], F: [fprop], D: [dgrad], F+D+W: [fprop, dgrad, wgrad]}
    recipe.stabiliser: [none, sr]
search: {hardware: B200, shapes: llama-8b, trials: 8, budgets: [40_000, 80_000], at_once: 3}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "s.yaml").write_text(SEARCH)
    shutil.copy(Path(__file__).parent / "searched.py", tmp_path)
    return tmp_path


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "ablate", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"ABLATE_STORAGE": "runs"},
    )  # fmt: skip


def call(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate()
    assert "Traceback" not in err, err
    return process.returncode, out, err


def ledger(folder, name):
    return Ledger(
        open_storage(None, folder / "runs" / "s"), f"s @ {name} tokens", ("loss", "step time")
    ).trials()


def trained(folder):
    path = folder / "trained"
    return path.read_text().count("\n") if path.exists() else 0


def check_trials(folder):
    """Compare the ledgers with those of a search in memory that came to the same results."""
    ours = [ledger(folder, budget) for budget in ("40k", "80k")]
    came_to = {
        (t.user_attrs["tokens"], t.user_attrs["candidate"]): TrialResult(values=t.values)
        for one in ours
        for t in one
    }
    plan = plan_search(load_study(folder / "s.yaml")).halving
    storage = optuna.storages.InMemoryStorage()
    search_grid(
        plan,
        storage,
        lambda asked: [came_to[t.user_attrs["tokens"], candidate_of(t)] for t in trials_of(asked)],
    )
    places = [
        [
            [(t.number, t.params, t.user_attrs["candidate"], t.user_attrs["round"]) for t in one]
            for one in budgets
        ]
        for budgets in (ours, plan.read(storage))
    ]
    assert places[0] == places[1]
    assert len(came_to) == sum(map(len, ours))


def trials_of(asked):
    return [one.trial for one in asked]


@pytest.mark.exhaustive
def test_a_search_killed_and_gone_on_with_to_the_study_that_confirms_it(folder, monkeypatch):
    (folder / "slow").touch()
    process = start(folder, "search", "s.yaml")
    wait_until(lambda: trained(folder) >= 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert {trial.state.name for trial in ledger(folder, "40k")} == {"RUNNING", "COMPLETE"}
    (folder / "slow").unlink()
    time.sleep(2)
    code, out, _ = call(folder, "search", "s.yaml")
    assert code == 0, out
    assert "Round 3 at 40k tokens: trials 7–8 of 8" in out
    check_trials(folder)
    found = json.loads((folder / "runs/s/search/search.json").read_text())
    assert found["done"]
    tried = found["budgets"][0]["trials"]
    assert len({trial["recipe"] for trial in tried}) == 8  # of 8: bf16, tseng and three GEMMs × two
    times = {trial["recipe"]: trial["step_time_over_baseline"] for trial in tried}
    losses = {trial["recipe"]: trial["loss"] for trial in tried}
    points = {name: (losses[name], times[name]) for name in times}
    better = {name for name, one in points.items() if not any(dominates(o, one) for o in points.values())}
    assert {trial["recipe"] for trial in tried if trial["on_front"]} == better
    assert "F none" not in better
    assert "F sr" in better
    assert found["front"][-1] == "bf16"

    lock = json.loads((folder / "runs/s/plan.lock.json").read_text())
    assert [arm["name"] for arm in lock["arms"]][:3] == ["bf16 @ 40k", "tseng @ 40k", lock["arms"][2]["name"]]
    assert len(lock["arms"]) == len(tried) + len(found["budgets"][1]["trials"])
    assert trained(folder) <= len(lock["arms"]) + 3  # what was killed in the middle is run again

    monkeypatch.chdir(folder)
    confirm = json.loads(invoke(folder, "plan", "runs/s/search/confirm.yaml", "--json").stdout)
    assert {arm["name"] for arm in confirm["arms"]} == {*found["front"], "bf16"}
    assert [run["seed"] for run in confirm["arms"][0]["runs"]] == [1001, 1002, 1003, 1004, 1005]
    searched = {trial["recipe"]: trial["gemms"] for trial in found["budgets"][1]["trials"]}
    assert all(arm["recipe"] == searched[arm["name"]] for arm in confirm["arms"])
    assert all(arm["tokens"] == 81_920 for arm in confirm["arms"])
    assert f"{len(lock['arms'])} of {len(lock['arms'])} done" in invoke(folder, "status", "s.yaml").output

    before, count = [ledger(folder, budget) for budget in ("40k", "80k")], trained(folder)
    code, again, _ = call(folder, "search", "s.yaml", "--json")
    assert code == 0
    assert json.loads(again) == found
    assert [ledger(folder, budget) for budget in ("40k", "80k")] == before
    assert trained(folder) == count
    assert (folder / "runs" / "mlflow.db").exists()


@pytest.mark.exhaustive
def test_ctrl_c_keeps_the_open_round(folder):
    (folder / "slow").touch()
    process = start(folder, "search", "s.yaml")
    wait_until(lambda: list(folder.glob("runs/s/runs/*/attempts/1.json")), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, out + err
    assert "go on with: ablate search s.yaml" in out
    assert {trial.state.name for trial in ledger(folder, "40k")} == {"RUNNING"}
    assert (folder / "runs/s/search/search.html").exists()
    assert not (folder / "runs/s/search/confirm.yaml").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_a_failed_recipe_is_left_out_and_said(folder):
    (folder / "broken").touch()
    done = ablate("search", "s.yaml", cwd=folder)
    assert done.code == 0, done
    assert "Failed: tseng: ValueError: no such luck" in done.out
    assert {trial.state.name for trial in ledger(folder, "40k")} == {"COMPLETE", "FAIL"}
    found = json.loads((folder / "runs/s/search/search.json").read_text())
    assert {t["recipe"] for t in found["budgets"][1]["trials"]} <= {"bf16", "F none", "F sr"}


def invoke(folder, *arguments):
    return CliRunner().invoke(cli, [*arguments, "--storage", str(folder / "runs")], catch_exceptions=True)


def test_the_plan_starts_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = invoke(folder, "search", "s.yaml", "--plan")
    assert shown.exit_code == 0
    assert re.search(r"\ntseng +Fprop bf16; .* 0.784× +first\n", shown.output)
    assert "rounds     3 at the first budget; 655,360 tokens at most" in shown.output
    assert "none sr: stabiliser 'sr' with no FP4 GEMM to act on" in shown.output
    plain = json.loads(invoke(folder, "search", "s.yaml", "--plan", "--json").output)
    assert plain["first"] == ["bf16", "tseng"]
    assert plain["tokens"] == 8 * 40_960 + 4 * 81_920
    assert not (folder / "runs").exists()


def test_what_is_refused_is_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for verb in ("run", "plan", "throughput"):
        error = invoke(folder, verb, "s.yaml").exception
        assert isinstance(error, UserError)
        assert str(error).endswith("s.yaml:17:9: a search, not a study (start it with: ablate search)")
    assert "a search is no job yet" in str(invoke(folder, "submit", "s.yaml", "--address", "x").exception)
    assert "start it with: ablate search s.yaml" in str(invoke(folder, "status", "s.yaml").exception)
    (folder / "study.yaml").write_text(SEARCH.split("search:", maxsplit=1)[0])
    assert "start it with: ablate run study.yaml" in str(invoke(folder, "search", "study.yaml").exception)
    store = StudyStore(folder / "runs" / "s")
    with running(store, tried_plan(plan_search(load_study("s.yaml")), ())):
        held = invoke(folder, "search", "s.yaml").exception
        assert "is being run by another process" in str(held)
    shutil.rmtree(store.path)
    (store.path / "runs").mkdir(parents=True)
    assert "holds a study of this name" in str(invoke(folder, "search", "s.yaml").exception)


def test_ctrl_c_ends_it_from_its_first_import_on(folder, monkeypatch):
    seen = []

    def load(_):
        seen.append(signal.getsignal(signal.SIGINT).__qualname__)
        raise UserError("seen")

    monkeypatch.setattr("ablate.study.load_study", load)
    assert ablate("search", "s.yaml", cwd=folder).line == "seen"
    assert seen[0].startswith("ended_by_ctrl_c")
