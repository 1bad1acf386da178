"""The verbs that look after a study: logs, cancel, clean, sync, status --watch."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
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
    run = store.run(IDS[0])
    run.create({"model": {}, "training": {}, "seed": 0})
    first = Leases(run.attempts).claim()
    run.attempt_log(1).write_text("first\n")
    first.end("interrupted", "preempted (SIGTERM)")
    second = Leases(run.attempts).claim()
    second.note("a1b2", 40)
    run.attempt_log(2).write_text("second\x1b[31m\n")
    append_line(
        run.metrics_path, {"kind": "eval", "tokens": 10, "step": 1, "time_unix": 1.7e9, "val_loss": 1.5}
    )
    second.end("finished")
    run.write_status(Status(state="finished", attempt=2, tokens=10, started_unix=1.7e9, ended_unix=1.7e9))
    return store


def call(store, *arguments, **options):
    command = [*arguments, "--storage", str(store.path.parent)]
    return CliRunner().invoke(cli, command, catch_exceptions=False, **options)


def test_logs_show_the_ledger_and_the_last_attempt(store):
    output = call(store, "logs", "00aa").output
    assert "attempt 1: interrupted" in output
    assert "preempted (SIGTERM)" in output
    assert "attempt 2: finished" in output
    assert "from step 40" in output
    assert output.endswith("second\\x1b[31m\n")  # a log must not steer the terminal
    assert call(store, "logs", "00aa", "--attempt", "1").output.endswith("first\n")
    store.run(IDS[0]).attempt_log(1).write_text("")
    assert call(store, "logs", "00aa", "--attempt", "1").output.endswith("\n\nAttempt 1 printed nothing.\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["00"], r"no run '00'|has not been started|begins"),
        (["00bb"], "no run '00bb'"),
        (["ffff"], "no run 'ffff'"),
        (["../x"], "is no run's id"),
        (["*"], "is no run's id"),
        (["00aa", "--attempt", "7"], "has 2 .expected 1 to 2"),
        (["00aa", "--study", "other"], "no study 'other'"),
    ],
)
def test_logs_of_what_is_not_there(store, arguments, line):
    if arguments == ["00"]:
        store.run(IDS[1]).create({})
    with pytest.raises(UserError, match=line):
        call(store, "logs", *arguments)


def test_a_run_in_two_studies_is_named_by_its_folders(store):
    (other := store.path.parent / "t" / "runs" / IDS[0]).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"^'00aa' begins 2 runs' ids: {store.run(IDS[0]).path}, {other}$"):
        call(store, "logs", "00aa")
    assert "attempt 2: finished" in call(store, "logs", "00aa", "--study", "s").output


def test_logs_follow_to_the_end(store, monkeypatch):
    run = store.run(IDS[1])
    run.create({})
    lease = Leases(run.attempts).claim()
    log = run.attempt_log(1)
    log.write_text("one\n")

    def go_on(_seconds):
        with log.open("a") as file:
            file.write("two\n")
        lease.end("finished")

    monkeypatch.setattr(manage, "time", SimpleNamespace(sleep=go_on))
    assert call(store, "logs", "00bb", "--follow").output.endswith("one\ntwo\n")


def test_cancel_asks_only_where_somebody_runs_it(store):
    assert "is not being run" in call(store, "cancel", "s").output
    assert not (store.path / "cancel").exists()
    with running(store, store.plan()):
        assert "Asked to stop" in call(store, "cancel", "s").output
    assert (store.path / "cancel").exists()


def leftovers(store):
    gone = store.run("0123456789abcdef")
    gone.create({})
    (store.run(IDS[0]).checkpoints).mkdir()
    (store.run(IDS[0]).checkpoints / "000000000001.json").write_text("{}")
    (store.run(IDS[0]).path / ".status.json.x1").write_text("half")
    (store.path / ".stop-1234").touch()
    own = store.path / "runs" / "my notes"
    own.mkdir()
    (own / "a.txt").write_text("mine")
    (store.run(IDS[0]).path / ".nfs123").write_text("not ours")
    link = store.path / "runs" / "fedcba9876543210"
    link.symlink_to(own)
    return gone, own, link


def test_clean_asks_and_takes_what_is_its_own_alone(store):
    gone, own, link = leftovers(store)
    assert "a run that the plan no longer has" in call(store, "clean", "s", "--dry-run").output
    assert gone.path.exists()
    call(store, "clean", "s", input="n\n")
    assert gone.path.exists()
    assert "Removed 4." in call(store, "clean", "s", input="y\n").output
    assert not gone.path.exists()
    assert not store.run(IDS[0]).checkpoints.exists()
    assert (own / "a.txt").read_text() == "mine"
    assert link.is_symlink()
    assert (store.run(IDS[0]).path / ".nfs123").exists()
    assert [row["val_loss"] for row in store.run(IDS[0]).metrics()] == [1.5]
    assert call(store, "clean", "s").output == "Nothing to remove.\n"


def test_clean_keeps_the_checkpoint_of_a_stopped_run(store):
    run = store.run(IDS[1])
    run.create({})
    run.checkpoints.mkdir()
    run.write_status(Status(state="stopped", tokens=5, message="not needed"))
    assert call(store, "clean", "s").output == "Nothing to remove.\n"
    run.ask_to_stop("not needed")  # its executor was killed before it saw this
    assert "Removed 1." in call(store, "clean", "s", "--yes").output
    assert not run.stop_path.exists()
    assert run.checkpoints.exists()


def test_clean_takes_the_weights_only_when_told(store):
    run = store.run(IDS[0])
    (run.path / ".weights.123").mkdir()
    run.weights.mkdir()
    assert "left by a write that was cut off" in call(store, "clean", "s", "--yes").output
    assert run.weights.exists()
    assert "the weights of a run" in call(store, "clean", "s", "--weights", "--yes").output
    assert not run.weights.exists()


def test_clean_takes_the_states_in_common_once_every_run_has_ended(store):
    (store.prefixes / "key").mkdir(parents=True)
    assert call(store, "clean", "s").output == "Nothing to remove.\n"
    for run_id in IDS:
        store.run(run_id).write_status(Status(state="finished"))
    assert "states that runs had in common" in call(store, "clean", "s", "--yes").output
    assert not store.prefixes.exists()


def test_status_says_why_a_run_was_stopped(store):
    store.run(IDS[1]).write_status(Status(state="stopped", tokens=5, message="above 10 % at 3 seeds"))
    output = call(store, "status", "s").output
    assert "s: 1 of 2 done · 1 stopped" in output
    assert "bf16 seed 1 stopped: above 10 % at 3 seeds" in output


def test_clean_of_the_whole_study(store, tmp_path):
    for name in ("thesis.tex", ".git", "runs/notes", "runs/.hidden", "report/mine.csv"):
        mine = store.path / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(UserError, match=f"{mine.name} is not ablate's: move it away first"):
            call(store, "clean", "s", "--whole", "--yes")
        assert mine.read_text() == "mine"
        mine.unlink()
    store.throughput_path.write_text("{}")
    stop = rf"is being run \(stop it first: ablate cancel s --storage {tmp_path}\)$"
    with running(store, store.plan()), pytest.raises(UserError, match=stop):
        call(store, "clean", "s", "--whole", "--yes")
    call(store, "clean", "s", "--whole", "--yes")
    assert not store.path.exists()
    assert tmp_path.exists()


def test_no_run_begins_between_the_question_of_clean_and_its_end(store, monkeypatch):
    seen = []

    def ask(*_arguments):
        seen.append(is_running(store.path))  # somebody holds its lock: who starts it waits
        return True

    monkeypatch.setattr(manage.click, "confirm", ask)
    call(store, "clean", "s", "--whole")
    assert seen == [True]
    assert not store.path.exists()


def test_sync_sends_what_mlflow_lacks_once(store):
    first = call(store, "sync", "s")
    assert first.exit_code == 0, first.output
    assert "1 runs looked at, 2 metric points sent" in first.output  # the loss and its perplexity
    assert "0 metric points sent" in call(store, "sync", "s").output
    rebuilt = call(store, "sync", "s", "--rebuild")
    assert rebuilt.exit_code == 0
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store.path.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("s")
    (run,) = client.search_runs([experiment.experiment_id], "tags.`ablate.arm` != ''")
    assert len(client.get_metric_history(run.info.run_id, "val_loss")) == 1


def test_a_large_study_is_shown_arm_by_arm_and_its_runs_when_asked_for(store, monkeypatch):
    assert "seed" in call(store, "status", "s").output
    monkeypatch.setattr(manage, "_MOST_RUNS", 1)
    by_arm = call(store, "status", "s").output
    assert re.search(r"bf16 +1 of 2 done · 1 pending +10/20\n", by_arm)
    assert "seed" not in by_arm
    runs = call(store, "status", "s", "--runs").output
    assert [line.split()[0] for line in runs.splitlines() if "bf16" in line] == [name[:8] for name in IDS]
    plan = store.plan()
    arm = replace(plan.arms[0], name="all three GEMMs with a deterministic Hadamard")
    store.write_plan(replace(plan, arms=(arm,), baseline=arm.name))
    runs = call(store, "status", "s", "--runs").output  # a name may wrap, an id may not be cut
    assert max(map(len, runs.splitlines())) <= 80
    assert [line.split()[0] for line in runs.splitlines() if "/10" in line] == [name[:8] for name in IDS]


def test_status_finds_a_damaged_run(store):
    path = store.run(IDS[0]).metrics_path
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.4"))
    shown = call(store, "status", "s").output
    assert "bf16 seed 0 damaged: metrics.jsonl: altered or cut since the run ended" in shown
    assert "0 of 2 done" in shown


def test_status_watches_until_nobody_runs_it(store, monkeypatch):
    with ExitStack() as held:
        held.enter_context(running(store, store.plan()))
        monkeypatch.setattr(manage, "time", SimpleNamespace(sleep=lambda _seconds: held.close()))
        output = call(store, "status", "s", "--watch").output
    assert output.count("1 of 2 done") >= 2  # the last look, and what is said without --watch
    assert "being run now" not in output.splitlines()[-1]
    shown = json.loads(call(store, "status", "s", "--json").output)
    assert shown["states"] == {"finished": 1, "pending": 1}
    assert shown["ends"] is None  # nobody runs it
