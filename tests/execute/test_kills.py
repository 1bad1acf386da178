"""kill -9 at any moment loses nothing and counts nothing twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kill import (
    execute_and_die_at,
    in_child,
    make_run,
    outcome_of,
    task_of,
    wait_for,
)

from ablate.base.files import read_record, write_record
from ablate.execute.worker import execute_run
from ablate.store import StudyStore, leases
from ablate.store.leases import Leases
from tests.waiting import wait_until

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("kills")


def execute(task):
    """Make an attempt in a process of its own, which ends well."""
    assert wait_for(in_child(lambda: execute_run(task))) == 0


def begun(task):
    """Start an attempt; return its process when there are rows."""
    pid = in_child(lambda: execute_run(task))
    path = task.folder.metrics_path
    wait_until(lambda: path.exists() and path.stat().st_size)
    return pid


def fresh(storage, name, seed=0, steps=8):
    return make_run(StudyStore(storage / name).run("0123456789abcdef"), seed, steps)


@pytest.fixture(scope="module")
def undisturbed(storage):
    outcomes = {}
    for seed, steps in ((0, 4), (1, 8), (2, 60)):
        run = fresh(storage, f"whole{seed}", seed, steps)
        execute(task_of(run, storage))
        outcomes[seed] = outcome_of(run)
        assert outcomes[seed][0] == "finished"
        assert not run.checkpoints.exists()
    return outcomes


@pytest.mark.parametrize(
    "operations",
    [(3, 45), pytest.param(range(1, 400), id="all", marks=pytest.mark.exhaustive)],
)
def test_killed_before_an_operation_on_a_file(storage, undisturbed, operations):
    resumed = []
    for operation in operations:
        run = fresh(storage, f"at{operation} of {len(operations)}", 0, 4)
        task = replace(task_of(run, storage), keep_weights=True)
        code = wait_for(in_child(execute_and_die_at(task, operation)))
        if code == 0:  # it has no more
            break
        assert code == -signal.SIGKILL
        execute(task)
        assert outcome_of(run) == undisturbed[0], f"killed before operation {operation}"
        assert run.state() == "finished"
        assert not run.checkpoints.exists()
        leases = Leases(run.attempts)
        ledger = [leases.read(number + 1) for number in range(leases.latest())]
        # None is noted of an attempt that is killed after its result.
        outcomes = [record.outcome for record in ledger if record.outcome]
        assert outcomes in ([], ["finished"])
        resumed.append(ledger[-1].resumed_from_step)
        weights = {path.name for path in run.weights.iterdir()}
        assert weights == {"config.json", "model.safetensors"}
    # an attempt has more operations than that
    assert len(resumed) >= min(len(operations), 51)
    assert any(resumed)


@pytest.mark.exhaustive
def test_a_worker_that_wakes_up_after_it_lost_its_run_writes_nothing(
    storage, undisturbed, monkeypatch
):
    monkeypatch.setattr(leases, "STALE_SEC", 0.2)
    run = fresh(storage, "zombie", 2, 60)  # long enough to be caught in the middle
    task = task_of(run, storage)
    first = begun(task)
    os.kill(first, signal.SIGSTOP)  # a machine that stands still
    record = run.attempts / "1.json"
    write_record(record, read_record(record) | {"machine": "another"})
    heir = Leases(run.attempts)
    assert heir.is_held()
    wait_until(lambda: not heir.is_held())
    execute(replace(task, given_up=1))
    paths = run.metrics_path, run.status_path
    after = [path.read_bytes() for path in paths]
    os.kill(first, signal.SIGCONT)
    wait_for(first)
    assert [path.read_bytes() for path in paths] == after
    assert outcome_of(run) == undisturbed[2]
    assert run.status().attempt == 2


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("status.json", lambda content: content[:-9]),
        ("metrics.jsonl", lambda content: content.replace(b"5", b"4", 1)),
        ("metrics.jsonl", lambda _: None),
    ],
)
def test_a_result_whose_files_are_damaged_is_made_again_to_the_bit(
    storage, undisturbed, file, damage
):
    name = f"damage{time.monotonic_ns()}"
    shutil.copytree(storage / "whole1", storage / name)
    run = fresh(storage, name, 1)
    task = task_of(run, storage)
    path = run.path / file
    content = damage(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    make_run(run, 1)  # the driver's part
    execute(task)
    assert run.state() == "finished"
    assert outcome_of(run) == undisturbed[1]


def test_sigterm_ends_a_run_with_a_checkpoint(storage, undisturbed):
    run = fresh(storage, "preempted", 1)
    task = task_of(run, storage, checkpoint_every_sec=1e6)
    pid = begun(task)
    os.kill(pid, signal.SIGTERM)
    assert wait_for(pid) == 0
    status = run.status()
    if status.state != "finished":  # it was quick enough
        assert (status.state, status.message) == ("interrupted", "preempted (SIGTERM)")
        assert list(run.checkpoints.glob("*.safetensors"))
        execute(task)
        assert Leases(run.attempts).read(2).resumed_from_step == status.step
    assert outcome_of(run) == undisturbed[1]


FULL_DISK = """
    import json, sys
    from dataclasses import replace
    sys.path.insert(0, {here!r})
    from pathlib import Path
    from kill import data, make_run, outcome_of, task_of
    from ablate.data import prepare
    from ablate.execute.worker import execute_run
    from ablate.store import StudyStore

    storage = Path({mount!r})
    prepare(data(), storage / "tokens")
    run = make_run(StudyStore(storage / "s").run("0123456789abcdef"), 1, 8)
    task = replace(task_of(run, storage), keep_weights=True)
    filler = storage / "filler"
    ends, room = [], 0
    for _ in range(60):
        with filler.open("ab", buffering=0) as file:  # all that is left but a little more each time
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        room += 4096
        with filler.open("rb+") as file:
            file.truncate(max(0, filler.stat().st_size - room))
        end = execute_run(task)
        ends.append((end.state, end.transient))
        if end.state == "finished":
            break
    filler.unlink()
    assert execute_run(task).state == "finished"
    assert sorted(path.name for path in run.weights.iterdir()) == ["config.json", "model.safetensors"]
    print(json.dumps([ends, outcome_of(run), run.attempt_log(len(ends)).read_text()]))
"""


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_at_any_point_loses_nothing(undisturbed, tmp_path):
    """On a real tmpfs of some megabytes, in a mount namespace of its own; each attempt has a page more."""
    unshare = shutil.which("unshare")
    mount = tmp_path / "mount"
    mount.mkdir()
    inside = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    probe = [unshare or "unshare", *inside, "mount", "-t", "tmpfs", "none", str(mount)]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    if unshare is None or run(probe).returncode:
        pytest.skip("this system does not let the test mount a tmpfs")
    script = tmp_path / "full.py"
    code = FULL_DISK.format(here=str(HERE), mount=str(mount))
    script.write_text(textwrap.dedent(code))
    command = (
        f"mount -t tmpfs -o size=3m none {mount} && exec {sys.executable} {script}"
    )
    process = run([unshare, *inside, "sh", "-c", command])
    assert process.returncode == 0, process.stderr
    ends, outcome, log = json.loads(process.stdout.splitlines()[-1])
    assert len(ends) > 1
    assert ends == [["interrupted", True]] * (len(ends) - 1) + [["finished", False]]
    assert (
        "checkpoint after step 1 not written: [Errno 28] No space left on device" in log
    )
    assert outcome == json.loads(json.dumps(undisturbed[1]))
