from __future__ import annotations

import json

import pytest
from synthetic_study import line

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.reports.read.load import load_frames
from ablate.store import StudyStore
from ablate.store.lock import plan_to_json


def first_run(store):
    return store.run(store.plan().arms[0].runs[0].id)


def test_runs_and_evaluations(make_study):
    frames = load_frames(make_study({"a": [line(3, 2), line(3, 1)], "b": [line(4, 3)]}))
    assert frames.runs[["arm", "seed", "state"]].to_numpy().tolist() == [
        ["a", 0, "finished"],
        ["a", 1, "finished"],
        ["b", 0, "finished"],
    ]
    assert frames.evals["val_loss"].tolist() == [3, 2, 3, 1, 4, 3]
    assert frames.evals["tokens"].tolist() == [100, 200] * 3
    assert frames.runs["tokens_per_sec"].tolist() == [31000.0] * 3
    assert frames.runs["budget_tokens"].tolist() == [1_000_000] * 3
    assert frames.faults == ()
    assert set(frames.configs) == {"a", "b"}


def test_a_line_cut_by_a_crash_is_dropped_in_silence(make_study):
    store = make_study({"a": [line(3, 2)]})
    with first_run(store).metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval","tokens":300,"step":3,"val_lo')
    frames = load_frames(store)
    assert frames.evals["tokens"].tolist() == [100, 200]
    assert frames.faults == ()


def test_a_damaged_line_is_named_and_the_rest_read(make_study):
    store = make_study({"a": [line(3, 2)]})
    run = first_run(store)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval","tokens":\n')
        file.write(b'{"kind":"eval","tokens":"many","val_loss":1}\n')
    append_line(run.metrics_path, {"kind": "eval", "tokens": 300, "step": 3, "val_loss": 1.5})
    frames = load_frames(store)
    assert frames.evals["val_loss"].tolist() == [3, 2, 1.5]
    assert len(frames.faults) == 2
    assert "metrics.jsonl:5: not JSON" in frames.faults[0]
    assert "metrics.jsonl:6: an evaluation needs" in frames.faults[1]


def test_losses_that_are_not_finite_are_left_out_and_counted(make_study):
    store = make_study({"a": [line(3, 2)]})
    with first_run(store).metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval","tokens":300,"step":3,"val_loss":NaN}\n')
        file.write(b'{"kind":"eval","tokens":400,"step":4,"val_loss":Infinity}\n')
    frames = load_frames(store)
    assert frames.evals["val_loss"].tolist() == [3, 2]
    assert "2 evaluations without a finite loss" in frames.faults[0]


def test_an_evaluation_written_again_counts_once(make_study):
    store = make_study({"a": [line(3, 2)]})
    append_line(first_run(store).metrics_path, {"kind": "eval", "tokens": 100, "step": 1, "val_loss": 2.9})
    frames = load_frames(store)
    assert frames.evals[["tokens", "val_loss"]].to_numpy().tolist() == [[100, 2.9], [200, 2]]


def test_runs_that_never_started_and_a_damaged_status(make_study):
    store = make_study({"a": [line(3, 2), line(3, 2)]}, states={("a", 1): "pending"})
    (first_run(store).path / "status.json").write_text("{")
    frames = load_frames(store)
    assert frames.runs["state"].tolist() == ["interrupted", "pending"]
    assert "status.json: not a status" in frames.faults[0]


def test_a_plan_that_cannot_be_used(make_study, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_frames(StudyStore(tmp_path / "nothing"))
    store = make_study({"a": [line(3, 2)]})
    good = plan_to_json(store.plan())
    for text in ("{", "[]", json.dumps(good | {"format": 99}), json.dumps(good | {"baseline": "zzz"})):
        store.plan_path.write_text(text)
        with pytest.raises(UserError, match=r"plan\.lock\.json"):
            load_frames(store)
