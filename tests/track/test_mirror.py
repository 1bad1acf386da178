"""The mirror into a real sqlite store: in the end MLflow holds every point once, and no other."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from mlflow import MlflowClient

from ablate.base.command_hints import redact
from ablate.base.files import write_record
from ablate.store import StudyStore
from ablate.track.cursor import cursor_path, load_cursor, pending
from ablate.track.describe import PLAN_TAG, RESULTS
from ablate.track.mirror import Mirror
from ablate.track.process import start_mirror
from ablate.track.sink import (
    Away,
    Sink,
    default_tracking_uri,
    is_local,
    make_database,
    resolve_tracking_uri,
)
from tests.exhaustive import rest_exhaustive
from tests.waiting import is_alive, run_python, wait_until

MS = 1_700_000_000_250
EVERY_FILE = "metrics diagnostics system"


def experiment_of(uri):
    return MlflowClient(uri).get_experiment_by_name("synthetic")


def sync(study, uri):
    """Make a pass of a fresh mirror, as a new process would."""
    report = Mirror(study.store, uri).sync_once()
    assert report.problem is None
    assert pending(study.store, uri).complete
    return report


def test_a_whole_study_and_its_design(study, uri, storage, monkeypatch):
    create = Sink.create_run

    def create_two(*args):
        """A request that is sent again makes a second run: the one that is filled stays."""
        return max(create(*args), create(*args), key=lambda run: run.info.run_id)

    monkeypatch.setattr(Sink, "create_run", create_two)
    study.whole(steps=8)
    mirror = Mirror(study.store, uri)
    assert mirror.sync_once().metrics_sent == 4 * (8 * 6 + 2 * 2)
    run = study.check(uri)["fprop", 1]
    assert (run.info.run_name, run.info.status) == ("s1 fprop", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (MS, MS + 100_000)
    assert run.data.params["arm.recipe.gemms"] == "fprop"
    assert run.data.tags["factor.recipe.gemms"] == "fprop"
    artifacts = storage.glob("mlartifacts/synthetic/*/artifacts/*")
    files = ["config.json", "environment.json"]
    assert sorted(path.name for path in artifacts) == sorted(files * 4)
    again = mirror.sync_once()
    assert again.runs_sent == again.metrics_sent == sync(study, uri).metrics_sent == 0
    study.train([9], files="system")  # nothing else has changed
    assert mirror.sync_once().metrics_sent == 1
    study.start()
    study.train([10, 11, 13])
    assert mirror.sync_once().metrics_sent == 3 * 6
    study.plan["description"] = "Another question"
    factors = {"recipe.gemms": ["fprop", "changed"]}
    study.plan["arms"][1] |= {"name": "only Fprop", "factors": factors}
    study.write_plan()
    assert mirror.sync_once().complete
    note = experiment_of(uri).tags["mlflow.note.content"]
    assert note.startswith("Another question")
    before = study.check(uri)
    cursor_path(study.store, uri).unlink()
    sync(study, uri)  # a parameter cannot change in MLflow: that must not stop the run
    after = study.check(uri)
    assert all(run.info.run_id == before[key].info.run_id for key, run in after.items())
    assert after["bf16", 0].info.status == "RUNNING"
    run = after["fprop", 1]
    assert run.info.run_name == "s1 only Fprop"
    assert run.data.tags["ablate.arm"] == "only Fprop"
    assert run.data.tags["factor.recipe.gemms"] == "fprop+changed"


STATES = {
    ("bf16", 0): ("running", "RUNNING"), ("bf16", 1): ("finished", "FINISHED"),
    ("fprop", 0): ("diverged", "FINISHED"), ("fprop", 1): ("failed", "FAILED"),
    ("all three", 0): ("interrupted", "KILLED"), ("all three", 1): ("stopped", "KILLED"),
}  # fmt: skip


def test_states_and_a_run_that_is_tried_again(make_study, uri):
    study = make_study(arms=("bf16", "fprop", "all three"), seeds=(0, 1, 2))
    for key, (state, _) in STATES.items():
        study.start(*key)
        study.train([1], *key)
        study.end(*key, state=state, message="boom")
    study.run("bf16", 2).create({})  # pending: it is not shown
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    runs = study.check(uri)
    for key, (state, status) in STATES.items():
        assert runs[key].data.tags["ablate.state"] == state
        assert runs[key].info.status == status
    study.start("fprop", 1, attempt=2)
    study.train([2], "fprop", 1)
    mirror.sync_once()
    run = study.check(uri)["fprop", 1]
    assert (run.info.status, run.data.tags["ablate.state"]) == ("RUNNING", "running")
    assert "boom" not in run.data.tags["mlflow.note.content"]
    status = study.run("fprop", 1).status()
    study.run("fprop", 1).write_status(replace(status, tokens=99))
    assert mirror.sync_once().metrics_sent == 0  # counters alone are no news
    assert pending(study.store, uri).complete


@pytest.mark.parametrize("turn", rest_exhaustive(range(3), lambda turn: turn == 0))
def test_whatever_happens_mlflow_holds_every_point_once(study, uri, monkeypatch, turn):
    """Two mirrors in turn see rows, ends, rewinds, cuts, kills, and what is lost or deleted."""
    draw = random.Random(turn)
    client = MlflowClient(uri)
    log = Sink.log
    mirrors = [Mirror(study.store, uri) for _ in range(2)]
    steps = dict.fromkeys(study.runs, 0)

    def grow(key, files=None):
        study.start(*key)
        more = range(steps[key] + 1, steps[key] + draw.randint(2, 9))
        files = files or draw.choice(["metrics", EVERY_FILE, "system"])
        study.train(more, *key, late_sec=draw.random(), files=files)
        steps[key] = more[-1]

    def cut_last_line(key):
        grow(key)
        path = study.run(*key).metrics_path
        whole = path.read_bytes() if path.exists() else b""
        path.write_bytes(whole[:-7])  # as a reader may find it
        mirrors[0].sync_once()
        path.write_bytes(whole)

    def rewind(key):
        grow(key, EVERY_FILE)
        mirrors[1].sync_once()
        last_kept = draw.randint(0, steps[key] // 2)
        for path in (study.run(*key).metrics_path, study.run(*key).diagnostics_path):
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= last_kept]
            path.write_text("".join(kept))
        grow(key)

    def rewind_without_cursor(key):
        rewind(key)
        cursor_path(study.store, uri).unlink()

    def end(key):
        study.start(*key)
        states = ["finished", "diverged", "failed", "interrupted"]
        study.end(*key, state=draw.choice(states))

    def lose_cursor(_):
        cursor_path(study.store, uri).write_text('{"format": 2, "runs": {"x": {}}')

    def kill(key):
        grow(key)
        sends_left = draw.randint(0, 3)

        def stop(self, *args):
            nonlocal sends_left
            log(self, *args)
            sends_left -= 1
            if sends_left < 0:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Sink, "log", stop)
            if draw.random() < 0.5:  # not even the cursor is written
                patch.setattr("ablate.track.mirror.write_json_atomic", lambda *_: None)
            mirrors[0].sync_once()

    def delete(key):
        grow(key)
        sync(study, uri)
        client.delete_run(study.held(uri)[key].info.run_id)
        grow(key)

    def delete_all(key):
        client.delete_experiment(experiment_of(uri).experiment_id)
        grow(key)

    grow(("bf16", 0))
    sync(study, uri)
    deletions = [delete, delete_all]
    events = [cut_last_line, rewind, rewind_without_cursor, end, lose_cursor, kill]
    events = (events + deletions) * 2
    for happens in draw.sample(events, len(events)):
        happens(draw.choice([*study.runs]))
        draw.choice(mirrors).sync_once()
        # A deletion is noticed by the pass that fails.
        passes = 3 if happens in deletions else 1
        mirror = draw.choice(mirrors)
        assert any(mirror.sync_once().complete for _ in range(passes))
        study.check(uri)
    assert sync(study, uri).metrics_sent == 0


def test_what_the_report_found_becomes_metrics_and_follows_it(make_study, uri):
    study = make_study(arms=("bf16",), seeds=(0,)).whole(2)
    (folder := study.store.path / "report").mkdir()

    def shown(tokens, cost=(None, None, None), early=False):
        """What MLflow shows of the run after a report that found this."""
        run = {"id": study.runs["bf16", 0], "tokens_to_target": tokens}
        run["at_or_before_first_evaluation"] = early
        cost = dict(zip(("estimate", "low", "high"), cost, strict=True))
        content = {"arms": [{"token_cost": cost, "runs": [run]}]}
        (folder / "report.json").write_text(json.dumps(content))
        sync(study, uri)
        run = study.check(uri)["bf16", 0]
        metrics = run.data.metrics
        return run.info.run_id, [metrics[key] for key in RESULTS if key in metrics]

    first, values = shown(1250, (0.21, 0.19, 0.23456789))
    assert values == [1250, 0.21, 0.19, 0.2346]
    cursor_path(study.store, uri).unlink()
    assert shown(1100, (0.21, -0.1, 0.3)) == (first, [1100, 0.21, -0.1, 0.3])
    # another target, which it misses: MLflow takes no point back, so the run is sent anew
    second, values = shown(None)
    assert (second != first, values) == (True, [])
    assert shown(1250) == (second, [1250])
    cursor_path(study.store, uri).unlink()
    third, values = shown(1250, early=True)
    assert (third != second, values) == (True, [])
    assert shown(900) == (third, [900])
    (folder / "report.json").write_text("{")
    sync(study, uri)  # the report was cut off: nothing is taken back
    run = study.check(uri)["bf16", 0]
    assert run.data.metrics["tokens_to_target"] == 900
    assert (
        study.held(uri)["summary"].info.run_id in run.data.tags["mlflow.note.content"]
    )


def test_runs_of_an_earlier_plan_are_marked_until_they_come_back(make_study, uri):
    study = make_study(seeds=(0,)).whole(2)
    arms = study.plan["arms"]
    for kept, plan in ((arms, "current"), (arms[:1], "earlier")) * 2:
        study.plan["arms"] = kept
        study.write_plan()
        sync(study, uri)
        there = study.check(uri)
        assert there["bf16", 0].data.tags[PLAN_TAG] == "current"
        assert there["fprop", 0].data.tags[PLAN_TAG] == plan


def test_the_report_is_logged_when_it_changes(study, uri, storage, monkeypatch):
    def shown():
        return study.held(uri)["summary"].info

    study.whole(2)
    sync(study, uri)
    first = shown()
    assert (first.run_name, first.status) == ("report: synthetic", "RUNNING")
    page = study.store.path / "report" / "report.html"
    page.parent.mkdir()
    page.write_text("<h1>sent, and cut off before its end</h1>")
    with monkeypatch.context() as patch:
        patch.setattr(Sink, "set_state", Mock(side_effect=Away("no answer")))
        assert Mirror(study.store, uri).sync_once().problem is not None
    sync(study, uri)
    assert shown().status == "FINISHED"
    written = []
    for text in ("<h1>first</h1>", "<h1>first</h1>", "<h1>second</h1>"):
        page.write_text(text)
        assert pending(study.store, uri).complete is (len(written) == 1)
        sync(study, uri)
        [copy] = (storage / "mlartifacts").rglob("report.html")
        assert copy.read_text() == text
        written.append(copy.stat().st_mtime_ns)
    assert written[0] == written[1]
    cursor_path(study.store, uri).unlink()
    sync(study, uri)
    run = shown()
    assert (run.run_id, run.status) == (first.run_id, "FINISHED")


def test_two_folders_of_one_study_stay_apart(study, uri, tmp_path):
    """Two people run the same study against one store: equal run ids, but not equal curves."""
    other = type(study)(tmp_path / "other")
    study.whole(2)
    other.whole(4)
    for copy in (study, other, study):
        sync(copy, uri)
    client = MlflowClient(uri)
    counts = []
    for run in client.search_runs([experiment_of(uri).experiment_id]):
        history = client.get_metric_history(run.info.run_id, "train_loss")
        counts.append(len(history))
    counts.sort()
    assert counts == [0, 0, 2, 2, 2, 2, 4, 4, 4, 4]  # and two reports to come


@pytest.mark.parametrize(
    "file", ["status.json", "config.json", "environment.json", "metrics.jsonl"]
)
def test_a_damaged_run_is_not_sent_and_holds_up_no_other(study, uri, file):
    study.whole(2)
    path = study.run("bf16", 0).path / file
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    report = Mirror(study.store, uri).sync_once()
    [run_id] = report.unsent
    assert run_id == study.runs["bf16", 0]
    fault = f"run {run_id} is not sent: {file}: altered or cut"
    assert report.problem.startswith(fault)
    assert len(study.held(uri)) == 4  # the others and the report
    path.unlink()
    study.start()
    study.train((3, 4))
    study.end()
    sync(study, uri)
    study.check(uri)


def test_a_large_configuration_and_many_rows(study, uri):
    run = study.start()
    section = {f"key{i}": "v" * 600 for i in range(25)}
    write_record(run.config_path, {f"section{i}": section for i in range(10)})
    study.train(range(1, 1201))
    sync(study, uri)
    # and what the arms differ in
    assert len(study.check(uri)["bf16", 0].data.params) == 250 + 1


def test_mirrors_take_turns(study, uri):
    study.whole(8)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(Mirror(study.store, uri).sync_once)
    study.check(uri)


@pytest.mark.parametrize(
    "is_early", rest_exhaustive([False, True], lambda early: not early)
)
def test_a_process_that_is_asked_to_end_sends_all(study, uri, is_early):
    """A short study ends before MLflow is even imported."""
    study.start()
    mirror = start_mirror(study.store.path, uri)
    try:
        if not is_early:
            wait_until(lambda: load_cursor(study.store, uri).runs)
            assert os.getpriority(os.PRIO_PROCESS, mirror.process.pid) >= 10
        study.whole(40)
    finally:
        report = mirror.stop(300)
    assert report.complete
    assert mirror.process.returncode == 0
    study.check(uri)


def test_a_process_whose_parent_is_killed_sends_all(study, uri):
    study.whole(4)
    code = f"""
import os, signal, sys
from pathlib import Path
from ablate.track.process import start_mirror
print(start_mirror(Path({str(study.store.path)!r}), {uri!r}).process.pid, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        pid = int(parent.stdout.readline())
        # the report's, too
        wait_until(lambda: len(load_cursor(study.store, uri).runs) == 5)
        study.train([5])
        study.end()
        parent.stdin.close()
    wait_until(lambda: not is_alive(pid))
    study.check(uri)


def test_a_process_that_hangs_is_killed(study, uri):
    study.whole(4)
    mirror = start_mirror(study.store.path, uri)
    os.kill(mirror.process.pid, signal.SIGSTOP)
    report = mirror.stop(0.2)
    assert not is_alive(mirror.process.pid)
    assert len(report.unsent) == 4


def test_a_process_whose_last_pass_hangs_ends_itself(study):
    code = """
import time
from ablate.track import process
process.STOP_SEC = 0.5
process.Mirror.sync_once = lambda _: time.sleep(120)
process.main()
"""
    another_parent = "1"
    process = run_python(
        code, str(study.store.path), another_parent, check=False, timeout=100
    )
    assert process.returncode == 1


MOUNTS = {
    "/": "ext4",
    "/home": "nfs4",
    "/home/ann/my disk": "tmpfs",
    "/scratch": "lustre",
}


@pytest.mark.parametrize(
    ("folder", "local"),
    [
        ("/data", True),
        ("/home/ann", False),
        ("/home/ann/my disk/x", True),
        ("/scratch/x", False),
    ],
)
def test_what_is_a_local_disk(folder, local, monkeypatch):
    disks = []
    for point, kind in MOUNTS.items():
        disks.append(SimpleNamespace(mountpoint=point, fstype=kind))
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: disks)
    assert is_local(Path(folder)) is local


def test_a_database_is_whole_and_made_once(tmp_path):
    path = tmp_path / "a b" / "mlflow.db"
    make_database(path, tmp_path / "artifacts")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE a_users_own (x)")
    # as another process would that was a little later
    make_database(path, tmp_path / "artifacts")
    assert [file.name for file in path.parent.iterdir()] == ["mlflow.db"]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT x FROM a_users_own")
        [[mode]] = connection.execute("PRAGMA journal_mode")
    assert mode == ("wal" if is_local(tmp_path) else "delete")


def test_where_a_study_is_mirrored_to(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolve_tracking_uri(tmp_path) == default_tracking_uri(tmp_path)
    assert default_tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert resolve_tracking_uri(tmp_path) == "http://from-environment:5000"
    assert resolve_tracking_uri(tmp_path, "http://option:5000") == "http://option:5000"
    relative = resolve_tracking_uri(tmp_path, "sqlite:///my.db")
    assert relative == f"sqlite:///{tmp_path}/my.db"
    store = StudyStore(tmp_path)
    path = cursor_path(store, "http://a:old@host")
    assert path == cursor_path(store, "http://a:new@host")
    assert path != cursor_path(store, "http://other")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "GET https://ann:s3cret@host:5000/api failed",
            "GET https://***@host:5000/api failed",
        ),
        ("https://ann:p@ss@host/x", "https://***@host/x"),
        ("https://token@host", "https://***@host"),
        ("postgresql+psycopg2://ann:pw@host/db", "postgresql+psycopg2://***@host/db"),
        (
            "postgresql://host/db?password=s3cret&x=1",
            "postgresql://host/db?password=***&x=1",
        ),
        ("sqlite:////home/ann@lab/mlflow.db", "sqlite:////home/ann@lab/mlflow.db"),
        ("http://host/mail@x", "http://host/mail@x"),
    ],
)
def test_no_login_is_shown(text, shown):
    assert redact(text) == shown
