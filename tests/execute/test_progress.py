import pytest

from ablate.errors import UserError
from ablate.execute.display import format_count, format_seconds, summary
from ablate.execute.lock import executor_lock, is_running
from ablate.execute.progress import ProgressReader
from ablate.store import Status


def row(tokens, **values):
    return {"kind": "train", "tokens": tokens, "step": 1, "loss": 2.0, "tokens_per_sec": 10.0} | values


def test_progress_reads_on_from_where_it_was(study):
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create(requests[0].config)
    run.write_status(Status(state="running", attempt=1))
    reader = ProgressReader(store)
    assert reader.read()[0].tokens == 0
    run.append_metric(row(10))
    run.append_metric({"kind": "eval", "tokens": 10, "step": 1, "val_loss": 1.5})
    first = reader.read([requests[0].run_id])[0]
    assert (first.tokens, first.loss, first.val_loss, first.seconds_left) == (10, 2.0, 1.5, 2.0)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind": "train", "tok')  # a line that is being written
    assert reader.read()[0].tokens == 10
    run.metrics_path.write_bytes(b"")  # a new attempt
    run.append_metric(row(5))
    assert reader.read()[0].tokens == 5


def test_a_leftover_running_is_read_as_interrupted(study):
    store, requests = study
    store.run(requests[0].run_id).create(requests[0].config)
    store.run(requests[0].run_id).write_status(Status(state="running", attempt=1))
    runs = ProgressReader(store, executor_alive=False).read()
    assert runs[0].state == "interrupted"
    assert summary(runs) == "0 of 4 done · 3 pending · 1 interrupted"


def test_one_executor_a_study(tmp_path):
    assert not is_running(tmp_path)
    with executor_lock(tmp_path / "s"):
        assert is_running(tmp_path / "s")
        with pytest.raises(UserError, match="is being run by process"), executor_lock(tmp_path / "s"):
            pass
    assert not is_running(tmp_path / "s")


def test_formats():
    assert [format_count(n) for n in (None, 7, 1234, 1_234_567, 2.5e9)] == [
        "–",
        "7",
        "1.23k",
        "1.23M",
        "2.5B",
    ]
    assert [format_seconds(s) for s in (None, 62, 3723.4)] == ["–", "1:02", "1:02:03"]
