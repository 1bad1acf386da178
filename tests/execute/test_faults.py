"""What dies, hangs or fills up costs an attempt and nothing more; a run's own fault is not repeated."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ablate.base.files import read_json, read_record, write_record
from ablate.execute import driver, queue
from ablate.execute.driver import execute_study, request_stop
from ablate.execute.pending_runs import missing_runs
from ablate.run.config import ResourcesConfig
from ablate.store import Status, leases
from ablate.store.leases import Leases
from tests.waiting import is_alive, wait_until

HERE = Path(__file__).parent

pytestmark = pytest.mark.xdist_group("ray")
LONG = pytest.mark.exhaustive
ENDED = "s: the driver ended it"


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(driver, "PAUSES_SEC", (0.1, 0.1, 0.1))


def ledger(run):
    leases = Leases(run.attempts)
    return [leases.read(number) for number in range(1, leases.latest() + 1)]


@pytest.mark.parametrize(
    ("trainer", "outcome", "message"),
    [
        ("dies_once", None, None),
        pytest.param("hangs_once", "interrupted", "no progress for", marks=LONG),
        pytest.param("asks_on_once", "interrupted", "no progress for", marks=LONG),
        pytest.param("never_returns_to_python_once", "interrupted", ENDED, marks=LONG),
        pytest.param("is_stopped_once", "interrupted", ENDED, marks=LONG),
        pytest.param(
            "gpu_fails_once",
            "interrupted",
            "the GPU failed: CUDA error: an illegal memory access",
            marks=LONG,
        ),
        ("disk_is_full_once", "interrupted", "no space left on the storage"),
    ],
)
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_what_may_pass_is_tried_again(study, trainer, outcome, message, monkeypatch):
    store, requests = study
    monkeypatch.setattr(queue, "_LATER_SEC", 10.0)
    if trainer == "is_stopped_once":  # as on another machine than the driver's
        monkeypatch.setattr(leases, "this_machine", lambda: "that of the driver")
    # Not so short that a busy machine's start of a run is taken for a hang.
    resources = ResourcesConfig(
        hang_after_sec=10.0 if "no progress" in str(message) or message == ENDED else 600.0
    )
    todo = [dataclasses.replace(request, resources=resources) for request in requests[:2]]
    result = execute_study(store, todo, trainer=f"fake_trainers:{trainer}")
    assert set(result.states.values()) == {"finished"}
    for request in todo:
        run = store.run(request.run_id)
        first, second = ledger(run)
        assert (first.outcome, second.outcome) == (outcome, "finished")
        assert (message is None) == (first.message is None)
        assert message is None or message in first.message
        assert [row["tokens"] for row in run.metrics() if row["kind"] == "train"] == [10, 20, 30]


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("damage", [False, True])
def test_a_run_of_a_machine_that_is_gone_is_taken_over(study, damage, monkeypatch):
    monkeypatch.setattr(queue, "STALE_SEC", 1.0)
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create(dataclasses.asdict(requests[0].config))
    run.write_status(Status(state="running", attempt=1))
    Leases(run.attempts).claim()
    record = run.attempts / "1.json"
    write_record(record, read_record(record) | {"machine": "one that is gone"})
    if damage:
        record.write_bytes(record.read_bytes()[:-3])
    result = execute_study(store, requests[:1], trainer="fake_trainers:quick")
    assert result.states == {requests[0].run_id: "finished"}
    first, second = ledger(run)
    assert (first and first.outcome, second.outcome) == (None, "finished")


@LONG
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_what_keeps_dying_fails_alone_after_some_attempts(study):
    store, requests = study
    execute_study(store, requests[:1], trainer="fake_trainers:dies")
    run = store.run(requests[0].run_id)
    assert run.status().state == "failed"
    assert run.status().message == (
        "worker lost: its process was killed, as where memory runs out, or crashed (4 attempts)"
    )
    assert len(ledger(run)) == 4
    execute_study(store, requests[1:], trainer="fake_trainers:quick")
    assert missing_runs(store, requests) == []


@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_out_of_memory_on_one_run_is_not_tried_again_and_stops_no_other(study):
    store, requests = study
    result = execute_study(store, requests, trainer="fake_trainers:out_of_memory")
    assert sorted(result.states.values()) == ["failed", "finished", "finished", "finished"]
    failed = store.run(requests[1].run_id)
    assert len(ledger(failed)) == 1
    assert "a smaller training.micro_batch_size needs less" in failed.status().message


def num_running(store, requests):
    return sum(store.run(request.run_id).state() == "running" for request in requests)


@pytest.mark.usefixtures("local_ray")
def test_a_request_to_stop_is_heard_by_who_runs_the_study_now(study):
    store, requests = study
    request_stop(store.path)  # one of before it began, which is none of its
    asked = []

    def ask():
        if not asked and num_running(store, requests) == 2:
            asked.append(request_stop(store.path))

    outcome = execute_study(store, requests, trainer="fake_trainers:waits_for_the_stop", on_poll=ask)
    assert outcome.interrupted
    states = sorted(store.run(request.run_id).state() for request in requests)
    assert states == ["interrupted", "interrupted", "pending", "pending"]
    execute_study(store, requests, trainer="fake_trainers:quick")
    assert missing_runs(store, requests) == []


DRIVER = """
    import sys
    sys.path.insert(0, {here!r})
    from four_runs import requests_of
    from ablate.execute.driver import execute_study
    from ablate.store import StudyStore
    from pathlib import Path

    begun = []

    def say_so():
        if not begun:
            begun.append(print("begun", flush=True))

    store, requests = requests_of(Path({storage!r}))
    outcome = execute_study(store, requests, trainer="fake_trainers:{trainer}", on_poll=say_so)
    print(sorted(outcome.states.values()), flush=True)
"""


def start_driver(storage, trainer="slow"):
    script = textwrap.dedent(DRIVER.format(here=str(HERE), storage=str(storage), trainer=trainer))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@LONG
def test_what_a_run_started_ends_with_its_worker_however_that_dies(study):
    store, requests = study
    process = start_driver(store.path, trainer="starts_others")
    started = [store.run(request.run_id).path / "started.json" for request in requests[:2]]
    wait_until(lambda: all(path.exists() for path in started), process)
    by_killed, by_killed_driver = (json.loads(path.read_text()) for path in started)
    wait_until(lambda: not any(is_alive(pid) for pid in by_killed))
    assert all(is_alive(pid) for pid in by_killed_driver)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in by_killed_driver))


@LONG
@pytest.mark.usefixtures("local_ray")
def test_what_a_training_function_leaves_ends_with_its_run(study):
    store, requests = study
    own = [
        dataclasses.replace(
            one, config=dataclasses.replace(one.config, trainer="fake_trainers:leaves_a_child")
        )
        for one in requests
    ]
    started = [store.run(one.run_id).path / "started.json" for one in own[:2]]
    go = store.run(own[0].run_id).path.parent / "go"

    def look():
        if all(path.exists() for path in started) and not any(is_alive(*read_json(path)) for path in started):
            go.touch()

    outcome = execute_study(store, own, on_poll=look)
    assert list(outcome.states.values()) == ["finished"] * 4


@LONG
def test_two_who_start_the_same_study_share_its_runs(study):
    store, requests = study
    both = [start_driver(store.path) for _ in range(2)]
    for process in both:
        assert process.communicate()[0].strip().endswith(str(["finished"] * 4))
        assert process.returncode == 0
    for request in requests:
        run = store.run(request.run_id)
        assert [record.outcome for record in ledger(run)] == ["finished"]
        assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    owners = {ledger(store.run(request.run_id))[0].pid for request in requests}
    assert len(owners) > 1


@LONG
def test_a_driver_that_is_killed_takes_its_workers_along_and_the_next_goes_on(study):
    store, requests = study
    first = start_driver(store.path)
    wait_until(lambda: any(store.run(request.run_id).metrics_path.exists() for request in requests), first)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    held = [record.pid for request in requests for record in ledger(store.run(request.run_id))]
    wait_until(lambda: not any(is_alive(pid) for pid in held))
    second = start_driver(store.path)
    assert second.communicate()[0].strip().endswith(str(["finished"] * 4))
    for request in requests:
        rows = store.run(request.run_id).metrics()
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]


@LONG
def test_a_request_to_stop_is_heard_by_every_driver(study):
    store, requests = study
    request_stop(store.path)  # one of before they began, which is none of theirs
    both = [start_driver(store.path, "waits_for_the_stop") for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "begun\n"
    wait_until(lambda: num_running(store, requests) == 2, *both)
    request_stop(store.path)
    for process in both:
        assert "finished" not in process.communicate()[0]
    states = {store.run(request.run_id).state() for request in requests}
    assert states <= {"interrupted", "pending"}
    again = start_driver(store.path)
    assert again.communicate()[0].strip().endswith(str(["finished"] * 4))
