"""kill -9 at any moment loses nothing and counts nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
from kill import (
    execute_and_die_at,
    in_child,
    kill_after,
    make_run,
    outcome_of,
    task_of,
    wait_for,
)

from ablate.execute.worker import execute_run
from ablate.store import StudyStore
from ablate.store.leases import Leases


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("kills")


def fresh(storage, name, seed=0, steps=8):
    return make_run(StudyStore(storage / name).run("0123456789abcdef"), seed, steps)


@pytest.fixture(scope="module")
def undisturbed(storage):
    found = {}
    for seed, steps in ((0, 4), (1, 8), (2, 60)):
        run = fresh(storage, f"whole{seed}", seed, steps)
        assert wait_for(in_child(lambda run=run: execute_run(task_of(run, storage)))) == 0
        found[seed] = outcome_of(run)
        assert found[seed][0] == "finished"
        assert not run.checkpoints.exists()
    return found


def test_killed_before_every_single_operation_on_a_file(storage, undisturbed):
    died = 0
    for operation in range(1, 400):
        run = fresh(storage, f"at{operation}", 0, 4)
        task = task_of(run, storage)
        code = wait_for(in_child(execute_and_die_at(task, operation)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        died += 1
        assert wait_for(in_child(lambda task=task: execute_run(task))) == 0
        assert outcome_of(run) == undisturbed[0], f"killed before operation {operation}"
        assert run.state() == "finished"
        assert not run.checkpoints.exists()
    assert died > 50, "an attempt of four steps and three checkpoints has more operations than that"
    assert code == 0


def test_killed_again_and_again_at_random_moments(storage, undisturbed):
    draw = random.Random(0)
    run = fresh(storage, "random", 2, 60)
    task = task_of(run, storage)
    kills = 0
    while run.state() != "finished":
        kills += kill_after(in_child(lambda: execute_run(task)), draw.uniform(0.05, 0.3)) < 0
        assert kills < 300
    assert kills >= 5
    assert outcome_of(run) == undisturbed[2]
    ledger = [Leases(run.attempts).read(n) for n in range(1, Leases(run.attempts).latest() + 1)]
    assert [record.attempt for record in ledger] == list(range(1, len(ledger) + 1))
    assert [record.outcome for record in ledger if record.outcome] == ["finished"]
    assert any(record.resumed_from_step for record in ledger)


def test_a_worker_that_wakes_up_after_its_run_was_taken_over_writes_nothing(storage, undisturbed):
    run = fresh(storage, "zombie", 2, 60)  # long enough to be caught in the middle
    task = task_of(run, storage)
    first = in_child(lambda: execute_run(task))
    while not (run.metrics_path.exists() and run.metrics_path.stat().st_size):
        time.sleep(0.005)
    os.kill(first, signal.SIGSTOP)  # a machine that stands still
    record = run.attempts / "1.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"machine": "another"}))
    heir = Leases(run.attempts, stale_sec=0.2)
    assert heir.is_held()
    time.sleep(0.3)

    assert not heir.is_held()
    assert wait_for(in_child(lambda: execute_run(replace(task, given_up=1)))) == 0
    after = run.metrics_path.read_bytes(), (run.path / "status.json").read_bytes()
    os.kill(first, signal.SIGCONT)
    wait_for(first)
    assert (run.metrics_path.read_bytes(), (run.path / "status.json").read_bytes()) == after
    assert outcome_of(run) == undisturbed[2]
    assert run.status().attempt == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run.path / "status.json").write_bytes(b'{"state": "fin'),
        lambda run: (run.path / "status.json").write_bytes(b""),
        lambda run: (run.path / "status.json").write_bytes(b"[]"),
        lambda run: run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-9]),
        lambda run: run.metrics_path.write_bytes(run.metrics_path.read_bytes().replace(b"5", b"4", 1)),
        lambda run: run.metrics_path.unlink(),
        lambda run: (run.path / "config.json").write_bytes(b"{"),
    ],
)
def test_a_result_whose_files_are_damaged_is_made_again_to_the_bit(storage, undisturbed, damage):
    run = fresh(storage, f"damage{time.monotonic_ns()}", 1)
    task = task_of(run, storage)
    assert wait_for(in_child(lambda: execute_run(task))) == 0
    damage(run)
    make_run(run, 1)  # the driver's part
    assert wait_for(in_child(lambda: execute_run(task))) == 0
    assert run.state() == "finished"
    assert outcome_of(run) == undisturbed[1]


def test_sigterm_ends_a_run_with_a_checkpoint(storage, undisturbed):
    run = fresh(storage, "preempted", 1)
    task = task_of(run, storage, checkpoint_every_sec=1e6)
    pid = in_child(lambda: execute_run(task))
    while not (run.metrics_path.exists() and run.metrics_path.stat().st_size):
        time.sleep(0.002)
    os.kill(pid, signal.SIGTERM)
    assert wait_for(pid) == 0
    status = run.status()
    if status.state != "finished":  # it was quick enough
        assert (status.state, status.message) == ("interrupted", "preempted (SIGTERM)")
        assert list(run.checkpoints.glob("*.safetensors"))
        assert wait_for(in_child(lambda: execute_run(task))) == 0
        assert Leases(run.attempts).read(2).resumed_from_step == status.step
    assert outcome_of(run) == undisturbed[1]


def test_a_finished_run_is_never_run_again(storage):
    run = fresh(storage, "again", 1)
    task = task_of(run, storage)
    for _ in range(3):
        assert wait_for(in_child(lambda: execute_run(task))) == 0
    assert Leases(run.attempts).latest() == 1
