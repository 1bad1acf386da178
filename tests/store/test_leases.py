"""One worker at a time executes a run, whoever started it."""

import json
import os
import signal
import time

import pytest

from ablate.base.files import read_record, write_record
from ablate.store import leases as module
from ablate.store.leases import Leases


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "attempts"


def test_who_is_faster_between_the_look_and_the_claim_keeps_the_run(
    folder, monkeypatch
):
    slow = Leases(folder)
    look = Leases.latest

    def look_and_be_overtaken(self):
        latest = look(self)
        if self is slow and not latest:
            assert Leases(folder).claim() is not None
        return latest

    monkeypatch.setattr(Leases, "latest", look_and_be_overtaken)
    assert slow.claim() is None
    assert Leases(folder).latest() == 1


def test_attempts_follow_one_another(folder):
    first = Leases(folder).claim()
    assert first.record.attempt == 1
    assert Leases(folder).claim() is None
    first.note(fingerprint="a1b2", resumed_from_step=40)
    first.end("interrupted", "preempted")
    record = Leases(folder).read(1)
    assert (record.outcome, record.message) == ("interrupted", "preempted")
    assert record.resumed_from_step == 40
    second = Leases(folder).claim()
    assert second.record.attempt == 2
    assert (first.is_mine(), second.is_mine()) == (False, True)
    # as if the end could not be written on a full disk
    module._held.discard(second.record.owner)
    assert Leases(folder).claim().record.attempt == 3


def test_a_killed_holder_is_known_at_once(folder):
    child = os.fork()
    if not child:
        Leases(folder).claim()
        signal.pause()
    while not Leases(folder).latest():
        time.sleep(0.01)
    assert Leases(folder).claim() is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    second = Leases(folder).claim()
    assert second.record.attempt == 2
    path = folder / "2.json"  # its number has become another process
    write_record(
        path, read_record(path) | {"process_started": "1", "pid": os.getppid()}
    )
    assert not Leases(folder).is_held()
    assert second.is_mine()  # until somebody claims


@pytest.mark.parametrize("hours", [-1, 24])
def test_a_clock_that_is_set_anew_changes_no_duration(folder, monkeypatch, hours):
    lease = Leases(folder).claim()
    set_to = time.time() + 3600 * hours
    monkeypatch.setattr(module.time, "time", lambda: set_to)
    lease.end("finished")
    record = lease.read(1)
    assert 0 <= record.ended_unix - record.started_unix < 3600


@pytest.mark.parametrize("jump", [-1e7, 1e7])
def test_another_machines_holder_lives_while_it_beats(folder, jump, monkeypatch):
    elsewhere = Leases(folder).claim()
    path = folder / "1.json"
    write_record(path, read_record(path) | {"machine": "another"})
    monkeypatch.setattr(module, "STALE_SEC", 0.3)
    onlooker = Leases(folder)
    os.utime(path, (time.time() + jump,) * 2)  # a clock that is days off
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        elsewhere.beat()
        assert onlooker.is_held()
        time.sleep(0.05)
    assert onlooker.claim() is None
    time.sleep(0.4)  # it beats no more
    assert Leases(folder).claim() is None  # whose first look cannot tell
    assert Leases(folder).claim(given_up=1).record.attempt == 2
    assert onlooker.claim(given_up=1) is None  # that one is no longer the latest
    assert not elsewhere.is_mine()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", {"pid": "../x"}, {"started_unix": 1e300}]
)
def test_a_damaged_record_is_judged_by_its_time_alone(folder, content, monkeypatch):
    monkeypatch.setattr(module, "STALE_SEC", 0.1)
    Leases(folder).claim()
    path = folder / "1.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    assert Leases(folder).read(1) is None
    onlooker = Leases(folder)
    assert onlooker.is_held()
    time.sleep(0.15)
    assert onlooker.claim().record.attempt == 2


def test_without_hard_links_a_claim_is_still_exclusive(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(module.os, "link", refuse)
    assert Leases(folder).claim() is not None
    assert Leases(folder).claim() is None
    assert [path.name for path in folder.iterdir()] == ["1.json"]
