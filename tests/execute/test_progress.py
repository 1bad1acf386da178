import json
from dataclasses import asdict

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.cli.display import format_count, format_seconds, summary
from ablate.execute import progress
from ablate.execute.progress import ProgressReader
from ablate.store import Status, StudyStore
from ablate.store.lock import LockedArm, LockedPlan, Target
from ablate.store.running import is_running, running


def row(tokens, **values):
    return {"kind": "train", "tokens": tokens, "step": 1, "loss": 2.0, "tokens_per_sec": 10.0} | values


def test_progress_reads_on_from_where_it_was(study):
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create(asdict(requests[0].config))
    run.write_status(Status(state="running", attempt=1))
    reader = ProgressReader(store)
    assert reader.read()[0].tokens == 0
    append_line(run.metrics_path, row(10))
    append_line(run.metrics_path, {"kind": "eval", "tokens": 10, "step": 1, "val_loss": 1.5})
    first = reader.read([requests[0].run_id])[0]
    assert (first.tokens, first.loss, first.val_loss, first.seconds_left) == (10, 2.0, 1.5, 2.0)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind": "train", "tok')  # a line that is being written
    assert reader.read()[0].tokens == 10
    run.metrics_path.write_bytes(b"")  # a new attempt
    append_line(run.metrics_path, row(5))
    assert reader.read()[0].tokens == 5


def test_a_leftover_running_is_read_as_interrupted(study):
    store, requests = study
    store.run(requests[0].run_id).create(asdict(requests[0].config))
    store.run(requests[0].run_id).write_status(Status(state="running", attempt=1))
    runs = ProgressReader(store, executor_alive=False).read()
    assert runs[0].state == "interrupted"
    assert summary(runs) == "0 of 4 done · 3 pending · 1 interrupted"


def test_two_may_run_a_study_if_they_mean_the_same_one(tmp_path):
    store = StudyStore(tmp_path / "s")
    first, second = (
        LockedPlan(
            study="s",
            baseline="a",
            target=Target(kind="val_loss", value=2.0),
            arms=(LockedArm(name="a", differs={"training.tokens": (1, tokens)}, runs=()),),
        )
        for tokens in (2, 3)
    )
    assert not is_running(store.path)
    with running(store, first) as others:
        assert not others
        assert is_running(store.path)
        with running(store, first) as shared:
            assert shared
        assert is_running(store.path)
        with (
            pytest.raises(UserError, match=r"is being run by process .* with another plan"),
            running(store, second),
        ):
            pass
        assert store.plan() == first
    assert not is_running(store.path)
    with running(store, second) as shared:
        assert not shared
    assert store.plan() == second


def test_damaged_files_are_shown_as_what_they_are(study):
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create(asdict(requests[0].config))
    append_line(run.metrics_path, row(10))
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind": "tr\xffin"}\n[1]\nnull\n')
    append_line(run.metrics_path, row(20))
    (run.path / "status.json").write_text("{")
    shown = ProgressReader(store).read()[0]
    assert (shown.state, shown.message, shown.tokens) == (
        "damaged",
        "status.json: altered or cut, or written by another version",
        0,
    )
    run.status_path.unlink()
    assert ProgressReader(store).read()[0].state == "damaged"
    run.metrics_path.unlink()
    assert ProgressReader(store).read()[0].state == "pending"


def test_of_a_long_run_the_last_rows_are_read(study, monkeypatch):
    store, requests = study
    run = store.run(requests[0].run_id)
    run.write_status(Status(state="running"))
    for step in range(1, 200):
        append_line(run.metrics_path, row(10 * step))
        if step == 50:
            append_line(run.metrics_path, {"kind": "eval", "tokens": 500, "step": 50, "val_loss": 2.5})
    parsed = []
    monkeypatch.setattr(progress, "parse_json", lambda line: parsed.append(line) or json.loads(line))
    reader = ProgressReader(store)
    shown = reader.read()[0]
    assert (shown.tokens, shown.val_loss) == (1990, 2.5)
    assert len(parsed) < 400
    parsed.clear()
    append_line(run.metrics_path, {"kind": "eval", "tokens": 1990, "step": 199, "val_loss": 2.25})
    assert reader.read()[0].val_loss == 2.25
    assert len(parsed) == 1


def test_formats():
    assert [format_count(n) for n in (None, 7, 1234, 1_234_567, 2.5e9)] == [
        "–",
        "7",
        "1.23k",
        "1.23M",
        "2.5B",
    ]
    assert [format_seconds(s) for s in (None, 62, 3723.4)] == ["–", "1:02", "1:02:03"]
