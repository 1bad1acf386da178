"""``run_study`` as a plain call; on real Ray: ``tests/test_end_to_end.py``."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from ablate.base.errors import UserError
from ablate.execute.driver import request_stop
from ablate.store import StudyStore
from ablate.workflow import Where
from ablate.workflow.run import run_study
from tests.cli.command import ablate
from tests.workflow.fakes import STUDY


@pytest.fixture
def where(tmp_path):
    (tmp_path / "tiny.yaml").write_text(STUDY.replace("seeds: 2", "seeds: [0, 7]"))
    return Where(storage=tmp_path / "runs")


def test_a_plain_call_says_nothing_and_returns_how_it_ended(executor, where, tmp_path, capfd):
    end = run_study("tiny.yaml", where, only=["fp4"])
    assert executor.calls[0] == [("fp4", 0), ("fp4", 7)]
    assert [*end.failed] == ["fp4 seed 7: no such luck"]
    assert (sorted(end.states), end.is_done) == (["failed", "finished"], False)
    assert end.report == where.storage / "tiny/report/report.html"
    end = run_study("tiny.yaml", where, seeds=[0])
    assert executor.calls[1] == [("bf16", 0)]
    assert (end.failed, end.is_done) == ({}, True)
    end = run_study("tiny.yaml", where, only=["fp4"])
    assert len(executor.calls) == 2  # nothing was left to run
    assert (end.failed, end.is_done) == ({}, False)  # it failed in an earlier call
    run_study("tiny.yaml", where, only=["fp4"], retry_failed=True)
    assert executor.calls[2] == [("fp4", 7)]
    assert capfd.readouterr().out == ""
    with pytest.raises(UserError, match=r"cannot write to .*tiny.yaml: Not a directory"):
        run_study("tiny.yaml", Where(storage=tmp_path / "tiny.yaml"))


def test_an_arm_whose_runs_diverge_is_stopped_and_goes_on_without_the_rule(executor, tmp_path):
    text = STUDY.replace("null", "{val_loss: 3.5}").replace("seeds: 2", "seeds: 4")
    (tmp_path / "tiny.yaml").write_text(text.replace("base:", "stop: {diverged: 2}\nbase:"))
    executor.end = lambda run: "diverged" if run.arm == "fp4" and run.config.seed < 2 else "finished"
    executor.stops_after = 4
    assert ablate("run", "tiny.yaml", cwd=tmp_path).code == 130
    assert sorted(executor.ran) == [(arm, seed) for arm in ("bf16", "fp4") for seed in (0, 1)]
    assert [*executor.unneeded().values()] == ["2 of its runs have diverged"] * 2
    executor.stops_after = 1_000_000
    again = ablate("run", "tiny.yaml", cwd=tmp_path)
    assert again.code == 0, again
    assert "2 to run, 4 of those asked for have ended before, 2 are not needed" in again.out
    report = json.loads((tmp_path / "runs/tiny/report/report.json").read_text())
    bad = report["arms"][1]
    assert (bad["stopped"]["kind"], bad["n"], bad["diverged"], report["runs_missing"]) == (
        "diverged",
        2,
        2,
        0,
    )
    assert report["stop"]["tokens_saved"] == bad["stopped"]["tokens_saved"] > 0
    (tmp_path / "tiny.yaml").write_text(text)
    assert "2 to run" in ablate("run", "tiny.yaml", cwd=tmp_path).out
    assert executor.calls[-1] == [("fp4", 2), ("fp4", 3)]


def test_seeds_until_settled_begin_when_a_look_has_asked_for_them(executor, tmp_path):
    text = STUDY.replace("null", "{val_loss: 2.6}").replace("seeds: 2", "seeds: {until: settled, at_most: 4}")
    # Of equal losses there is no interval: such an arm is never settled.
    (tmp_path / "tiny.yaml").write_text(text + "  like: {recipe: fp8}\n")

    def loss(run, tokens):
        bad = run.arm == "fp4"
        pace = (0.6 if bad else 1.0) * (1 + 0.01 * Random(f"{run.config.seed} {bad}").random())
        return 4.0 - 0.15 * pace * tokens / 1024

    executor.loss = loss
    done = ablate("run", "tiny.yaml", cwd=tmp_path)
    assert done.code == 0, done
    assert re.findall(r"(\d+) to run, ", done.out) == ["6", "2", "2"]
    assert executor.calls[1:] == [[("bf16", seed), ("like", seed)] for seed in (2, 3)]
    store = StudyStore(tmp_path / "runs/tiny")
    (bad,) = [arm for arm in store.plan().arms if arm.name == "fp4"]
    said = [store.run(run.id).status() for run in bad.runs]
    assert [one.state for one in said] == ["finished", "finished", "stopped", "stopped"]
    assert "settled after 2 of at most 4 seeds" in said[3].message
    report = json.loads((store.path / "report/report.json").read_text())
    assert {arm["name"]: arm["n"] for arm in report["arms"]} == {"bf16": 4, "fp4": 2, "like": 4}
    assert (report["arms"][1]["stopped"]["kind"], report["runs_missing"]) == ("settled", 0)
    assert "0 to run" in ablate("run", "tiny.yaml", cwd=tmp_path).out


def test_a_cancelled_study_begins_no_more_seeds(executor, tmp_path):
    text = STUDY.replace("null", "{val_loss: 2.6}").replace("seeds: 2", "seeds: {until: settled, at_most: 4}")
    (tmp_path / "tiny.yaml").write_text(text)
    executor.begins = lambda store: request_stop(store.path)
    assert ablate("run", "tiny.yaml", cwd=tmp_path).code == 130
    assert len(executor.calls) == 1
