"""Real Ray tasks and a real run store: what dies, hangs or fills up costs an attempt and nothing more.

The rules of the queue: ``test_queue.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.files import read_json, read_record, write_record
from ablate.execute import driver, queue
from ablate.execute.driver import execute_study, request_stop
from ablate.execute.pending_runs import find_todo
from ablate.execute.progress import ProgressReader, count_states
from ablate.run.config import ResourcesConfig
from ablate.store import Status, leases
from ablate.store.leases import Leases
from tests.waiting import is_alive, wait_until

HERE = Path(__file__).parent
FINISHED = ["finished"] * 4
ENDED = "s: the driver ended it"

pytestmark = pytest.mark.xdist_group("ray")
LONG = pytest.mark.exhaustive
local = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(driver, "PAUSES_SEC", (0.1, 0.1, 0.1))


def execute(study, trainer, requests=None, **options):
    requests = study[1] if requests is None else requests
    return execute_study(study[0], requests, trainer=f"fake_trainers:{trainer}", **options)


def states(study):
    return [study[0].run(request.run_id).state() for request in study[1]]


def ledger(run):
    leases = Leases(run.attempts)
    return [leases.read(number) for number in range(1, leases.latest() + 1)]


def steps(run):
    return [row["step"] for row in run.metrics() if row["kind"] == "train"]


@local
def test_every_run_is_executed_once_and_a_failing_one_stops_no_other(study):
    store, requests = study
    end = execute(study, "one_fails_and_one_diverges")
    assert not end.interrupted
    assert states(study) == ["finished", "failed", "diverged", "failed"]
    assert end.states == dict(zip((request.run_id for request in requests), states(study), strict=True))
    runs = [store.run(request.run_id) for request in requests]
    assert [row["val_loss"] for row in runs[0].metrics() if row["kind"] == "eval"] == [3.0, 1.5, 1.0]
    assert runs[0].environment()["backend_mode"] == "emulated"
    assert runs[1].status().message == "RuntimeError: a bug in the trainer"
    log = runs[1].attempt_log(1).read_text()
    assert log.startswith("about to fail")
    assert "Traceback" in log
    assert "a smaller training.micro_batch_size needs less" in runs[3].status().message
    assert [len(ledger(run)) for run in runs] == [1] * 4
    assert find_todo(store, requests).runs == ()
    retried = find_todo(store, requests, retry_failed=True).runs
    execute(study, "quick", [*retried, requests[0]])  # a finished run stays as it is
    assert states(study) == ["finished", "finished", "diverged", "finished"]
    assert [len(ledger(run)) for run in runs] == [1, 2, 1, 2]


@local
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "request"])
def test_an_interrupt_stops_cleanly_and_leaves_the_rest_pending(study, how):
    store, requests = study
    request_stop(store.path)  # one of before it began, which is none of its
    reader, sent = ProgressReader(store), []

    def interrupt_once_running():
        if not sent and count_states(reader.read()).get("running", 0) == 2:
            sent.append(request_stop(store.path) if how == "request" else os.kill(os.getpid(), how))

    assert execute(study, "waits_for_the_stop", on_poll=interrupt_once_running).interrupted
    assert sorted(states(study)) == ["interrupted", "interrupted", "pending", "pending"]
    assert len(find_todo(store, requests).runs) == 4
    assert not list(store.path.glob(".stop-*"))


@local
def test_runs_that_nobody_needs_are_ended_and_go_on_when_they_are_needed(study):
    store, requests = study
    reader = ProgressReader(store)

    def unneeded():
        counts = count_states(reader.read())
        settled = counts.get("finished", 0) == 1 and counts.get("running", 0) == 2
        return {request.run_id: "it is settled" for request in requests[1:]} if settled else {}

    end = execute(study, "only_seed_0_ends", unneeded=unneeded)
    assert not end.interrupted
    assert states(study) == ["finished", "stopped", "stopped", "stopped"]
    runs = [store.run(request.run_id) for request in requests]
    assert {run.status().message for run in runs[1:]} == {"it is settled"}
    assert sorted(record.outcome for run in runs[1:] for record in ledger(run)) == ["stopped", "stopped"]
    assert not any(run.stop_path.exists() for run in runs)
    execute(study, "quick", find_todo(store, requests).runs)
    assert states(study) == FINISHED


@local
@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (ResourcesConfig(cpus=1000), r"1 × \(1000 CPU, 0 GPU\), which the cluster does not have"),
        (ResourcesConfig(devices_per_run=64), r"64 × \(1 CPU, 0 GPU\), which the cluster does not have"),
    ],
)
def test_resources_that_no_node_has_are_refused_before_anything_runs(study, resources, said):
    with pytest.raises(UserError, match=said):
        execute(study, "quick", [replace(study[1][0], resources=resources)])
    assert states(study) == ["pending"] * 4


@pytest.mark.parametrize(
    ("trainer", "outcome", "message"),
    [
        ("dies_once", None, None),
        pytest.param("hangs_once", "interrupted", "no progress for", marks=LONG),
        pytest.param("asks_on_once", "interrupted", "no progress for", marks=LONG),
        pytest.param("never_returns_to_python_once", "interrupted", ENDED, marks=LONG),
        pytest.param("is_stopped_once", "interrupted", ENDED, marks=LONG),
        pytest.param("gpu_fails_once", "interrupted", "the GPU failed: CUDA error: an illegal", marks=LONG),
        ("disk_is_full_once", "interrupted", "no space left on the storage"),
    ],
)
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_what_may_pass_is_tried_again(study, trainer, outcome, message, monkeypatch):
    monkeypatch.setattr(queue, "_LATER_SEC", 10.0)
    if trainer == "is_stopped_once":  # as on another machine than the driver's
        monkeypatch.setattr(leases, "this_machine", lambda: "that of the driver")
    # Not so short that a busy machine's start of a run is taken for a hang.
    hangs = "no progress" in str(message) or message == ENDED
    resources = ResourcesConfig(hang_after_sec=10.0 if hangs else 600.0)
    todo = [replace(request, resources=resources) for request in study[1][:2]]
    assert set(execute(study, trainer, todo).states.values()) == {"finished"}
    for run in (study[0].run(request.run_id) for request in todo):
        first, second = ledger(run)
        assert (first.outcome, second.outcome) == (outcome, "finished")
        assert (message or "") in (first.message or "")
        assert steps(run) == [1, 2, 3]


@local
@pytest.mark.parametrize("damage", [False, True])
def test_a_run_of_a_machine_that_is_gone_is_taken_over(study, damage, monkeypatch):
    monkeypatch.setattr(
        Leases, "__init__", lambda self, folder, _=0, init=Leases.__init__: init(self, folder, 1.0)
    )
    run = study[0].run(study[1][0].run_id)
    run.create(asdict(study[1][0].config))
    run.write_status(Status(state="running", attempt=1))
    Leases(run.attempts).claim()
    record = run.attempts / "1.json"
    write_record(record, read_record(record) | {"machine": "one that is gone"})
    if damage:
        record.write_bytes(record.read_bytes()[:-3])
    assert list(execute(study, "quick", study[1][:1]).states.values()) == ["finished"]
    first, second = ledger(run)
    assert (first and first.outcome, second.outcome) == (None, "finished")


@LONG
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_what_keeps_dying_fails_alone_after_some_attempts(study):
    execute(study, "dies", study[1][:1])
    run = study[0].run(study[1][0].run_id)
    assert run.status().state == "failed"
    assert run.status().message.startswith("worker lost: ")
    assert run.status().message.endswith("(4 attempts)")
    assert len(ledger(run)) == 4


@LONG
@local
def test_what_a_training_function_leaves_ends_with_its_run(study):
    own = [
        replace(one, config=replace(one.config, trainer="fake_trainers:leaves_a_child")) for one in study[1]
    ]
    started = [study[0].run(one.run_id).path / "started.json" for one in own[:2]]

    def look():
        if all(path.exists() for path in started) and not any(is_alive(*read_json(path)) for path in started):
            (study[0].path / "runs" / "go").touch()

    assert list(execute(study, "quick", own, on_poll=look).states.values()) == FINISHED


DRIVER = """
    import sys
    sys.path.insert(0, {here!r})
    from four_runs import requests_of
    from ablate.execute.driver import execute_study
    from pathlib import Path

    begun = []

    def say_so():
        if not begun:
            begun.append(print("begun", flush=True))

    store, requests = requests_of(Path({storage!r}))
    outcome = execute_study(store, requests, trainer="fake_trainers:{trainer}", on_poll=say_so)
    print(list(outcome.states.values()), flush=True)
"""


def start_driver(study, trainer="slow"):
    script = textwrap.dedent(DRIVER.format(here=str(HERE), storage=str(study[0].path), trainer=trainer))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@LONG
def test_what_a_run_started_ends_with_its_worker_however_that_dies(study):
    process = start_driver(study, "starts_others")
    started = [study[0].run(request.run_id).path / "started.json" for request in study[1][:2]]
    wait_until(lambda: all(path.exists() for path in started), process)
    by_killed, by_killed_driver = (json.loads(path.read_text()) for path in started)
    wait_until(lambda: not any(is_alive(pid) for pid in by_killed))
    assert all(is_alive(pid) for pid in by_killed_driver)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in by_killed_driver))


@LONG
def test_two_who_start_the_same_study_share_its_runs_and_hear_a_request_to_stop(study):
    store, requests = study
    request_stop(store.path)  # one of before they began, which is none of theirs
    both = [start_driver(study, "waits_for_the_stop") for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "begun\n"
    wait_until(lambda: states(study).count("running") == 2, *both)
    request_stop(store.path)
    for process in both:
        assert "finished" not in process.communicate()[0]
    assert set(states(study)) <= {"interrupted", "pending"}
    both = [start_driver(study) for _ in range(2)]
    for process in both:
        assert sorted(eval(process.communicate()[0].splitlines()[-1])) == FINISHED
    runs = [store.run(request.run_id) for request in requests]
    assert [steps(run) for run in runs] == [[1, 2, 3, 4, 5]] * 4
    assert [ledger(run)[-1].outcome for run in runs] == FINISHED
    assert len({ledger(run)[-1].pid for run in runs}) > 1


@LONG
def test_a_driver_that_is_killed_takes_its_workers_along_and_the_next_goes_on(study):
    runs = [study[0].run(request.run_id) for request in study[1]]
    first = start_driver(study)
    wait_until(lambda: any(run.metrics_path.exists() for run in runs), first)
    first.kill()
    first.wait()
    held = [record.pid for run in runs for record in ledger(run)]
    wait_until(lambda: not any(is_alive(pid) for pid in held))
    assert start_driver(study).communicate()[0].strip().endswith(str(FINISHED))
    assert [steps(run) for run in runs] == [[1, 2, 3, 4, 5]] * 4
