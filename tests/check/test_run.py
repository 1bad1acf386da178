"""The runner of the proof: record, time limit, going on, failures. The clock is a stand-in."""

import itertools
from dataclasses import replace

import pytest
import torch

from ablate.backends.device import Device
from ablate.backends.testing.check import Check, FaultError, Skip, Told
from ablate.base.errors import UserError
from ablate.check import run
from ablate.check.device import Setup
from ablate.check.record import read_proof
from ablate.check.run import prove

SETUP = Setup(where="cpu", device=Device(kind="cpu", arch="cpu", name="CPU"), backends={})


class Parts:
    """Two parts of two tasks each; ``does`` says what a task does, ``ran`` which were run."""

    def __init__(self, **does):
        self.does, self.ran = does, []

    def task(self, name):
        def run():
            self.ran.append(name)
            return self.does.get(name, lambda: "as it should be")()

        return Check(backend="emulated", of=name, run=run)

    def prove(self, out, *, minutes=10, clock=None, setup=SETUP):
        parts = {
            "first": lambda _: iter((self.task("a"), self.task("b"))),
            "second": lambda _: iter((self.task("c"), self.task("d"))),
        }
        clock = clock or itertools.count().__next__
        return prove(setup, out, minutes=minutes, parts=parts, clock=clock)


def fail(error):
    def run():
        raise error

    return run


def states(record):
    return {part.name: (part.state, part.why) for part in record.parts}


def findings(record):
    return {one.check: (one.result, one.detail) for part in record.parts for one in part.findings}


def test_the_record_says_what_was_found_and_how_long_it_took(tmp_path):
    parts = Parts(b=lambda: Told(detail="measured", figures={"clock_MHz": 2000.0}))
    record, path = parts.prove(tmp_path)
    assert states(record) == {"first": ("passed", None), "second": ("passed", None)}
    assert findings(record)["a"] == ("passed", "as it should be")
    assert record.parts[0].findings[1].figures == {"clock_MHz": 2000.0}
    assert record.parts[0].findings[1].result == "told"
    assert all(one.seconds == 1.0 for part in record.parts for one in part.findings)
    assert read_proof(path) == record
    text = path.with_suffix(".md").read_text()
    assert "Parts: 2 passed." in text
    assert "| b | emulated | told | measured; clock_MHz 2000 |" in text


def test_what_does_not_fit_the_time_is_named_and_run_by_the_next_call(tmp_path):
    parts = Parts()
    # One reading at the start, and before, at the start and at the end of each check.
    record, _ = parts.prove(tmp_path, minutes=0.1)
    assert parts.ran == ["a", "b"]
    assert states(record) == {"first": ("passed", None), "second": ("not run", "time")}
    record, _ = parts.prove(tmp_path, minutes=0.05)
    assert parts.ran == ["a", "b", "c"]
    assert states(record)["second"] == ("not run", "time")
    record, path = parts.prove(tmp_path)
    assert parts.ran == ["a", "b", "c", "d"]
    assert states(record) == {"first": ("passed", None), "second": ("passed", None)}
    assert "Parts: 2 passed" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("other", ["code", "versions", "device", "damage"])
def test_another_code_version_or_device_starts_anew(tmp_path, monkeypatch, other):
    _, path = Parts().prove(tmp_path)
    setup = SETUP
    if other == "code":
        monkeypatch.setattr(run, "code_digest", lambda *_: "other")
    elif other == "versions":
        own = run.machine_of
        monkeypatch.setattr(run, "machine_of", lambda setup: replace(own(setup), versions={"torch": "9"}))
    elif other == "device":
        setup = replace(SETUP, device=replace(SETUP.device, processors=2))
    else:
        path.write_bytes(path.read_bytes().replace(b"as it should be", b"as it was once"))
    again = Parts()
    again.prove(tmp_path, setup=setup)
    assert again.ran == ["a", "b", "c", "d"]


def test_a_failure_stops_no_other_part(tmp_path):
    parts = Parts(
        a=fail(AssertionError("17 values differ")),
        b=fail(FaultError("1 of 32 values differ", {"x": torch.ones(1, 32)[:, :16]}, axis=1)),
        c=fail(Skip("one device")),
        d=fail(Skip("one device")),
    )
    record, path = parts.prove(tmp_path)
    assert findings(record) == {
        "a": ("failed", "17 values differ"),
        "b": ("failed", "1 of 32 values differ"),
        "c": ("skipped", "one device"),
        "d": ("skipped", "one device"),
    }
    assert states(record) == {"first": ("failed", None), "second": ("skipped", "one device")}
    assert [(part.name, one.check) for part, one in record.failed] == [("first", "a"), ("first", "b")]
    text, (tensors,) = path.with_suffix(".md").read_text(), [one.tensors for _, one in record.failed[1:]]
    assert "- first, a emulated: 17 values differ" in text
    assert f"- first, b emulated: 1 of 32 values differ; [tensors]({tensors})" in text
    saved = torch.load(tmp_path / tensors, weights_only=True)
    assert torch.equal(saved["tensors"]["x"], torch.ones(1, 16))
    assert saved["facts"] == {"axis": 1}


def test_a_part_that_cannot_make_its_tasks_has_failed(tmp_path):
    def broken(_setup):
        yield Check(of="first", run=lambda: "fine")
        raise ValueError("no such policy")

    record, _ = prove(SETUP, tmp_path, minutes=1, parts={"broken": broken, "next": lambda _: iter(())})
    assert findings(record)["tasks"] == ("failed", "ValueError: no such policy")
    assert states(record) == {"broken": ("failed", None), "next": ("passed", None)}


def test_a_check_in_which_the_process_ended_has_failed_and_the_next_one_follows(tmp_path):
    class Crash(BaseException):
        """What no code of ours catches."""

    parts = Parts(b=fail(Crash()))
    with pytest.raises(Crash):
        parts.prove(tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert read_proof(path).begun == ("first", "emulated", "b")
    parts.does = {}
    record, _ = parts.prove(tmp_path)
    assert parts.ran == ["a", "b", "c", "d"]
    assert findings(record)["b"] == ("failed", "the process ended within it")
    assert record.begun is None


def test_a_check_that_ctrl_c_ended_is_run_again(tmp_path):
    parts = Parts(b=fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        parts.prove(tmp_path)
    parts.does = {}
    record, _ = parts.prove(tmp_path)
    assert parts.ran == ["a", "b", "b", "c", "d"]
    assert not record.failed


def test_after_a_lost_gpu_the_next_call_goes_on_behind_it(tmp_path):
    parts = Parts(b=fail(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(UserError, match="illegal memory access"):
        parts.prove(tmp_path)
    record, _ = parts.prove(tmp_path)
    assert parts.ran == ["a", "b", "c", "d"]
    assert findings(record)["b"][0] == "failed"
    assert states(record)["second"] == ("passed", None)
