from __future__ import annotations

import pytest
from synthetic_study import line, reseal

from ablate.base.errors import UserError
from ablate.base.files import append_line, record_text
from ablate.results.frames import load_frames
from ablate.store import StudyStore
from ablate.store.leases import Leases
from ablate.store.plan_file import plan_to_json


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
    reseal(first_run(store))
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
    reseal(run)
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
    reseal(first_run(store))
    frames = load_frames(store)
    assert frames.evals["val_loss"].tolist() == [3, 2]
    assert "2 evaluations without a finite loss" in frames.faults[0]


def test_an_evaluation_written_again_counts_once(make_study):
    store = make_study({"a": [line(3, 2)]})
    append_line(first_run(store).metrics_path, {"kind": "eval", "tokens": 100, "step": 1, "val_loss": 2.9})
    reseal(first_run(store))
    frames = load_frames(store)
    assert frames.evals[["tokens", "val_loss"]].to_numpy().tolist() == [[100, 2.9], [200, 2]]


def test_runs_that_never_started_and_a_damaged_status(make_study):
    store = make_study({"a": [line(3, 2), line(3, 2)]}, states={("a", 1): "pending"})
    (first_run(store).path / "status.json").write_text("{")
    frames = load_frames(store)
    assert frames.runs["state"].tolist() == ["damaged", "pending"]
    assert "status.json: altered or cut" in frames.faults[0]


FILES = [
    "status.json",
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "diagnostics.jsonl",
    "attempts/1.json",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["digit", "cut", "gone"])
def test_nothing_of_a_damaged_run_is_a_number(make_study, file, damage):
    store = make_study({"a": [line(3, 2), line(3, 1)]})
    run = first_run(store)
    Leases(run.attempts).claim().end("finished")
    run.diagnostics_path.write_text('{"kind": "diagnosis", "tokens": 1}\n')
    reseal(run)
    assert load_frames(store).faults == ()
    path = run.path / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-2] if damage == "cut" else content.replace(b"1", b"7", 1))
    frames = load_frames(store)
    assert frames.runs["state"].tolist() == ["damaged", "finished"]
    assert frames.evals["run_id"].tolist() == [frames.runs["run_id"][1]] * 2
    assert run.run_id not in frames.environments
    assert run.run_id not in frames.attempts
    assert frames.runs["tokens"].tolist() == [0, 200]
    (fault,) = frames.faults
    assert fault.startswith(f"{run.path}: {file}")


def test_of_a_run_that_goes_on_a_checkpoint_vouches_for_the_rows(make_study):
    store = make_study({"a": [line(3, 2, 1)]}, states={("a", 0): "running"})
    run = first_run(store)
    append_line(run.metrics_path, {"kind": "eval", "tokens": 400, "step": 4, "val_loss": 0.5})
    frames = load_frames(store)
    assert (frames.evals["val_loss"].tolist(), frames.faults) == ([3, 2, 1], ())
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().replace(b"2", b"1"))
    frames = load_frames(store)
    assert frames.evals["val_loss"].tolist() == []
    assert "the rows of metrics.jsonl before it are damaged" in frames.faults[0]


def test_a_plan_that_cannot_be_used(make_study, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_frames(StudyStore(tmp_path / "nothing"))
    store = make_study({"a": [line(3, 2)]})
    good = plan_to_json(store.plan())
    for text in (b"{", b"[]", b"", good | {"format": 99}, good | {"baseline": "zzz"}):
        store.plan_path.write_bytes(text if isinstance(text, bytes) else record_text(text))
        with pytest.raises(UserError, match=r"plan\.lock\.json"):
            load_frames(store)
