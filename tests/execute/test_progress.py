from datetime import UTC, datetime

import pytest

from ablate.base.counts import count_text
from ablate.base.files import append_line
from ablate.cli.display import end_text, summary
from ablate.execute import progress
from ablate.execute.progress import RunProgress, read_progress, seconds_to_end
from ablate.store import Status


def add(run, tokens, kind="train", **values):
    defaults = (
        {"val_loss": 1.5} if kind == "eval" else {"loss": 2.0, "tokens_per_sec": 10.0}
    )
    append_line(
        run.metrics_path,
        {"kind": kind, "tokens": tokens, "step": 1, **defaults, **values},
    )


@pytest.fixture
def begun(study):
    """A store whose first run is at work, and that run."""
    run = study[0].run(study[1][0].run_id)
    run.create({})
    run.write_status(Status(state="running", attempt=1, started_unix=1000.0))
    return study[0], run


def read(store, **options):
    return read_progress(store, store.plan(), **options)


def first(store, **options):
    return read(store, **options)[0]


def test_progress_is_that_of_the_newest_rows(begun, monkeypatch):
    store, run = begun
    monkeypatch.setattr(progress, "_TAIL_BYTES", 200)
    assert first(store).tokens == 0
    add(run, 8)
    add(run, 8, "eval", val_loss=2.5)
    for step in range(100):  # the evaluation lies before the end that is read first
        add(run, 10 + step // 10)
    [only] = read(store, only=[run.run_id])
    assert (only.tokens, only.loss, only.val_loss, only.tokens_per_sec) == (
        19,
        2.0,
        2.5,
        10.0,
    )
    with run.metrics_path.open("ab") as file:
        # damage, and a line to come
        file.write(b'{"kind": "tr\xffin"}\n[1]\nnull\n{"kind": "train", "tok')
    assert first(store).tokens == 19
    run.metrics_path.write_bytes(b"")  # a new attempt
    add(run, 5)
    assert first(store).tokens == 5


def test_states_are_shown_as_what_they_are(begun):
    store, run = begun
    for alive, state in ((True, "running"), (None, "running"), (False, "interrupted")):
        shown = summary(read(store, executor_alive=alive))
        assert shown == f"0 of 4 done · 3 pending · 1 {state}"
    add(run, 10)
    run.status_path.write_text("{")
    shown = first(store)
    assert (shown.state, shown.tokens) == ("damaged", 0)
    assert shown.message == "status.json: altered or cut, or written by another version"
    for path, state in ((run.status_path, "damaged"), (run.metrics_path, "pending")):
        path.unlink()
        assert first(store).state == state


def test_a_runs_pace_comes_from_its_rows_and_its_attempt(begun):
    store, run = begun
    add(run, 8, time_unix=1018.0)
    assert first(store).pace is None
    add(run, 10, "eval", time_unix=1030.0)
    assert first(store).pace == pytest.approx(3.0)
    assert first(store).seconds_left == pytest.approx(20 * 3)
    # one after the other
    assert seconds_to_end(read(store)) == pytest.approx(20 * 3 + 3 * 30 * 3)
    run.write_status(Status(state="running", attempt=2, started_unix=1000.0))
    # by tokens_per_sec: the time between is no pace
    assert first(store).pace == pytest.approx(0.1)
    run.write_status(
        Status(state="finished", attempt=1, started_unix=1000.0, ended_unix=1050.0)
    )
    assert first(store).pace == pytest.approx(5.0)
    assert first(store, executor_alive=False).pace is None


def test_the_end_of_a_study_counts_what_runs_beside_what():
    def run(arm, seed, state, tokens=0, pace=None):
        return RunProgress(
            run_id="",
            arm=arm,
            seed=seed,
            state=state,
            tokens=tokens,
            budget=100,
            pace=pace,
        )

    going = [run("a", 0, "running", 50, 1.0), run("b", 0, "running", 50, 3.0)]
    later = [
        run("b", 1, "pending"),
        run("a", 1, "pending"),
        run("c", 1, "failed"),
        run("c", 0, "stopped"),
    ]
    assert seconds_to_end(going) == 150
    assert seconds_to_end(going + later) == (50 + 150 + 300 + 100) / 2
    assert seconds_to_end(later) is seconds_to_end([run("a", 0, "running", 10)]) is None
    assert (
        seconds_to_end([run("c", 0, "running", 0), run("a", 0, "finished", 100, 1.0)])
        == 100
    )
    now = datetime(2026, 11, 23, 14, 20, tzinfo=UTC)
    assert end_text(later, at_most=False) == ""
    for pace, at_most, text in (
        (3.0, False, "ends about Mon 23 Nov 14:22 (2 min left)"),
        (300.0, True, "ends by Mon 23 Nov 18:30 (4.2 h left)"),
    ):
        assert (
            end_text([run("a", 0, "running", 50, pace)], at_most=at_most, now=now)
            == text
        )


def test_formats():
    assert [count_text(n) for n in (999, 1234, 999_499, 999_999, 2.5e9)] == [
        "999", "1.23k", "999k", "1M", "2.5B",
    ]  # fmt: skip
