"""A result is taken from a neighbour only where it is the one that would be made here."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from four_runs import requests_of

from ablate.base.files import append_line, write_record
from ablate.data import DataIdentity
from ablate.execute.environment import code_digest, fingerprint
from ablate.execute.pending_runs import _find_elsewhere as find_elsewhere
from ablate.execute.pending_runs import copy_results, find_todo, stop_unneeded
from ablate.execute.pending_runs import requests_of as requests_of_plan
from ablate.plan import build_plan
from ablate.run.command import Command, reading_of
from ablate.run.config import DataConfig, ResourcesConfig
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases
from ablate.study import load_study

OWN = fingerprint("cpu", 1)
HERE = {"code": code_digest(), "gpu": None, "world_size": 1, "fingerprints": [OWN]}


@pytest.fixture
def two(tmp_path):
    """A store whose four runs have ended, as the worker leaves them, and another one, with their requests."""
    there, requests = requests_of(tmp_path / "there")
    for request in requests:
        run = there.run(request.run_id)
        run.create(asdict(request.config))
        lease = Leases(run.attempts).claim()
        run.attempt_log(1).write_text("printed\n")
        append_line(
            run.metrics_path, {"kind": "eval", "tokens": 10, "step": 1, "val_loss": 3.0}
        )
        run.diagnostics_path.write_text('{"kind": "diagnosis"}\n')
        lease.end("finished")
        change(run)
    here = StudyStore(tmp_path / "here")
    (here.path / "runs").mkdir(parents=True)
    return there, here, requests


def change(run, *, state="finished", **environment):
    write_record(run.environment_path, HERE | environment)
    run.write_status(Status(state=state, attempt=1, tokens=30, step=3))


def contents(run):
    files = filter(Path.is_file, run.path.rglob("*"))
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def test_a_result_comes_whole_with_its_ledger(two):
    there, here, requests = two
    source, run = (store.run(requests[0].run_id) for store in (there, here))
    source.checkpoints.mkdir()
    source.stop_path.write_text("of the neighbour alone")
    config = replace(requests[0].config, data=DataConfig(paths=["/elsewhere"]))
    request = replace(requests[0], config=config)
    # asked for before, never begun
    here.run(requests[1].run_id).create(asdict(requests[1].config))
    # by a driver that was killed
    leftover = here.path / "runs" / ".taken" / requests[0].run_id
    leftover.mkdir(parents=True)
    (leftover / "status.json").write_text("half")
    ids = [request.run_id for request in requests[:2]]
    assert copy_results(here, [request, requests[1]]) == dict.fromkeys(ids, "there")
    assert run.config() == json.loads(json.dumps(asdict(config)))
    assert run.state() == "finished"
    files, files_there = map(contents, (run, source))
    del files_there["stop"]
    changed = {"config.json", "status.json", "attempts/2.json"}
    assert files.keys() == files_there.keys() | changed
    assert all(files[name] == files_there[name] for name in files.keys() - changed)
    # the claim that kept others away
    assert Leases(run.attempts).read(2).outcome == "superfluous"
    todo = find_todo(here, requests)
    assert (todo.runs, todo.num_ended) == (tuple(requests[2:]), 2)
    assert here.begun() == set(ids)


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"fingerprints": ["another", OWN]}, False),
        ({"code": "another"}, False),
        ({"gpu": "H100"}, False),
        ({"world_size": 2}, False),
        ({"state": "diverged"}, True),
        ({"state": "failed"}, False),
        ("metrics.jsonl", False),
        ("environment.json", False),
    ],
)
def test_only_the_result_that_would_be_made_here_is_taken(two, changed, is_taken):
    there, here, requests = two
    run = there.run(requests[0].run_id)
    if isinstance(changed, str):
        (run.path / changed).write_bytes((run.path / changed).read_bytes()[:-1])
    else:
        change(run, **changed)
    expected = [request.run_id for request in requests[not is_taken :]]
    for other in (ResourcesConfig(gpus=1), ResourcesConfig(devices_per_run=2)):
        assert copy_results(here, [replace(requests[1], resources=other)]) == {}
    assert list(copy_results(here, requests)) == expected
    assert copy_results(StudyStore(here.path.parent / "x" / "y"), requests) == {}


def test_of_a_command_other_code_counts_out_unless_the_study_names_its_files(two):
    there, here, (request, *_) = two
    here.write_plan(replace(there.plan(), waive=("code",)))
    (there.path / "a.py").touch()
    for files in ((), ("a.py",)):
        trainer = Command(command=["run"], files=[*files], cwd=str(there.path))
        reading = reading_of(trainer)
        change(there.run(request.run_id), code="another", reading=reading)
        run = replace(request, config=replace(request.config, trainer=trainer))
        assert bool(find_elsewhere(here, {request.run_id: run})) == bool(files)


def test_a_run_that_was_begun_here_goes_on_here(two, monkeypatch):
    _, here, requests = two
    run = here.run(requests[0].run_id)
    run.create(asdict(requests[0].config))
    Leases(run.attempts).claim().end("interrupted")
    copy = shutil.copytree
    held = []

    def copy_and_lose_the_next(*paths, **options):
        held.append(Leases(here.run(requests[2].run_id).attempts).claim())
        return copy(*paths, **options)

    monkeypatch.setattr(shutil, "copytree", copy_and_lose_the_next)
    # nowhere else
    requests[3:] = [
        replace(requests[3], keep_weights=True),
        replace(requests[3], records=True),
    ]
    assert list(copy_results(here, requests)) == [requests[1].run_id]
    assert held[0].is_mine()
    states = [here.run(request.run_id).state() for request in requests]
    assert states == ["pending", "finished", "pending", "pending", "pending"]


def test_the_run_whose_routes_another_replays_records_them():
    plan = build_plan(
        load_study("moe-experts"),
        lambda _: DataIdentity(digest="d", vocab_size=256, num_bytes=1),
    )
    asked = requests_of_plan(plan, {run.id for _, run in plan.runs()}, {})
    recorded = [run for run in asked if run.records]
    assert {run.run_id for run in recorded} == {run.id for run in plan.arm("bf16").runs}
    originals = [run.config.original for run in asked if run.config.original]
    assert originals
    assert all(original in [run.config for run in recorded] for original in originals)


def test_what_nobody_needs_is_left_out_and_marked(two):
    there, here, requests = two
    reasons = {requests[0].run_id: "it is settled"}
    todo = find_todo(here, requests, lambda: reasons)
    assert (todo.runs, todo.num_unneeded) == (tuple(requests[1:]), 1)
    for store, state in ((here, "stopped"), (there, "finished")):
        stop_unneeded(store, requests, reasons)
        assert store.run(requests[0].run_id).state() == state
