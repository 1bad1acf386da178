"""The rules of an execution, with workers, run store and clock made up: no Ray, no waiting."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import ray

from ablate.execute import driver
from ablate.execute.driver import drive
from ablate.execute.queue import Queue, Tasks
from ablate.execute.worker import TaskEnd
from ablate.store import StudyStore

PAUSES = (1.0, 5.0, 30.0)
FINISHED = TaskEnd(state="finished")
LOST = TaskEnd(state="interrupted", transient=True, message="worker lost")
ELSEWHERE = TaskEnd(state="elsewhere")


class Fake:
    """Tasks that write down what they are asked to do. ``held``: runs that somebody executes elsewhere."""

    def __init__(self):
        self.done, self.states, self.held, self.attempts, self.steps = [], {}, set(), {}, {}
        self.holders, self.orphans = {}, set()

    def waits_for(self, run_id):
        return self.holders.get(run_id)

    def fail_if_it_cannot_begin(self, run_id):
        return "failed" if run_id in self.orphans else None

    def start(self, run_id, given_up):
        self.done.append(("start", run_id, given_up) if given_up else ("start", run_id))

    def cancel(self, run_id):
        self.done.append(("cancel", run_id))

    def stop_all(self):
        self.done.append(("stop all",))

    def ask_to_stop(self, run_id, reason):
        self.done.append(("ask", run_id, reason))

    def state(self, run_id):
        return self.states.get(run_id, "pending")

    def abandoned(self, run_id):
        return None if run_id in self.held else self.attempts.get(run_id, 0)

    def reached(self, run_id):
        return self.steps.get(run_id, 0)

    def mark_stopped(self, run_id, reason):
        self.done.append(("stopped", run_id, reason))
        return "stopped" if self.state(run_id) != "finished" else "finished"

    def mark_failed(self, run_id, end, attempts):
        self.done.append(("failed", run_id, end.message, attempts))
        return "failed"

    def take(self):
        """Return what was done since the last look."""
        done, self.done = self.done, []
        return done


@pytest.fixture
def fake():
    return Fake()


def queue_of(fake, runs="abcd", **options):
    return Queue(list(runs), fake, pauses_sec=PAUSES, **options)


def test_runs_are_handed_over_in_order_and_end_each_for_itself(fake):
    queue = queue_of(fake)
    assert fake.take() == [("start", run) for run in "abcd"]
    assert list(queue.handed) == list("abcd")
    queue.take("b", TaskEnd(state="failed", message="a bug"), 0.0)
    queue.take("a", FINISHED, 0.0)
    queue.take("c", TaskEnd(state="diverged"), 0.0)
    assert queue.is_open
    queue.take("d", FINISHED, 0.0)
    assert not queue.is_open
    assert queue.states == {"a": "finished", "b": "failed", "c": "diverged", "d": "finished"}
    queue.move(1e9)
    assert fake.take() == []  # a fault of the run itself is not repeated


def test_what_may_pass_is_tried_again_after_growing_pauses_and_then_given_up(fake):
    queue = queue_of(fake, "ab")
    fake.take()
    now = 100.0
    for pause in PAUSES:
        queue.take("a", LOST, now)
        queue.move(now + pause - 0.01)
        assert fake.take() == []
        assert queue.is_open
        now += pause
        queue.move(now)
        assert fake.take() == [("start", "a")]
    queue.take("a", LOST, now)
    assert fake.take() == [("failed", "a", "worker lost", 4)]
    assert queue.states == {"a": "failed"}
    queue.take("b", LOST, now)  # counts its own tries
    queue.move(now + 1.0)
    queue.take("b", FINISHED, now)
    assert queue.states == {"a": "failed", "b": "finished"}


def test_runs_on_several_devices_take_turns_and_others_pass_them(fake):
    queue = queue_of(fake, "abcd", gangs="abd", gangs_at_once=1)
    assert fake.take() == [("start", "a"), ("start", "c")]
    queue.move(0.0)
    assert fake.take() == []
    queue.take("c", FINISHED, 0.0)
    queue.move(0.0)
    assert fake.take() == []  # it left no room for a gang
    queue.take("a", LOST, 0.0)
    queue.move(0.5)
    assert fake.take() == [("start", "b")]
    queue.move(1.0)  # a is due, and waits for its turn behind d
    assert fake.take() == []
    queue.take("b", FINISHED, 1.0)
    queue.move(1.0)
    assert fake.take() == [("start", "d")]
    queue.take("d", FINISHED, 1.0)
    queue.move(1.0)
    assert fake.take() == [("start", "a")]
    queue.take("a", FINISHED, 1.0)
    assert not queue.is_open


def test_two_gangs_at_once_where_there_is_room(fake):
    queue_of(fake, "abc", gangs="abc", gangs_at_once=2)
    assert fake.take() == [("start", "a"), ("start", "b")]


def test_a_run_that_begins_with_anothers_state_waits_for_it_or_for_that_runs_end(fake):
    fake.holders = {"b": "a", "c": "a", "d": "elsewhere"}
    queue = queue_of(fake)
    assert fake.take() == [("start", "a"), ("start", "d")]  # nobody here trains what d begins with
    queue.move(1.0)
    assert fake.take() == []
    del fake.holders["b"]  # it is there
    queue.move(2.0)
    assert fake.take() == [("start", "b")]
    queue.end_unneeded({"a": "not needed"})
    queue.take("a", TaskEnd(state="stopped"), 3.0)
    queue.move(3.0)
    assert fake.take()[-1] == ("start", "c")  # it trains the steps itself


def test_a_run_whose_beginning_failed_fails_and_a_waiting_one_can_be_taken_back(fake):
    fake.holders, fake.orphans = dict.fromkeys("bc", "a"), {"b"}
    queue = queue_of(fake, "abc")
    queue.end_unneeded({"c": "not needed"})
    queue.take("a", TaskEnd(state="failed"), 0.0)
    queue.move(0.0)
    assert fake.take() == [("start", "a"), ("stopped", "c", "not needed")]
    assert queue.states == {"a": "failed", "b": "failed", "c": "stopped"}
    assert not queue.is_open


def test_a_run_that_somebody_else_executes_is_waited_for(fake):
    queue = queue_of(fake, "ab")
    fake.take()
    fake.held = {"a", "b"}
    queue.take("a", ELSEWHERE, 10.0)
    queue.take("b", ELSEWHERE, 10.0)
    queue.move(10.0)
    assert queue.is_open
    fake.states = {"a": "finished", "b": "failed"}
    queue.move(11.9)  # not looked at all the time
    assert queue.is_open
    queue.move(12.0)
    assert queue.states == {"a": "finished", "b": "failed"}
    assert not queue.is_open
    assert fake.take() == []


def test_a_run_whose_holder_is_gone_is_taken_over(fake):
    queue = queue_of(fake, "a")
    fake.take()
    fake.held, fake.attempts, fake.states = {"a"}, {"a": 3}, {"a": "running"}
    queue.take("a", ELSEWHERE, 10.0)
    queue.move(10.0)
    assert fake.take() == []
    fake.held = set()
    queue.move(12.0)
    assert fake.take() == [("start", "a", 3)]
    queue.take("a", FINISHED, 12.0)
    assert queue.states == {"a": "finished"}


def test_what_nobody_needs_is_asked_to_stop_taken_back_or_marked(fake):
    queue = queue_of(fake, "abcdef", gangs="ef")
    fake.take()
    fake.states = {"a": "running"}
    fake.held = {"c"}
    queue.take("c", ELSEWHERE, 0.0)
    queue.take("d", LOST, 0.0)
    why = dict.fromkeys("abcdf", "it is settled") | {"unknown": "not of this execution"}
    queue.end_unneeded(why)
    assert fake.take() == [
        ("ask", "a", "it is settled"),
        ("ask", "b", "it is settled"), ("cancel", "b"),
        ("ask", "c", "it is settled"),
        ("stopped", "d", "it is settled"),  # waited to be tried again
        ("stopped", "f", "it is settled"),  # waited for its turn
    ]  # fmt: skip
    queue.end_unneeded(why)
    assert fake.take() == []  # once is enough
    queue.take("b", TaskEnd(state="pending"), 0.0)
    queue.take("a", TaskEnd(state="stopped"), 0.0)
    fake.held = set()
    queue.move(1e3)
    assert [done for done in fake.take() if done[0] == "start"] == []  # nothing of it is run again
    queue.take("e", FINISHED, 1e3)
    assert not queue.is_open
    assert queue.states == dict.fromkeys("abcdf", "stopped") | {"e": "finished"}


def test_a_result_that_came_before_the_stop_is_kept(fake):
    queue = queue_of(fake, "ab")
    fake.states = {"a": "running", "b": "running"}
    queue.end_unneeded({"a": "too late", "b": "too late"})
    queue.take("a", FINISHED, 0.0)
    queue.take("b", TaskEnd(state="failed"), 0.0)
    queue.end_unneeded({"a": "again"})
    assert queue.states == {"a": "finished", "b": "failed"}


def test_deaths_do_not_add_up_while_a_run_comes_further_each_time(fake):
    queue, now = queue_of(fake, "a"), 0.0
    for step in range(1, 20):
        fake.steps["a"] = step
        queue.take("a", LOST, now)
        queue.move(now := now + PAUSES[0])
        assert list(queue.handed) == ["a"]
    for _ in PAUSES[1:]:
        queue.take("a", LOST, now)
        queue.move(now := now + PAUSES[-1])
    assert queue.is_open
    queue.take("a", LOST, now)
    assert queue.states == {"a": "failed"}


def test_a_stop_takes_back_what_has_not_begun_and_tries_nothing_again(fake):
    queue = queue_of(fake, "abcdef", gangs="ef")
    fake.held = {"c"}
    fake.states = {"a": "running", "c": "running", "d": "interrupted"}
    queue.take("c", ELSEWHERE, 0.0)
    queue.take("d", LOST, 0.0)
    fake.take()
    queue.stop()
    assert fake.take() == [("stop all",), ("cancel", "b"), ("cancel", "e")]
    assert queue.states == {"c": "running", "d": "interrupted", "f": "pending"}
    queue.take("a", LOST, 0.0)
    queue.take("b", TaskEnd(state="pending"), 0.0)
    queue.take("e", TaskEnd(state="pending"), 0.0)
    assert not queue.is_open
    assert fake.take() == []
    assert (queue.states["a"], queue.states["b"]) == ("interrupted", "pending")


class Script:
    """What ends in each step of ``drive``, or what is raised there."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def __call__(self):
        step = self.steps.pop(0)
        if isinstance(step, type):
            raise step
        yield from step


def nothing():
    """Let ``drive`` go on."""


def test_an_execution_ends_when_all_runs_have(fake):
    asked, polls = [], []
    outcome = drive(
        queue_of(fake, "ab"),
        Script([("a", FINISHED)], [], [("b", FINISHED)]),
        nothing,
        on_poll=lambda: polls.append(1),
        unneeded=lambda: asked.append(1) or {},
    )
    assert outcome == driver.ExecutionEnd(states={"a": "finished", "b": "finished"}, interrupted=False)
    assert len(polls) == 3
    assert len(asked) == 1  # not at every step


def test_an_interrupt_waits_for_the_ends_of_what_runs(fake):
    fake.states = {"a": "running", "b": "running"}
    ends = [("b", TaskEnd(state="interrupted")), ("c", TaskEnd(state="pending"))]
    steps = Script(KeyboardInterrupt, [("a", TaskEnd(state="interrupted"))], [], ends)
    outcome = drive(queue_of(fake, "abc"), steps, nothing)
    assert outcome.interrupted
    assert outcome.states == {"a": "interrupted", "b": "interrupted", "c": "pending"}
    assert fake.take()[3:] == [("stop all",), ("cancel", "c")]


def test_a_second_interrupt_does_not_wait(fake):
    outcome = drive(queue_of(fake, "a"), Script(KeyboardInterrupt, KeyboardInterrupt), nothing)
    assert outcome == driver.ExecutionEnd(states={}, interrupted=True)


def test_a_worker_that_does_not_hear_is_not_waited_for_without_end(fake, monkeypatch):
    monkeypatch.setattr(driver, "_STOP_GRACE_SEC", 0.0)
    assert drive(queue_of(fake, "a"), Script(KeyboardInterrupt), nothing).interrupted


def test_a_request_to_stop_is_an_interrupt(fake):
    def cancelled():
        raise KeyboardInterrupt

    outcome = drive(queue_of(fake, "a"), Script([], [("a", TaskEnd(state="pending"))]), cancelled)
    assert outcome == driver.ExecutionEnd(states={"a": "pending"}, interrupted=True)


def test_a_head_that_is_gone_ends_the_execution_with_a_line(fake):
    def gone():
        raise ConnectionError("Ray's head node at 10.0.0.1:6379 does not answer any more")

    outcome = drive(queue_of(fake, "ab"), Script([("a", FINISHED)]), gone)
    assert outcome.states == {"a": "finished"}
    assert not outcome.interrupted
    assert outcome.problem == "Ray's head node at 10.0.0.1:6379 does not answer any more"


def test_a_worker_that_ran_out_of_memory_is_lost_in_a_short_sentence(tmp_path, monkeypatch):
    """Ray's own text has a paragraph on its memory monitor and its log files."""
    text = (
        "Task was killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1) was "
        + "x" * 999
    )
    monkeypatch.setattr(ray, "wait", lambda waited, **_: (waited, []))
    monkeypatch.setattr(ray, "get", Mock(side_effect=ray.exceptions.OutOfMemoryError(text)))
    tasks = Tasks.__new__(Tasks)
    tasks._store, tasks._references = StudyStore(tmp_path / "s"), {"a": "its reference"}
    tasks._looked = math.inf
    (found,) = tasks.collect()
    message = "worker lost: the machine ran low on memory, and Ray ended it"
    assert found == ("a", TaskEnd(state="interrupted", transient=True, message=message))
