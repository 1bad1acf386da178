"""The rules of an execution, with a real run store, and workers and clock made up: no Ray, no waiting."""

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from ablate.execute import queue
from ablate.execute.queue import PAUSES_SEC, ExecutionEnd, Queue
from ablate.execute.task_end import TaskEnd
from ablate.run.config import ResourcesConfig
from ablate.store import Status
from ablate.store.leases import Leases

FINISHED = TaskEnd(state="finished")
LOST = TaskEnd(state="interrupted", transient=True, message="worker lost")
ELSEWHERE = TaskEnd(state="running")
GANG = ResourcesConfig(devices_per_run=2)
NONE = MappingProxyType({})


class Fake:
    """A queue of four runs, and workers that write down what they are asked to do."""

    def __init__(self, study, gangs=(), holders=NONE, **options):
        store, requests = study
        self.done = []
        self.stop_path = store.path / "stop"
        self.dirs = {
            name: store.run(run.run_id)
            for name, run in zip("abcd", requests, strict=True)
        }
        self.names = {run.run_id: name for name, run in self.dirs.items()}
        for run in self.dirs.values():
            run.attempts.mkdir(parents=True)
        self.workers = SimpleNamespace(
            start=lambda run: self.done.append(
                f"start {self.names[run.run_id]} {run.given_up}"
            ),
            cancel=lambda run_id: self.done.append(f"cancel {self.names[run_id]}"),
        )
        runs = [
            replace(
                run,
                folder=self.dirs[name],
                stop_path=self.stop_path,
                resources=GANG if name in gangs else run.resources,
                prefix=(self.stop_path, 1) if name in holders else None,
                holder=holders.get(name),
            )
            for name, run in zip("abcd", requests, strict=True)
        ]
        self.queue = Queue(runs, self.workers, **options)

    def move(self, now=0.0):
        """Return what is done at a time."""
        self.queue.move(now)
        actions = self.done
        self.done = []
        return actions

    def started(self, now=0.0):
        return "".join(
            line.split()[1] for line in self.move(now) if line.startswith("start")
        )

    def take(self, name, end, now=0.0):
        self.queue.take(self.dirs[name].run_id, end, now)

    def mark(self, state, names):
        for name in names:
            self.dirs[name].write_status(Status(state=state))

    def unneeded(self, names):
        self.queue.end_unneeded(
            {self.dirs[name].run_id: "it is settled" for name in names}
            | {"x": "not ours"}
        )

    @property
    def states(self):
        return {
            self.names[run_id]: state for run_id, state in self.queue.states.items()
        }


@pytest.fixture
def fake(study):
    fake = Fake(study)
    assert fake.started() == "abcd"
    return fake


def test_what_may_pass_is_tried_again_after_growing_pauses_and_then_given_up(fake):
    clock = 100.0
    for pause in PAUSES_SEC:
        fake.take("a", LOST, clock)
        assert fake.move(clock + pause - 0.01) == []
        clock += pause
        fake.dirs["a"].stop_path.touch()  # it asked the lost attempt
        assert fake.started(clock) == "a"
        assert not fake.dirs["a"].stop_path.exists()
    fake.take("b", LOST, clock)  # counts its own tries
    fake.take("a", LOST, clock)
    status = fake.dirs["a"].status()
    assert (status.state, status.message) == ("failed", "worker lost (4 attempts)")
    assert fake.states == {"a": "failed"}
    assert fake.started(clock + 1) == "b"
    # each time it came further: what killed it is not its own fault
    for step in range(1, 20):
        (checkpoint := fake.dirs["b"].checkpoints / f"{step:012d}.json").parent.mkdir(
            exist_ok=True
        )
        checkpoint.touch()
        fake.take("b", LOST, clock)
        clock += PAUSES_SEC[0]
        assert fake.started(clock) == "b"


def test_runs_on_several_devices_take_turns_and_others_pass_them(study):
    fake = Fake(study, gangs="abd")
    assert (fake.started(), fake.started()) == ("ac", "")
    fake.take("c", FINISHED)  # it leaves no room for a gang
    assert fake.started() == ""
    fake.take("a", LOST)
    assert fake.started(0.5) == "b"
    fake.take("b", FINISHED)
    assert fake.started(1.0) == "d"  # a is due as well, and stands behind
    fake.take("d", FINISHED)
    assert fake.started(1.0) == "a"


def test_two_gangs_at_once_where_there_is_room(study):
    assert Fake(study, gangs="abcd", gangs_at_once=2).started() == "ab"


def test_a_run_that_begins_with_anothers_state_waits_for_it_or_for_that_runs_end(
    study, monkeypatch
):
    holder = study[1][0].run_id
    fake = Fake(study, holders={"b": holder, "c": holder, "d": "of another study"})
    monkeypatch.setattr(
        queue,
        "why_it_cannot_begin",
        lambda run: {"c": "no parent"}.get(fake.names[run.run_id]),
    )
    # nobody here trains what d begins with
    assert (fake.started(), fake.started()) == ("ad", "")
    fake.take("a", TaskEnd(state="failed"))
    assert fake.started() == "b"
    assert fake.states == {"a": "failed", "c": "failed"}
    assert fake.dirs["c"].status().message == "no parent"


def test_a_run_that_somebody_else_executes_is_waited_for_or_taken_over(fake):
    leases = {name: Leases(fake.dirs[name].attempts).claim() for name in "abc"}
    for name in "abc":
        fake.take(name, ELSEWHERE)
    assert fake.move(10.0) == []
    fake.mark("finished", "a")
    leases["b"].end("interrupted")
    assert fake.move(11.9) == []  # not looked at all the time
    assert fake.move(12.0) == ["start b 1"]
    assert fake.states == {"a": "finished"}


@pytest.fixture
def midway(study):
    """One run is at work, one was lost, one of two gangs is asked for."""
    fake = Fake(study, gangs="cd")
    fake.move()
    fake.mark("running", "a")
    fake.take("b", LOST)
    return fake


def test_what_nobody_needs_is_asked_to_stop_taken_back_or_marked(midway):
    fake = midway
    for _ in range(2):  # once is enough
        fake.unneeded("abcd")
    assert fake.move() == ["cancel c"]
    assert [name for name in "abcd" if fake.dirs[name].stop_path.exists()] == ["a", "c"]
    assert fake.dirs["a"].stop_path.read_text() == "it is settled"
    assert fake.states == {"b": "stopped", "d": "stopped"}
    fake.take("c", TaskEnd(state="pending"))
    fake.take("a", FINISHED)  # a result that came before the stop is kept
    assert fake.states == {"a": "finished"} | dict.fromkeys("bcd", "stopped")
    assert {fake.dirs[name].status().message for name in "bcd"} == {"it is settled"}
    assert fake.move(1e3) == []


def test_a_stop_takes_back_what_has_not_begun_and_tries_nothing_again(midway):
    fake = midway
    fake.queue.stop()
    assert fake.stop_path.exists()
    assert fake.done == ["cancel c"]
    fake.take("a", LOST)
    fake.take("c", TaskEnd(state="pending"))
    assert fake.states == {
        "b": "pending",
        "d": "pending",
        "a": "interrupted",
        "c": "pending",
    }
    fake.done = []
    assert fake.move(1e3) == []


@pytest.mark.parametrize("again", [True, False])
def test_a_second_interrupt_or_a_deaf_worker_is_not_waited_for(
    study, monkeypatch, again
):
    if not again:
        monkeypatch.setattr(queue, "_STOP_GRACE_SEC", 0.0)

    def interrupted():
        raise KeyboardInterrupt

    fake = Fake(study)
    fake.workers.collect = interrupted
    assert fake.queue.run(lambda: None) == ExecutionEnd(states={}, interrupted=True)


def test_ray_puts_a_share_on_one_gpu_and_no_process_stays_for_a_second(tmp_path):
    script = Path(__file__).with_name("shared_gpus.py")
    process = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    printed = json.loads(process.stdout.splitlines()[-1])
    of_gpu = defaultdict(list)
    for run in printed["runs"]:
        of_gpu[run["gpu"]].append(run)
    assert set(of_gpu) == {"0", "1"}
    assert len({run["process"] for run in printed["runs"]}) == len(printed["runs"]) == 8
    for runs in of_gpu.values():
        at_once = [
            sum(other["begun"] <= run["begun"] < other["ended"] for other in runs)
            for run in runs
        ]
        assert max(at_once) == 2
    assert printed["machines"] == [
        {"cores": 4, "gpus": 2, "gpu_name": "H200", "gpu_bytes": 141 * 10**9}
    ]
