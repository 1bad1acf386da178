"""The mirror into a real sqlite store."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest

from ablate.base.files import append_line, write_record
from ablate.store import Status
from ablate.track.cursor import cursor_path, pending
from ablate.track.describe import RESULTS
from ablate.track.mirror import Mirror
from ablate.track.sink import Sink
from ablate.track.uri import default_tracking_uri

MS = 1_700_000_000_250


@pytest.fixture
def uri(storage):
    return default_tracking_uri(storage)


def sync(study, uri):
    """Make a pass of a fresh mirror, as a new process would."""
    report = Mirror(study.store, uri).sync_once()
    assert report.problem is None
    assert pending(study.store, uri).complete
    return report


def test_whole_study(study, uri, held, storage, assert_same):
    study.whole(steps=8)
    assert Mirror(study.store, uri).sync_once().metrics_sent == 4 * (8 * 4 + 2 * 2)
    runs = held(study, uri)
    assert_same(study, runs)
    run = runs[study.runs["fprop", 1]]
    assert run.info.run_name == "fprop seed 1"
    assert run.info.status == "FINISHED"
    assert (run.info.start_time, run.info.end_time) == (MS, MS + 100_000)
    assert [step for step, _, _ in run.points["val_loss"]] == [4 * 4096, 8 * 4096]
    step, loss, time = run.points["val_loss"][0]
    assert run.points["val_perplexity"][0] == (step, math.exp(loss), time)
    assert time == MS + 4000
    assert run.data.params == {
        "model.width": "64",
        "model.heads": "none",
        "training.learning_rate": "0.004",
        "seed": "1",
        "factor.recipe.gemms": "fprop",
    }
    wanted = {
        "ablate.run_id": run.data.tags["ablate.run_id"],
        "ablate.arm": "fprop",
        "ablate.seed": "1",
        "ablate.baseline": "false",
        "ablate.state": "finished",
        "ablate.backend": "emulated",
        "ablate.backend_mode": "emulated",
        "ablate.arithmetic": "a1 then b2",
        "factor.recipe.gemms": "fprop",
    }
    assert wanted.items() <= run.data.tags.items()
    assert run.artifacts == ["config.json", "environment.json"]
    assert runs[study.runs["bf16", 0]].data.tags["ablate.baseline"] == "true"
    assert len(list((storage / "mlartifacts" / "synthetic").glob("*/artifacts/config.json"))) == 4


def test_experiment_tells_the_design(study, uri):
    from mlflow import MlflowClient

    study.whole(2)
    sync(study, uri)
    experiment = MlflowClient(uri).get_experiment_by_name("synthetic")
    assert "| fprop |" in experiment.tags["mlflow.note.content"]
    study.plan["description"] = "Another question"
    study.write_plan()
    sync(study, uri)
    experiment = MlflowClient(uri).get_experiment_by_name("synthetic")
    assert experiment.tags["mlflow.note.content"].startswith("Another question")


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("running", "RUNNING"),
        ("finished", "FINISHED"),
        ("diverged", "FINISHED"),
        ("failed", "FAILED"),
        ("interrupted", "KILLED"),
        ("stopped", "KILLED"),
    ],
)
def test_states(study, uri, held, state, status):
    study.start()
    study.train([1])
    study.end(state=state)
    sync(study, uri)
    run = held(study, uri)[study.runs["bf16", 0]]
    assert (run.info.status, run.data.tags["ablate.state"]) == (status, state)


def test_pending_runs_are_not_shown(study, uri, held):
    study.start()
    study.run("bf16", 1).create({})
    sync(study, uri)
    assert list(held(study, uri)) == [study.runs["bf16", 0]]


def test_a_run_while_it_grows(study, uri, held, assert_same):
    mirror = Mirror(study.store, uri)
    run = study.start()
    sent = []
    for step in range(1, 6):
        study.train([step])
        with run.metrics_path.open("rb+") as file:  # cut the last line, as a reader may find it
            content = file.read()
            file.truncate(len(content) - 7)
        sent.append(mirror.sync_once().metrics_sent)
        with run.metrics_path.open("wb") as file:
            file.write(content)
    assert sent == [0, 4, 4, 4 + 4, 2]  # step 4 has an evaluation, whose line was the one cut
    study.end()
    assert mirror.sync_once().metrics_sent == 4
    assert_same(study, held(study, uri))
    assert held(study, uri)[run.run_id].info.status == "FINISHED"


def test_nothing_new_sends_nothing(study, uri):
    study.whole(4)
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    again = mirror.sync_once()
    assert (again.runs_sent, again.metrics_sent) == (0, 0)
    assert sync(study, uri).metrics_sent == 0


def test_a_failed_run_is_reopened(study, uri, held, assert_same):
    study.start()
    study.train(range(1, 5))
    study.end(state="failed", message="boom")
    sync(study, uri)
    study.start(attempt=2)
    study.train(range(5, 7))
    sync(study, uri)
    run = held(study, uri)[study.runs["bf16", 0]]
    assert (run.info.status, run.data.tags["ablate.state"]) == ("RUNNING", "running")
    assert "boom" not in run.data.tags["mlflow.note.content"]
    assert_same(study, held(study, uri))


@pytest.mark.parametrize("same_process", [True, False])
def test_lost_cursor_doubles_nothing(study, uri, held, same_process, assert_same):
    study.whole(8)
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    before = held(study, uri)
    study.start()
    cursor_path(study.store, uri).unlink()
    report = mirror.sync_once() if same_process else Mirror(study.store, uri).sync_once()
    assert report.metrics_sent == 4 * 36
    after = held(study, uri)
    assert_same(study, after)
    assert {run.info.run_id for run in after.values()} == {run.info.run_id for run in before.values()}
    assert after[study.runs["bf16", 0]].info.status == "RUNNING"


def test_broken_cursor_counts_as_lost(study, uri, held, assert_same):
    study.whole(4)
    sync(study, uri)
    cursor_path(study.store, uri).write_text('{"format": 2, "runs": {"x": {}}')
    sync(study, uri)
    assert_same(study, held(study, uri))


def test_rewound_before_it_was_mirrored(study, uri, held, assert_same):
    study.start()
    study.train(range(1, 9))
    study.run().metrics_path.unlink()
    study.train(range(1, 3), late_sec=50)
    sync(study, uri)
    assert_same(study, held(study, uri))


@pytest.mark.parametrize("steps_again", [1, 12])
@pytest.mark.parametrize("with_cursor", [True, False])
def test_rewound_after_it_was_mirrored(study, uri, held, steps_again, with_cursor, assert_same):
    """MLflow never forgets a point, so the rewound run is shown by a new MLflow run, alone."""
    study.start()
    study.train(range(1, 9))
    sync(study, uri)
    lines = study.run().metrics_path.read_bytes().splitlines(keepends=True)
    study.run().metrics_path.write_bytes(b"".join(lines[:4]))  # to the checkpoint after step 4
    study.train(range(5, 5 + steps_again), late_sec=50)
    if not with_cursor:
        cursor_path(study.store, uri).unlink()
    sync(study, uri)
    assert_same(study, held(study, uri))


def test_what_was_deleted_in_mlflow_comes_back(study, uri, held, assert_same):
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    study.whole(4)
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    client.delete_run(held(study, uri)[study.runs["bf16", 0]].info.run_id)
    study.train([5])
    study.end()
    first = mirror.sync_once()
    assert "active" in first.problem
    assert first.unsent == (study.runs["bf16", 0],)
    assert mirror.sync_once().complete
    assert_same(study, held(study, uri))
    client.delete_experiment(client.get_experiment_by_name("synthetic").experiment_id)
    sync(study, uri)
    assert_same(study, held(study, uri))


def test_a_new_database_gets_everything(study, uri, held, storage, tmp_path, assert_same):
    study.whole(4)
    sync(study, uri)
    for path in storage.glob("mlflow.db*"):
        path.rename(tmp_path / path.name)
    moved = tmp_path / "elsewhere"
    storage.rename(moved)  # a new address, so that no open connection is in the way
    study.store = type(study.store)(moved / "synthetic")
    uri = default_tracking_uri(moved)
    sync(study, uri)
    assert_same(study, held(study, uri))
    assert (moved / "mlflow.db").exists()
    assert not list(moved.glob(".mlflow-*"))


def write_results(study, tokens, costs=None):
    """Write a report in which these runs hit the target; ``costs``: of the arms, where they are known."""
    seeds = {arm: [seed for name, seed in study.runs if name == arm] for arm, _ in study.runs}
    arms = [
        {
            "name": arm,
            "counted_from_tokens": 0,
            "tokens_to_target": {"estimate": tokens.get((arm, 0))},
            "token_cost": {"estimate": (costs or {}).get(arm)},
            "runs": [
                {
                    "id": study.runs[arm, seed],
                    "seed": seed,
                    "tokens_to_target": tokens.get((arm, seed)),
                    "at_or_before_first_evaluation": False,
                }
                for seed in own
            ],
        }
        for arm, own in seeds.items()
    ]
    folder = study.store.path / "report"
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"baseline": "bf16", "arms": arms}))


def figures(run):
    return {name: value for name, value in run.data.metrics.items() if name.partition("/")[0] in RESULTS}


def test_what_the_report_found_becomes_metrics_and_follows_it(study, uri, held, summary):
    study.whole(2)
    sync(study, uri)
    write_results(study, {("bf16", 0): 1000.0, ("fprop", 0): 1250.0, ("fprop", 1): 1500.0}, {"fprop": 0.25})
    assert sync(study, uri).metrics_sent == 3 + 1 + 3  # of the runs: tokens and a cost; of the arms
    runs, whole = held(study, uri), summary(study, uri)
    assert figures(runs[study.runs["bf16", 0]]) == {"tokens_to_target": 1000.0}
    assert figures(runs[study.runs["fprop", 0]]) == {"tokens_to_target": 1250.0, "token_cost": 0.25}
    assert figures(runs[study.runs["fprop", 1]]) == {"tokens_to_target": 1500.0}  # no pair has hit
    assert figures(whole) == {
        "tokens_to_target/bf16": 1000.0, "tokens_to_target/fprop": 1250.0, "token_cost/fprop": 0.25,
    }  # fmt: skip
    assert sync(study, uri).metrics_sent == 0
    cursor_path(study.store, uri).unlink()
    sync(study, uri)
    again = held(study, uri)
    assert {key: run.points for key, run in again.items()} == {key: run.points for key, run in runs.items()}

    os.utime(study.store.path / "report" / "report.json", (1, 1))
    (study.store.path / "report" / "report.json").write_text("{")  # cut off: nothing is taken back
    assert sync(study, uri).metrics_sent == 0
    write_results(study, {("bf16", 0): 1000.0, ("fprop", 0): 1100.0, ("fprop", 1): 1500.0})
    sync(study, uri)
    runs, whole = held(study, uri), summary(study, uri)
    assert figures(runs[study.runs["fprop", 0]]) == {
        "tokens_to_target": 1100.0,
        "token_cost": pytest.approx(0.1),
    }
    assert figures(whole) == {"tokens_to_target/bf16": 1000.0, "tokens_to_target/fprop": 1100.0}
    write_results(study, {("bf16", 0): 1000.0})  # another target, which fprop misses
    sync(study, uri)
    runs = held(study, uri)
    assert figures(runs[study.runs["fprop", 0]]) == {}
    assert (
        runs[study.runs["fprop", 0]].points["train_loss"]
        == again[study.runs["fprop", 0]].points["train_loss"]
    )
    note = runs[study.runs["fprop", 0]].data.tags["mlflow.note.content"]
    assert summary(study, uri).info.run_id in note


def test_report_is_logged_when_it_changes(study, uri, held, summary, storage):
    study.whole(2)
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    run = summary(study, uri)
    assert (run.artifacts, run.info.status) == ([], "RUNNING")
    note = held(study, uri)[study.runs["bf16", 0]].data.tags["mlflow.note.content"]
    assert f"{run.info.run_id}/artifacts/report/report.html" in note
    folder = study.store.path / "report"
    folder.mkdir()
    (folder / "report.html").write_text("<h1>first</h1>")
    (folder / "report.json").write_text("{}")
    assert not pending(study.store, uri).complete
    mirror.sync_once()
    run = summary(study, uri)
    assert run.info.run_name == "report: synthetic"
    assert run.info.status == "FINISHED"
    assert run.artifacts == ["report/report.html", "report/report.json"]
    [copy] = (storage / "mlartifacts").rglob("report.html")
    written = copy.stat().st_mtime_ns
    (folder / "report.html").write_text("<h1>first</h1>")  # the same again
    mirror.sync_once()
    sync(study, uri)
    assert copy.stat().st_mtime_ns == written
    (folder / "report.html").write_text("<h1>second</h1>")
    sync(study, uri)
    assert copy.read_text() == "<h1>second</h1>"
    cursor_path(study.store, uri).unlink()
    sync(study, uri)
    assert len(held(study, uri)) == 4
    assert summary(study, uri).info.run_id == run.info.run_id


def test_a_renamed_arm_is_renamed(study, uri, held):
    study.whole(2)
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    study.plan["arms"][1]["name"] = "only Fprop"
    study.plan["arms"][1]["factors"] = {"recipe.gemms": ["fprop", "changed"]}
    study.write_plan()
    assert mirror.sync_once().complete
    run = held(study, uri)[study.runs["fprop", 0]]
    assert run.info.run_name == "only Fprop seed 0"
    assert run.data.tags["ablate.arm"] == "only Fprop"
    cursor_path(study.store, uri).unlink()
    sync(study, uri)  # a parameter cannot change in MLflow: that must not stop the run
    assert held(study, uri)[study.runs["fprop", 0]].data.tags["factor.recipe.gemms"] == "fprop+changed"


def test_two_folders_of_one_study_stay_apart(study, uri, make_study, tmp_path):
    """Two people run the same study against one store: equal run ids, but not equal curves."""
    from mlflow import MlflowClient

    other = type(study)(tmp_path / "other")
    study.whole(2)
    other.whole(4)
    sync(study, uri)
    sync(other, uri)
    sync(study, uri)
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("synthetic").experiment_id])
    counts = sorted(len(client.get_metric_history(run.info.run_id, "train_loss")) for run in runs)
    assert counts == [0, 0, 2, 2, 2, 2, 4, 4, 4, 4]  # and two reports to come


def test_a_broken_run_holds_up_no_other(study, uri, held, assert_same):
    study.whole(2)
    environment = study.run("bf16", 0).environment_path
    whole = environment.read_bytes()
    environment.write_text("{")
    report = Mirror(study.store, uri).sync_once()
    assert study.runs["bf16", 0] in report.problem
    assert report.unsent == (study.runs["bf16", 0],)
    assert len(held(study, uri)) == 3
    environment.write_bytes(whole)
    sync(study, uri)
    assert_same(study, held(study, uri))


@pytest.mark.parametrize("file", ["status.json", "config.json", "environment.json", "metrics.jsonl"])
def test_nothing_of_a_damaged_run_is_sent_before_it_has_run_again(study, uri, held, assert_same, file):
    study.whole(2)
    path = study.run("bf16", 0).path / file
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    report = Mirror(study.store, uri).sync_once()
    assert report.problem.startswith(f"run {study.runs['bf16', 0]} is not sent: {file}: altered or cut")
    assert report.unsent == (study.runs["bf16", 0],)
    assert study.runs["bf16", 0] not in held(study, uri)
    path.unlink()
    study.start()
    study.run("bf16", 0).metrics_path.unlink(missing_ok=True)
    study.train((1, 2))
    study.end()
    sync(study, uri)
    assert_same(study, held(study, uri))


def test_large_configuration_and_many_rows(study, uri, held, assert_same):
    run = study.start()
    config = {f"section{i}": {f"key{j}": "v" * 600 for j in range(25)} for i in range(10)}
    write_record(run.config_path, config)
    study.train(range(1, 1201))
    sync(study, uri)
    shown = held(study, uri)[run.run_id]
    assert len(shown.data.params) == 250
    assert len(shown.points["train_loss"]) == 1200
    assert_same(study, held(study, uri))


def test_not_finite_rows_are_left_out(study, uri, held):
    run = study.start()
    study.train([1])
    with run.metrics_path.open("a") as file:
        file.write(
            '{"kind": "train", "tokens": 8192, "step": 2, "time_unix": 1, "loss": NaN, "lr": Infinity}\n'
        )
    sync(study, uri)
    row = next(iter(run.metrics()))
    [point] = held(study, uri)[run.run_id].points["train_loss"]
    assert point == (row["tokens"], row["loss"], round(row["time_unix"] * 1000))


@pytest.mark.parametrize(
    "address",
    [
        "http://ann:s3cret@127.0.0.1:9",
        "htp://ann:s3cret@host",
        "file:/nowhere",
        "sqlite:////proc/none/mlflow.db",
    ],
)
def test_an_address_that_cannot_be_used(study, address, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    study.whole(2)
    report = Mirror(study.store, address).sync_once()
    assert report.problem
    assert len(report.unsent) == 4
    assert pending(study.store, address).problem == report.problem
    for path in [p for p in study.store.path.rglob("*") if p.is_file()]:
        assert b"s3cret" not in path.read_bytes()
    assert "s3cret" not in repr(report)


def test_a_study_that_has_not_begun(study, uri):
    study.store.plan_path.unlink()
    assert "plan.lock.json" in Mirror(study.store, uri).sync_once().problem
    assert pending(study.store, uri).unsent == ()


def test_mirrors_take_turns(study, uri, held, assert_same):
    study.whole(8)
    mirrors = [Mirror(study.store, uri) for _ in range(4)]
    threads = [threading.Thread(target=mirror.sync_once) for mirror in mirrors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(study, held(study, uri))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_pass_that_is_cut_off_between_sending_and_saving(study, uri, held, monkeypatch, assert_same, error):
    study.whole(8)
    logged = []
    log = Sink.log

    def stop(self, *args, **kwargs):
        log(self, *args, **kwargs)
        logged.append(args)
        if len(logged) == 3:
            raise error

    monkeypatch.setattr(Sink, "log", stop)
    if error is SystemExit:  # as a kill: not even the cursor is written
        monkeypatch.setattr("ablate.track.mirror.write_json_atomic", lambda *_: None)
    with pytest.raises(error):
        Mirror(study.store, uri).sync_once()
    monkeypatch.undo()
    sync(study, uri)
    assert_same(study, held(study, uri))


def test_import_is_light():
    code = "import sys, ablate.track, ablate.track.process, ablate.cli.report; print('mlflow' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_status_counters_alone_send_nothing(study, uri):
    study.start()
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    study.run().write_status(
        Status(state="running", attempt=1, tokens=99, step=9, started_unix=1_700_000_000.25)
    )
    assert mirror.sync_once().metrics_sent == 0
    assert pending(study.store, uri).complete


def test_samples_of_the_machine_come_along_once(study, uri, held, assert_same):
    study.whole(4)
    study.sample([1, 2])
    mirror = Mirror(study.store, uri)
    mirror.sync_once()
    study.sample([3])  # nothing else has changed
    assert mirror.sync_once().metrics_sent == 1
    run = held(study, uri)[study.runs["bf16", 0]]
    assert [step for step, _, _ in run.points["system/cpu_utilization_percentage"]] == [4096, 8192, 12288]
    cursor_path(study.store, uri).unlink()
    sync(study, uri)
    assert_same(study, held(study, uri))


def diagnose(study, steps, gain=0.98):
    for step in steps:
        row = {"kind": "diagnosis", "layer": "blocks.0.ffn.down", "gemm": "wgrad", "gain": gain + step / 1000}
        row |= {"tokens": 4096 * step, "step": step, "time_unix": 1.7e9 + step + gain}
        append_line(study.run().diagnostics_path, row)


def test_diagnoses_come_along_once_and_rewound_ones_in_place_of_the_first(study, uri, held):
    key = "diag/wgrad/gain/blocks.0.ffn.down"
    study.whole(steps=4)
    sync(study, uri)
    diagnose(study, (1, 2))
    study.end()
    assert not pending(study.store, uri).complete
    sync(study, uri)
    assert sync(study, uri).metrics_sent == 0
    assert [step for step, _, _ in held(study, uri)[study.runs["bf16", 0]].points[key]] == [4096, 8192]
    study.run().diagnostics_path.unlink()
    diagnose(study, (1, 3), gain=0.5)
    study.end()
    sync(study, uri)
    run = held(study, uri)[study.runs["bf16", 0]]
    assert [(step, value) for step, value, _ in run.points[key]] == [(4096, 0.501), (3 * 4096, 0.503)]
    assert len(run.points["train_loss"]) == 4
