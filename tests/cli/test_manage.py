"""The verbs that look after a study: status, logs, cancel, clean."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.cli import cli, manage
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun, Target
from ablate.store.runs import is_running, running

IDS = ["00aa000000000000", "00bb000000000000"]


@pytest.fixture
def store(tmp_path):
    """A study with a finished run and one that was never started."""
    store = StudyStore(tmp_path / "s")
    runs = tuple(LockedRun(id=run_id, seed=seed) for seed, run_id in enumerate(IDS))
    arms = (LockedArm(name="bf16", recipe="bf16", tokens=10, runs=runs),)
    target = Target(kind="val_loss", value=2.0)
    store.write_plan(LockedPlan(study="s", baseline="bf16", target=target, arms=arms))
    store.run(IDS[1]).create({})
    run = store.run(IDS[0])
    run.create({"model": {}, "training": {}, "seed": 0})
    first = Leases(run.attempts).claim()
    run.attempt_log(1).write_text("first\n")
    first.end("interrupted", "preempted (SIGTERM)")
    second = Leases(run.attempts).claim()
    second.note(fingerprint="a1b2", resumed_from_step=40)
    run.attempt_log(2).write_text("second\x1b[31m\n")
    row = {"kind": "eval", "tokens": 10, "step": 1, "time_unix": 1.7e9, "val_loss": 1.5}
    append_line(run.metrics_path, row)
    second.end("finished")
    run.write_status(Status(state="finished", attempt=2, tokens=10, started_unix=1.7e9, ended_unix=1.7e9))
    return store


@pytest.fixture
def call(store):
    def call(*words, **options):
        command = [*words, "--storage", str(store.path.parent)]
        return CliRunner().invoke(cli, command, catch_exceptions=False, **options).output

    return call


def test_logs_show_the_ledger_and_the_last_attempt(store, call):
    output = call("logs", "00aa")
    for said in ("attempt 1: interrupted", "preempted (SIGTERM)", "attempt 2: finished", "from step 40"):
        assert said in output
    assert output.endswith("second\\x1b[31m\n")  # a log must not steer the terminal
    assert call("logs", "00aa", "--attempt", "1").endswith("first\n")
    store.run(IDS[0]).attempt_log(1).write_text("")
    assert call("logs", "00aa", "--attempt", "1").endswith("\n\nAttempt 1 printed nothing.\n")
    (other := store.path.parent / "t" / "runs" / IDS[0]).mkdir(parents=True)
    both = f"'00aa' begins 2 runs' ids: {store.run(IDS[0]).path}, {other}"
    for words, line in (
        (["00aa"], both),
        (["0"], "'0' begins 3 runs' ids: "),
        (["00bb"], f"run {IDS[1]} has not been started yet"),
        (["00aa", "--study", "s", "--attempt", "7"], "has 2 (expected 1 to 2)"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            call("logs", *words)
    assert "attempt 2: finished" in call("logs", "00aa", "--study", "s")


def test_logs_follow_to_the_end(store, call, monkeypatch):
    run = store.run(IDS[1])
    lease = Leases(run.attempts).claim()
    log = run.attempt_log(1)
    log.write_text("one\n")

    def go_on(_seconds):
        with log.open("a") as file:
            file.write("two\n")
        lease.end("finished")

    monkeypatch.setattr(manage, "time", SimpleNamespace(sleep=go_on))
    assert call("logs", "00bb", "--follow").endswith("one\ntwo\n")


def test_cancel_asks_only_where_somebody_runs_it(store, call):
    assert "is not being run" in call("cancel", "s")
    assert not (store.path / "cancel").exists()
    with running(store, store.plan()):
        assert "Asked to stop" in call("cancel", "s")
    assert (store.path / "cancel").exists()


def test_clean_asks_and_takes_what_is_its_own_alone(store, call):
    run, gone, own = store.run(IDS[0]), store.run("0123456789abcdef"), store.path / "runs" / "my notes"
    gone.create({})
    for folder in (run.checkpoints, run.weights, run.path / ".weights.123", own):
        folder.mkdir()
    ours = [run.checkpoints / "1.json", run.path / ".status.json.x1", store.path / ".stop-1234"]
    theirs = [own / "a.txt", run.path / ".nfs123", run.weights / "model.safetensors"]
    for path in (*ours, *theirs):
        path.write_text("something")
    (link := store.path / "runs" / "fedcba9876543210").symlink_to(own)
    said = call("clean", "s", "--dry-run")
    for why in ("a run that the plan no longer has", "left by a write that was cut off"):
        assert why in said
    call("clean", "s", input="n\n")
    assert all(path.exists() for path in (gone.path, *ours))
    assert "Removed 5." in call("clean", "s", input="y\n")
    assert not any(path.exists() for path in (gone.path, *ours))
    assert link.is_symlink()
    assert all(path.read_text() == "something" for path in theirs)
    assert [row["val_loss"] for row in run.metrics()] == [1.5]
    assert call("clean", "s") == "Nothing to remove.\n"
    assert "the weights of a run" in call("clean", "s", "--weights", "--yes")
    assert not run.weights.exists()


def test_clean_keeps_what_a_run_may_go_on_from(store, call):
    run = store.run(IDS[1])
    run.checkpoints.mkdir()
    (store.prefixes / "key").mkdir(parents=True)
    run.write_status(Status(state="stopped", tokens=5, message="not needed"))
    assert call("clean", "s") == "Nothing to remove.\n"
    run.stop_path.write_text("not needed")  # its executor was killed before it saw this
    assert "Removed 1." in call("clean", "s", "--yes")
    assert not run.stop_path.exists()
    assert run.checkpoints.exists()
    run.write_status(Status(state="finished"))
    assert "states that runs had in common" in call("clean", "s", "--yes")
    assert not store.prefixes.exists()
    assert not run.checkpoints.exists()


def test_clean_of_the_whole_study(store, call, monkeypatch):
    for name in ("thesis.tex", ".git", "runs/notes", "runs/.hidden", "report/mine.csv"):
        mine = store.path / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(UserError, match=f"{mine.name} is not ablate's: move it away first"):
            call("clean", "s", "--whole", "--yes")
        assert mine.read_text() == "mine"
        mine.unlink()
    store.throughput_path.write_text("{}")
    stop = rf"is being run \(stop it first: ablate cancel s --storage {store.path.parent}\)$"
    with running(store, store.plan()), pytest.raises(UserError, match=stop):
        call("clean", "s", "--whole", "--yes")
    seen = []
    # Somebody holds its lock while it asks: who starts it waits.
    monkeypatch.setattr(manage.click, "confirm", lambda *_: seen.append(is_running(store.path)) or True)
    call("clean", "s", "--whole")
    assert seen == [True]
    assert not store.path.exists()


def test_a_large_study_is_shown_arm_by_arm_and_its_runs_when_asked_for(store, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan = store.plan()
    arm = replace(plan.arms[0], name="all three GEMMs with a deterministic Hadamard")
    store.write_plan(replace(plan, arms=(arm,), baseline=arm.name))
    shown = call("status", "s")  # a name may wrap, an id may not be cut
    assert max(map(len, shown.splitlines())) <= 80
    assert [line.split()[0] for line in shown.splitlines() if "/10" in line] == [name[:8] for name in IDS]
    monkeypatch.setattr(manage, "_MOST_RUNS", 1)
    assert re.search(r"Hadamard +1 of 2 done · 1 pending +10/20\n", call("status", "s"))
    assert call("status", "s", "--runs") == shown


def test_status_says_why_a_run_was_stopped_or_is_damaged(store, call):
    path = store.run(IDS[0]).metrics_path
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.4"))
    store.run(IDS[1]).write_status(Status(state="stopped", tokens=5, message="above 10 % at 3 seeds"))
    shown = call("status", "s")
    assert "bf16 seed 0 damaged: metrics.jsonl: altered or cut since the run ended" in shown
    assert "bf16 seed 1 stopped: above 10 % at 3 seeds" in shown
    assert "s: 0 of 2 done · 1 stopped · 1 damaged · not being run" in shown
    content = json.loads(call("status", "s", "--json"))
    assert (content["states"], content["ends"]) == ({"damaged": 1, "stopped": 1}, None)
