import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line, write_record
from ablate.cli.display import end_text, format_count, format_seconds, summary
from ablate.execute import progress
from ablate.execute.eta import seconds_to_end
from ablate.execute.progress import Pace, ProgressReader, RunProgress
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases
from ablate.store.metrics import parse_rows
from ablate.store.plan_file import LockedArm, LockedPlan, Target
from ablate.store.study_lock import is_running, kept_still, running


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


def one_arm(target):
    arms = (LockedArm(name="a", runs=()),)
    return LockedPlan(study="s", baseline="a", target=Target(kind="val_loss", value=target), arms=arms)


def test_who_starts_while_another_writes_its_plan_waits_for_that_plan(tmp_path, monkeypatch):
    store = StudyStore(tmp_path / "s")
    plans = [one_arm(target=1.0), one_arm(target=2.0)]
    with running(store, plans[0]):
        pass
    write, writing, outcome = StudyStore.write_plan, threading.Event(), []

    def write_slowly(self, plan):
        writing.set()
        time.sleep(0.5)  # a slow fsync
        write(self, plan)

    def start_the_old_plan():
        try:
            with running(store, plans[0]):
                outcome.append("joined")
        except UserError as error:
            outcome.append(str(error))

    monkeypatch.setattr(StudyStore, "write_plan", write_slowly)
    other = threading.Thread(target=start_the_old_plan)
    with ExitStack() as held:
        starter = threading.Thread(target=lambda: held.enter_context(running(store, plans[1])))
        starter.start()
        assert writing.wait(10)
        other.start()
        starter.join()
        other.join()
        assert store.plan() == plans[1]
    assert "with another plan" in outcome[0]


def test_who_waits_while_the_study_is_removed_begins_it_anew(tmp_path):
    store = StudyStore(tmp_path / "s")
    plan = one_arm(target=2.0)
    with running(store, plan):
        pass
    begun = []

    def start():
        with running(store, plan):
            begun.append(store.plan() == plan)

    with kept_still(store.path) as still:
        assert still
        starter = threading.Thread(target=start)
        starter.start()
        time.sleep(0.2)
        assert begun == []
        shutil.rmtree(store.path)
    starter.join()
    assert begun == [True]


def test_a_reader_who_may_not_look_does_not_know_whether_it_runs(study, monkeypatch):
    store, requests = study
    store.run(requests[0].run_id).create(asdict(requests[0].config))
    store.run(requests[0].run_id).write_status(Status(state="running", attempt=1))

    def refuse(*_arguments):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert is_running(store.path) is None
    assert ProgressReader(store, executor_alive=None).read()[0].state == "running"


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
    monkeypatch.setattr(progress, "parse_rows", lambda lines: parsed.extend(lines) or parse_rows(lines))
    reader = ProgressReader(store)
    shown = reader.read()[0]
    assert (shown.tokens, shown.val_loss) == (1990, 2.5)
    assert len(parsed) < 400
    parsed.clear()
    append_line(run.metrics_path, {"kind": "eval", "tokens": 1990, "step": 199, "val_loss": 2.25})
    assert reader.read()[0].val_loss == 2.25
    assert len(parsed) == 1


def test_a_runs_pace_comes_from_its_rows(study):
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create(asdict(requests[0].config))
    lease = Leases(run.attempts).claim()
    lease.note("arithmetic", 0)
    started = lease.record.started_unix
    run.write_status(Status(state="running", attempt=1))
    reader = ProgressReader(store)

    def train(tokens, seconds):
        append_line(run.metrics_path, row(tokens, step=tokens // 2, time_unix=started + seconds))

    train(2, 12)  # ten seconds for libraries, then one a token
    train(8, 18)
    assert reader.read()[0].pace is None
    append_line(
        run.metrics_path,
        {"kind": "eval", "tokens": 10, "step": 5, "time_unix": started + 28, "val_loss": 1.5},
    )
    assert reader.read()[0].pace == Pace(sec_to_begin=pytest.approx(8), sec_per_token=pytest.approx(2))
    assert seconds_to_end(reader.read()) == pytest.approx(20 * 2 + 3 * (8 + 30 * 2))  # one after the other
    lease.end("interrupted", "preempted")
    heir = Leases(run.attempts).claim(1)
    later = {"started_unix": started + 1000}
    write_record(run.attempts / "2.json", asdict(heir.record) | later)
    run.write_status(Status(state="running", attempt=2))
    append_line(run.metrics_path, row(20, step=10, time_unix=started + 1030))
    assert reader.read()[0].pace is None
    noted = {"resumed_from_step": 5, "fingerprint": "arithmetic"}
    write_record(run.attempts / "2.json", asdict(heir.record) | later | noted)
    assert reader.read()[0].pace == Pace(sec_to_begin=0, sec_per_token=pytest.approx(3))
    store.run(requests[1].run_id).write_status(Status(state="running", attempt=1))
    assert seconds_to_end(reader.read()) == pytest.approx(max(10 * 3 + 90, 90 + 90))


def test_the_end_of_a_study_counts_what_runs_beside_what():
    def run(arm, seed, state, tokens=0, pace=None):
        own = None if pace is None else Pace(sec_to_begin=10.0, sec_per_token=pace)
        return RunProgress(run_id="", arm=arm, seed=seed, state=state, tokens=tokens, budget=100, pace=own)

    going = [run("a", 0, "running", 50, 1.0), run("b", 0, "running", 50, 3.0)]
    later = [run("b", 1, "pending"), run("a", 1, "pending"), run("c", 1, "failed"), run("c", 0, "stopped")]
    assert seconds_to_end(going) == 150
    # a ends after 50 s, then b's second (310 s) beside it; where b has ended, at 150 s, a's second (110 s).
    assert seconds_to_end(going + later) == 360
    assert seconds_to_end(later) is None
    assert seconds_to_end([run("a", 0, "running", 10)]) is None
    assert seconds_to_end([run("c", 0, "running", 0), run("a", 0, "finished", 100, 1.0)]) == 110

    now = datetime(2026, 11, 23, 14, 20, tzinfo=UTC)
    assert end_text(later, at_most=False) == ""
    assert end_text(going, at_most=False, now=now) == "ends about 14:22 (2 min left)"
    slow = [run("a", 0, "running", 50, 300.0)]
    assert end_text(slow, at_most=True, now=now) == "ends by about 18:30 (4 h 10 min left at most)"
    slow = [run("a", 0, "running", 50, 6000.0)]
    assert end_text(slow, at_most=False, now=now) == "ends about Fri 27 Nov 01:40 (3 d 11 h left)"
    assert end_text([run("a", 0, "running", 90, 1.0)], at_most=False, now=now).endswith("(under 1 min left)")


def test_formats():
    assert [format_count(n) for n in (None, 7, 999, 1234, 999_499, 999_999, 1_234_567, 2.5e9)] == [
        *("–", "7", "999", "1.23k", "999k", "1M", "1.23M", "2.5B")
    ]
    assert [format_seconds(s) for s in (None, 62, 3723.4)] == ["–", "1:02", "1:02:03"]
