"""The verbs that look after a study: status, logs, cancel, clean."""

import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from ablate.base.files import write_json_atomic, write_record
from ablate.cli import manage
from ablate.store import Status
from ablate.store.leases import Leases
from ablate.store.study_lock import is_running, running
from ablate.track.cursor import Cursor, RunCursor, cursor_path
from ablate.track.sink import Sink, default_tracking_uri
from tests.cli.command import ablate
from tests.cli.stored import IDS, make_store


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "runs")


@pytest.fixture
def call(tmp_path):
    return lambda *words: ablate(*words, cwd=tmp_path)


def test_logs_follow_to_the_end(store, call, monkeypatch):
    run = store.run(IDS[1])
    lease = Leases(run.attempts).claim()
    log = run.attempt_log(1)
    log.write_text("")
    assert call("logs 00bb").out.endswith("\n\nAttempt 1 printed nothing.\n")
    log.write_text("one\n")

    def go_on(_seconds):
        with log.open("a") as file:
            file.write("two\n")
        lease.end("finished")

    monkeypatch.setattr(manage, "time", SimpleNamespace(sleep=go_on))
    assert call("logs 00bb --follow").out.endswith("\n\none\ntwo\n")


def test_logs_name_what_was_left_out(store, call):
    run = store.run(IDS[1])
    Leases(run.attempts).claim()
    with run.attempt_log(1).open("wb") as file:
        file.write(b"first\n")
        file.seek(3 << 20)
        file.write("zuletzt: größer\n".encode())
    assert call("logs 00bb").out.endswith(
        "\n\nfirst\n\n[… 2 MiB left out …]\nzuletzt: größer\n"
    )


def test_status_says_why_steps_on_a_gpu_are_eager(store, call):
    for gpu, shown in (("NVIDIA H200", True), (None, False)):
        record = {"gpu": gpu, "step_eager_because": "diagnostics observe the steps"}
        write_record(store.run(IDS[1]).environment_path, record)
        line = "bf16 seed 1 step: eager, because diagnostics observe the steps\n"
        assert (line in call("status s").out) is shown


def test_cancel_asks_only_where_somebody_runs_it(store, call):
    with running(store, store.plan()):
        assert "Asked to stop" in call("cancel s").out
    (store.path / "cancel").unlink()
    assert "is not being run" in call("cancel s").out
    assert not (store.path / "cancel").exists()


def test_clean_asks_and_takes_what_is_its_own_alone(store, call, monkeypatch):
    run = store.run(IDS[0])
    gone = store.run("0123456789abcdef")
    own = store.path / "runs" / "my notes"
    gone.create({})
    for folder in (run.checkpoints, run.weights, own):
        folder.mkdir()
    theirs = [own / "a.txt", run.path / ".nfs123", run.weights / "model.safetensors"]
    for path in theirs:
        path.write_text("something")
    link = store.path / "runs" / "fedcba9876543210"
    link.symlink_to(own)
    monkeypatch.setattr(manage.click, "confirm", lambda *_: False)
    call("clean s")
    assert gone.path.exists()
    monkeypatch.setattr(manage.click, "confirm", lambda *_: True)
    assert "Removed 2." in call("clean s").out
    assert not gone.path.exists()
    assert link.is_symlink()
    assert all(path.read_text() == "something" for path in theirs)
    call("clean s --weights --yes")
    assert not run.weights.exists()


def test_clean_takes_the_states_in_common_once_no_run_may_go_on_from_them(store, call):
    run = store.run(IDS[1])
    run.checkpoints.mkdir()
    (store.prefixes / "key").mkdir(parents=True)
    run.write_status(Status(state="stopped", tokens=5, message="not needed"))
    assert call("clean s --yes").out == "Nothing to remove.\n"
    run.write_status(Status(state="finished"))
    assert "states that runs had in common" in call("clean s --yes").out
    assert not store.prefixes.exists()
    assert not run.checkpoints.exists()


def test_clean_of_the_whole_study(store, call, monkeypatch):
    whole = "clean s --whole"
    for name in ("thesis.tex", ".git", "runs/notes", "runs/.hidden", "report/mine.csv"):
        mine = store.path / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        refused = call(f"{whole} --yes").line
        assert refused.endswith(f"{mine.name} is not ablate's: move it away first")
        assert mine.read_text() == "mine"
        mine.unlink()
    store.throughput_path.write_text("{}")
    with running(store, store.plan()):
        refused = call(f"{whole} --yes").line
    assert refused.endswith("is being run (stop it first: ablate cancel s)")
    path = cursor_path(store, default_tracking_uri(store.path.parent))
    path.parent.mkdir()
    write_json_atomic(path, asdict(Cursor(runs={"r": RunCursor(mlflow_id="7")})))
    shown = call(f"{whole} --dry-run").out
    assert "has 1 runs of it, which stay there (--mlflow removes them)" in shown
    gone = []
    monkeypatch.setattr(Sink, "delete_run", lambda _, run: gone.append(run))
    # Its lock is held while it asks: who starts it waits.
    monkeypatch.setattr(manage.click, "confirm", lambda *_: is_running(store.path))
    call(f"{whole} --mlflow")
    assert gone == ["7"]
    assert not store.path.exists()


def test_a_large_study_is_shown_arm_by_arm_and_its_runs_when_asked_for(
    store, call, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    plan = store.plan()
    arm = replace(plan.arms[0], name="all three GEMMs with a deterministic Hadamard")
    store.write_plan(replace(plan, arms=(arm,), baseline=arm.name))
    shown = call("status s").out  # a name may wrap, an id may not be cut
    assert max(map(len, shown.splitlines())) <= 80
    assert re.findall(r"^(\w{8}) .*/10", shown, re.MULTILINE) == [
        IDS[0][:8],
        IDS[1][:8],
    ]
    monkeypatch.setattr(manage, "_MOST_RUNS", 1)
    by_arm = call("status s").out
    assert re.search(r"Hadamard +1 of 2 done · 1 pending +10/20\n", by_arm)
    assert call("status s --runs").out == shown
