import json

import pytest

from ablate.base.files import append_line, read_json, read_record, write_json_atomic, write_record
from ablate.store import RunDir, Status, StudyStore
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun, Target


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"a": float("nan")})
    monkeypatch.setattr(
        "os.fsync", lambda _handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["file.json"]
    assert path.stat().st_mode & 0o022 == 0  # others cannot write it


def test_a_run_that_never_started_is_pending(tmp_path):
    run = RunDir(tmp_path / "abc")
    assert run.run_id == "abc"
    assert run.status() == Status()
    assert list(run.metrics()) == []
    assert run.environment() == {}


def test_status_round_trips_and_ignores_what_it_does_not_know(tmp_path):
    run = StudyStore(tmp_path).run("abc")
    run.create({"seed": 1})
    run.write_status(Status(state="diverged", attempt=2, tokens=7, message="non-finite training loss"))
    content = read_record(run.status_path)
    assert content["updated_unix"] > 1e9
    write_record(run.status_path, content | {"later": True})
    assert run.status().state == "diverged"
    assert run.status().tokens == 7


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", ".hidden"])
def test_an_id_that_is_no_plain_name_leads_nowhere(tmp_path, name):
    with pytest.raises(ValueError, match="is no run's id"):
        StudyStore(tmp_path).run(name)


def test_a_line_that_was_cut_is_left_out(tmp_path):
    run = RunDir(tmp_path / "abc")
    run.create({})
    append_line(run.metrics_path, {"kind": "eval", "tokens": 1})
    append_line(run.metrics_path, {"kind": "eval", "tokens": 2})
    whole = run.metrics_path.read_bytes()
    for cut in range(len(whole)):
        run.metrics_path.write_bytes(whole[:cut])
        assert [row["tokens"] for row in run.metrics()] == [1, 2][: whole[:cut].count(b"\n")]
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(run.metrics_path, {"loss": float("inf")})


def test_a_study_knows_its_plan(tmp_path):
    store = StudyStore(tmp_path / "study")
    with pytest.raises(FileNotFoundError):
        store.plan()
    arm = LockedArm(name="a", differs={"model.width": (1, 2)}, runs=(LockedRun(id="0a", seed=1),))
    plan = LockedPlan(study="study", baseline="a", target=Target(kind="val_loss", value=2.0), arms=(arm,))
    store.write_plan(plan)
    assert store.plan() == plan
    assert json.loads(store.plan_path.read_text())["arms"][0]["differs"] == {"model.width": [1, 2]}
