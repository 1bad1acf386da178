"""A result is taken from a neighbour only where it is the one that would be made here."""

import dataclasses
import json
import time

import pytest
from four_runs import requests_of

from ablate.base.files import append_line, write_record
from ablate.execute import pending_runs
from ablate.execute.environment import code_digest
from ablate.execute.fingerprint import fingerprint
from ablate.execute.pending_runs import copy_results, find_elsewhere, missing_runs
from ablate.run.config import ResourcesConfig
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases

ROW = {"kind": "eval", "tokens": 10, "step": 1, "val_loss": 3.0}


HERE = {"code": code_digest(), "gpu": None, "world_size": 1, "fingerprints": [fingerprint("cpu")]}


def end(run, *, state="finished", **environment):
    """Write a run as the worker leaves it."""
    lease = Leases(run.attempts).claim()
    run.attempt_log(1).write_text("printed\n")
    write_record(run.environment_path, HERE | environment)
    append_line(run.metrics_path, ROW)
    run.diagnostics_path.write_text('{"kind": "diagnosis"}\n')
    lease.end(state)
    run.write_status(Status(state=state, attempt=1, tokens=30, step=3, ended_unix=time.time()))


@pytest.fixture
def two(tmp_path):
    """A store whose four runs have ended, and another one, with the requests of the same runs."""
    there, requests = requests_of(tmp_path / "there")
    for request in requests:
        there.run(request.run_id).create(dataclasses.asdict(request.config))
        end(there.run(request.run_id))
    here = StudyStore(tmp_path / "here")
    (here.path / "runs").mkdir(parents=True)
    return there, here, requests


def files(run):
    return {
        path.relative_to(run.path): path.read_bytes()
        for path in run.path.rglob("*")
        if path.is_file() and path.name not in ("config.json", "status.json")
    }


def test_a_result_comes_whole_with_its_ledger(two):
    there, here, requests = two
    (there.run(requests[0].run_id).checkpoints).mkdir()
    there.run(requests[0].run_id).ask_to_stop("of the neighbour alone")
    config = requests[0].config
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, paths=["/elsewhere"]))
    own = dataclasses.replace(requests[0], config=config)
    asked = requests[1]  # asked for before, never begun
    here.run(asked.run_id).create(dataclasses.asdict(asked.config))
    assert copy_results(here, [own, requests[1]]) == {run.run_id: "there" for run in requests[:2]}
    run = here.run(own.run_id)
    assert run.config() == json.loads(json.dumps(dataclasses.asdict(own.config)))
    assert not run.checkpoints.exists()
    assert run.stop_reason() is None
    assert run.state() == "finished"
    assert files(run) == {
        path: content for path, content in files(there.run(own.run_id)).items() if path.name != "stop"
    }
    names = {"1.json", "1.log", "diagnostics.jsonl", "environment.json", "metrics.jsonl"}
    assert {path.name for path in files(run)} == names
    assert missing_runs(here, requests) == requests[2:]
    assert sorted(path.name for path in (here.path / "runs").iterdir()) == [r.run_id for r in requests[:2]]


def test_what_would_not_be_made_here_is_left(two):
    there, here, requests = two
    by_place = [there.run(request.run_id) for request in requests]

    def taken(resources=None):
        asked = [
            request if resources is None else dataclasses.replace(request, resources=resources)
            for request in requests
        ]
        return sorted(
            int(run_id, 16) for run_id in find_elsewhere(here, {r.run_id: r.resources for r in asked})
        )

    assert taken() == [0, 1, 2, 3]
    assert taken(ResourcesConfig(gpus=1)) == []
    assert taken(ResourcesConfig(devices_per_run=2)) == []
    write_record(by_place[0].environment_path, by_place[0].environment() | {"code": "another"})
    assert taken() == [1, 2, 3]
    by_place[1].metrics_path.write_bytes(by_place[1].metrics_path.read_bytes()[:-1])
    assert taken() == [2, 3]
    by_place[2].write_status(dataclasses.replace(by_place[2].status(), state="interrupted"))
    assert taken() == [3]
    by_place[3].environment_path.write_text("[]")
    assert taken() == []


@pytest.mark.parametrize("trained_on", [["another"], ["another", fingerprint("cpu")], None])
def test_a_result_of_another_arithmetic_is_not_taken(two, trained_on):
    there, here, requests = two
    run = there.run(requests[0].run_id)
    write_record(run.environment_path, HERE | {"fingerprints": trained_on})
    run.write_status(run.status())
    assert list(copy_results(here, requests)) == [request.run_id for request in requests[1:]]


def test_a_diverged_run_is_a_result_too_and_a_failed_one_is_none(two):
    there, here, requests = two
    for request, state in zip(requests, ("diverged", "failed", "running", "stopped"), strict=True):
        run = there.run(request.run_id)
        run.write_status(dataclasses.replace(run.status(), state=state))
    assert list(copy_results(here, requests)) == [requests[0].run_id]


def test_a_run_that_was_begun_here_goes_on_here(two):
    _, here, requests = two
    run = here.run(requests[0].run_id)
    run.create(dataclasses.asdict(requests[0].config))
    Leases(run.attempts).claim().end("interrupted")
    assert requests[0].run_id not in copy_results(here, requests)
    assert run.state() == "pending"


def test_a_run_that_somebody_begins_meanwhile_is_theirs(two, monkeypatch):
    _, here, requests = two
    copy, held = pending_runs._copy, []

    def copy_and_lose_the_next(source, target, request):
        copy(source, target, request)
        if not held:
            held.append(Leases(here.run(requests[1].run_id).attempts).claim())

    monkeypatch.setattr(pending_runs, "_copy", copy_and_lose_the_next)
    assert requests[1].run_id not in copy_results(here, requests[:2])
    assert held[0].is_mine()
    assert here.run(requests[1].run_id).state() == "pending"


def test_what_a_killed_driver_left_is_cleared(two):
    _, here, requests = two
    left = here.path / "runs" / ".taken" / requests[0].run_id
    left.mkdir(parents=True)
    (left / "status.json").write_text("half")
    copy_results(here, requests)
    assert here.run(requests[0].run_id).state() == "finished"
    assert not left.parent.exists()


def test_no_neighbour_no_harm(tmp_path):
    here, requests = requests_of(tmp_path / "storage" / "here")
    (tmp_path / "storage" / "mlflow.db").write_text("")
    (tmp_path / "storage" / "tokens").mkdir()
    assert copy_results(here, requests) == {}
    assert find_elsewhere(StudyStore(tmp_path / "none" / "x"), {requests[0].run_id: ResourcesConfig()}) == {}
