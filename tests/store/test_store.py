import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from ablate.base.errors import UserError
from ablate.base.files import read_json, read_record, write_json_atomic, write_record
from ablate.store import Status, StudyStore
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun, Target
from ablate.store.study_lock import is_running, kept_still, running


def plan_of(target):
    runs = (LockedRun(id="0a", seed=1),)
    arm = LockedArm(name="a", differs={"model.width": (1, 2)}, runs=runs)
    target = Target(kind="val_loss", value=target)
    return LockedPlan(study="s", baseline="a", target=target, arms=(arm,))


FIRST = plan_of(1.0)
SECOND = plan_of(2.0)


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"a": float("nan")})
    monkeypatch.setattr(
        "os.fsync", Mock(side_effect=OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["file.json"]
    assert path.stat().st_mode & 0o022 == 0  # others cannot write it


def test_status_round_trips_and_ignores_what_it_does_not_know(tmp_path):
    run = StudyStore(tmp_path).run("abc")
    assert run.status() == Status()
    assert (run.metrics(), run.environment()) == ([], {})
    run.create({"seed": 1})
    run.write_status(Status(state="diverged", attempt=2, tokens=7, message="nan"))
    content = read_record(run.status_path)
    assert content["updated_unix"] > 1e9
    write_record(run.status_path, content | {"later": True})
    assert (run.status().state, run.status().tokens) == ("diverged", 7)


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", ".hidden"]
)
def test_an_id_that_is_no_plain_name_leads_nowhere(tmp_path, name):
    with pytest.raises(ValueError, match="is no run's id"):
        StudyStore(tmp_path).run(name)


def test_two_may_run_a_study_if_they_mean_the_same_one(tmp_path, monkeypatch):
    store = StudyStore(tmp_path / "s")
    assert not is_running(store.path)
    with running(store, FIRST) as others:
        assert not others
        with running(store, FIRST) as shared:
            assert shared
        assert is_running(store.path)
        with (
            pytest.raises(UserError, match="with another plan"),
            running(store, SECOND),
        ):
            pass
        assert store.plan() == FIRST
        with monkeypatch.context() as patch:  # who may not look does not know
            patch.setattr(Path, "open", Mock(side_effect=PermissionError))
            assert is_running(store.path) is None
    assert not is_running(store.path)
    with running(store, SECOND) as shared:
        assert not shared
    assert store.plan() == SECOND


def test_who_starts_while_another_writes_its_plan_waits_for_that_plan(
    tmp_path, monkeypatch
):
    store = StudyStore(tmp_path / "s")
    store.write_plan(FIRST)
    write = StudyStore.write_plan
    writing = threading.Event()
    refused = []

    def write_slowly(self, plan):
        writing.set()
        time.sleep(0.5)  # a slow fsync
        write(self, plan)

    def start_the_old_plan():
        with pytest.raises(UserError, match="with another plan"), running(store, FIRST):
            pass
        refused.append(True)

    monkeypatch.setattr(StudyStore, "write_plan", write_slowly)
    with ExitStack() as held:
        starter = threading.Thread(
            target=lambda: held.enter_context(running(store, SECOND))
        )
        other = threading.Thread(target=start_the_old_plan)
        starter.start()
        assert writing.wait(10)
        other.start()
        starter.join()
        other.join()
        assert store.plan() == SECOND
    assert refused


def test_who_waits_while_the_study_is_removed_begins_it_anew(tmp_path):
    store = StudyStore(tmp_path / "s")
    store.write_plan(FIRST)
    begun = []

    def start():
        with running(store, FIRST):
            begun.append(store.plan() == FIRST)

    with kept_still(store.path) as still:
        assert still
        starter = threading.Thread(target=start)
        starter.start()
        time.sleep(0.2)
        assert begun == []
        shutil.rmtree(store.path)
    starter.join()
    assert begun == [True]
