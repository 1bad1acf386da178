import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.cli.display import end_text, format_count, summary
from ablate.execute import progress
from ablate.execute.progress import ProgressReader, RunProgress, seconds_to_end
from ablate.store import Status, StudyStore
from ablate.store.metrics import parse_rows
from ablate.store.plan_file import LockedArm, LockedPlan, Target
from ablate.store.runs import is_running, kept_still, running


def add(run, tokens, kind="train", **values):
    own = {"val_loss": 1.5} if kind == "eval" else {"loss": 2.0, "tokens_per_sec": 10.0}
    append_line(run.metrics_path, {"kind": kind, "tokens": tokens, "step": 1, **own, **values})


@pytest.fixture
def begun(study):
    """A store whose first run is at work, and that run."""
    run = study[0].run(study[1][0].run_id)
    run.create(asdict(study[1][0].config))
    run.write_status(Status(state="running", attempt=1, started_unix=1000.0))
    return study[0], run


def test_progress_reads_on_from_where_it_was(begun):
    store, run = begun
    reader = ProgressReader(store)
    assert reader.read()[0].tokens == 0
    add(run, 10)
    add(run, 10, "eval")
    first = reader.read([run.run_id])[0]
    assert (first.tokens, first.loss, first.val_loss, first.seconds_left) == (10, 2.0, 1.5, 2.0)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind": "train", "tok')  # a line that is being written
    assert reader.read()[0].tokens == 10
    run.metrics_path.write_bytes(b"")  # a new attempt
    add(run, 5)
    assert reader.read()[0].tokens == 5


def test_a_leftover_running_is_read_as_interrupted(begun):
    for alive, said in (
        (True, "3 pending · 1 running"),
        (None, "3 pending · 1 running"),
        (False, "3 pending · 1 interrupted"),
    ):
        assert summary(ProgressReader(begun[0], executor_alive=alive).read()) == f"0 of 4 done · {said}"


def test_damaged_files_are_shown_as_what_they_are(begun):
    store, run = begun
    add(run, 10)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind": "tr\xffin"}\n[1]\nnull\n')
    add(run, 20)
    assert ProgressReader(store).read()[0].tokens == 20
    run.status_path.write_text("{")
    shown = ProgressReader(store).read()[0]
    assert (shown.state, shown.tokens) == ("damaged", 0)
    assert shown.message == "status.json: altered or cut, or written by another version"
    for path, state in ((run.status_path, "damaged"), (run.metrics_path, "pending")):
        path.unlink()
        assert ProgressReader(store).read()[0].state == state


def test_of_a_long_run_the_last_rows_are_read(begun, monkeypatch):
    store, run = begun
    for step in range(1, 200):
        add(run, 10 * step)
        if step == 50:
            add(run, 500, "eval", val_loss=2.5)
    parsed = []
    monkeypatch.setattr(progress, "parse_rows", lambda lines: parsed.extend(lines) or parse_rows(lines))
    reader = ProgressReader(store)
    shown = reader.read()[0]
    assert (shown.tokens, shown.val_loss) == (1990, 2.5)
    assert len(parsed) < 400
    parsed.clear()
    add(run, 1990, "eval", val_loss=2.25)
    assert reader.read()[0].val_loss == 2.25
    assert len(parsed) == 1


def test_a_runs_pace_comes_from_its_rows_and_its_attempt(begun):
    store, run = begun
    reader = ProgressReader(store)
    add(run, 8, time_unix=1018.0)
    assert reader.read()[0].pace is None
    add(run, 10, "eval", time_unix=1030.0)
    assert reader.read()[0].pace == pytest.approx(3.0)
    assert seconds_to_end(reader.read()) == pytest.approx(20 * 3 + 3 * 30 * 3)  # one after the other
    run.write_status(Status(state="running", attempt=2, started_unix=1000.0))
    assert reader.read()[0].pace == pytest.approx(0.1)  # by tokens_per_sec: the time between is no pace
    run.write_status(Status(state="finished", attempt=1, started_unix=1000.0, ended_unix=1050.0))
    assert reader.read()[0].pace == pytest.approx(5.0)
    assert ProgressReader(store, executor_alive=False).read()[0].pace is None


def test_the_end_of_a_study_counts_what_runs_beside_what():
    def run(arm, seed, state, tokens=0, pace=None):
        return RunProgress(run_id="", arm=arm, seed=seed, state=state, tokens=tokens, budget=100, pace=pace)

    going = [run("a", 0, "running", 50, 1.0), run("b", 0, "running", 50, 3.0)]
    later = [run("b", 1, "pending"), run("a", 1, "pending"), run("c", 1, "failed"), run("c", 0, "stopped")]
    assert seconds_to_end(going) == 150
    # a ends after 50 s, then b's second (300 s) beside it; where b has ended, at 150 s, a's second (100 s).
    assert seconds_to_end(going + later) == 350
    assert seconds_to_end(later) is seconds_to_end([run("a", 0, "running", 10)]) is None
    assert seconds_to_end([run("c", 0, "running", 0), run("a", 0, "finished", 100, 1.0)]) == 100
    now = datetime(2026, 11, 23, 14, 20, tzinfo=UTC)
    assert end_text(later, at_most=False) == ""
    for pace, at_most, said in (
        (3.0, False, "ends about Mon 23 Nov 14:22 (2 min left)"),
        (300.0, True, "ends by Mon 23 Nov 18:30 (4.2 h left)"),
        (6000.0, False, "ends about Fri 27 Nov 01:40 (3.5 days left)"),
    ):
        assert end_text([run("a", 0, "running", 50, pace)], at_most=at_most, now=now) == said


def test_formats():
    assert [format_count(n) for n in (None, 7, 999, 1234, 999_499, 999_999, 1_234_567, 2.5e9)] == [
        *("–", "7", "999", "1.23k", "999k", "1M", "1.23M", "2.5B")
    ]


def plan_of(target):
    arms = (LockedArm(name="a", runs=()),)
    return LockedPlan(study="s", baseline="a", target=Target(kind="val_loss", value=target), arms=arms)


FIRST, SECOND = plan_of(1.0), plan_of(2.0)


def test_two_may_run_a_study_if_they_mean_the_same_one(tmp_path, monkeypatch):
    store = StudyStore(tmp_path / "s")
    assert not is_running(store.path)
    with running(store, FIRST) as others:
        assert not others
        with running(store, FIRST) as shared:
            assert shared
        assert is_running(store.path)
        with pytest.raises(UserError, match="with another plan"), running(store, SECOND):
            pass
        assert store.plan() == FIRST

        def refuse(*_arguments):
            raise PermissionError

        with monkeypatch.context() as patch:  # who may not look does not know
            patch.setattr(Path, "open", refuse)
            assert is_running(store.path) is None
    assert not is_running(store.path)
    with running(store, SECOND) as shared:
        assert not shared
    assert store.plan() == SECOND


def test_who_starts_while_another_writes_its_plan_waits_for_that_plan(tmp_path, monkeypatch):
    store = StudyStore(tmp_path / "s")
    with running(store, FIRST):
        pass
    write, writing, outcome = StudyStore.write_plan, threading.Event(), []

    def write_slowly(self, plan):
        writing.set()
        time.sleep(0.5)  # a slow fsync
        write(self, plan)

    def start_the_old_plan():
        with pytest.raises(UserError, match="with another plan"), running(store, FIRST):
            pass
        outcome.append("refused")

    monkeypatch.setattr(StudyStore, "write_plan", write_slowly)
    with ExitStack() as held:
        starter = threading.Thread(target=lambda: held.enter_context(running(store, SECOND)))
        other = threading.Thread(target=start_the_old_plan)
        starter.start()
        assert writing.wait(10)
        other.start()
        starter.join()
        other.join()
        assert store.plan() == SECOND
    assert outcome == ["refused"]


def test_who_waits_while_the_study_is_removed_begins_it_anew(tmp_path):
    store = StudyStore(tmp_path / "s")
    with running(store, FIRST):
        pass
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
