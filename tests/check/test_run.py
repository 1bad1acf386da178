"""The runner of the proof: record, time limit, going on, failures. The clock is a stand-in."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from ablate.backends.device import Device
from ablate.backends.testing import Check, FaultError, Skip, Told, ending
from ablate.base.errors import UserError
from ablate.check import Setup, run
from ablate.check import record as record_of
from ablate.check.record import read_proof

SETUP = Setup(
    where="cpu", device=Device(kind="cpu", arch="cpu", name="CPU"), backends={}
)
PASSED = ("passed", None)


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """Prove two parts of two checks each; ``does``: what a check does; return record, file and what ran."""

    def proved(*, minutes=10, setup=SETUP, **does):
        ran = []
        clock = itertools.count().__next__

        def check(name):
            def run():
                ran.append(name)
                return does.get(name, lambda: "as it should be")()

            return Check(backend="emulated", of=name, run=run)

        parts = {
            "first": lambda _: map(check, "ab"),
            "second": lambda _: map(check, "cd"),
        }
        monkeypatch.setattr(run, "PARTS", parts)
        try:
            return *run.prove(
                setup, tmp_path, minutes=minutes, say=id, clock=clock
            ), ran
        except (UserError, KeyboardInterrupt, Crash):
            return read_proof(next(tmp_path.glob("*.json"))), None, ran

    return proved


class Crash(BaseException):
    """What no code of ours catches."""


def states(record):
    return {part.name: (part.state, part.why) for part in record.parts}


def findings(record):
    findings = itertools.chain(*(part.findings for part in record.parts))
    return {finding.check: (finding.result, finding.detail) for finding in findings}


def test_the_record_says_what_was_found_and_how_long_it_took(prove, monkeypatch):
    monkeypatch.setattr(record_of, "OTHER_WORK", "b")
    record, path, _ = prove(b=lambda: Told("measured", {"clock_MHz": 2000.0}))
    assert states(record) == {"first": PASSED, "second": PASSED}
    assert findings(record)["a"] == ("passed", "as it should be")
    assert findings(record)["b"] == ("told", "measured")
    assert record.parts[0].findings[0].seconds == 1.0
    assert read_proof(path) == record
    text = path.with_suffix(".md").read_text()
    assert "Parts: 2 passed." in text
    assert "\n\nOther work in first: measured. Times may be too long.\n" in text
    assert "| first | b | emulated | told | measured; clock_MHz 2000 |" in text


def test_what_does_not_fit_the_time_is_named_and_run_by_the_next_call(prove):
    # One reading at the start, and before, at the start and at the end of each check.
    record, _, ran = prove(minutes=0.1)
    assert ran == ["a", "b"]
    assert states(record) == {"first": PASSED, "second": ("not run", "time")}
    record, _, ran = prove(minutes=0.05)
    assert ran == ["c"]
    assert states(record)["second"] == ("not run", "time")
    record, _, ran = prove()
    assert ran == ["d"]
    assert states(record) == {"first": PASSED, "second": PASSED}


@pytest.mark.parametrize("other", ["code", "versions", "device", "damage"])
def test_another_code_version_or_device_starts_anew(prove, monkeypatch, other):
    _, path, _ = prove()
    setup = SETUP
    if other == "code":
        monkeypatch.setattr(run, "code_digest", lambda *_: "other")
    elif other == "versions":
        monkeypatch.setattr(run, "version_of", lambda _: "9")
    elif other == "device":
        setup = replace(SETUP, device=replace(SETUP.device, processors=2))
    else:
        path.write_text(path.read_text().replace("as it should be", "as it was once"))
    assert prove(setup=setup)[2] == ["a", "b", "c", "d"]


def test_a_failure_stops_no_other_part(prove):
    fault = FaultError("1 of 32 values differ", {"x": torch.ones(1, 32)[:, :16]})
    skip = partial(ending, Skip("one device"))
    broken = partial(ending, ValueError("no such policy\nmore"))
    record, path, _ = prove(a=broken, b=partial(ending, fault), c=skip, d=skip)
    assert findings(record) == {
        "a": ("failed", "ValueError: no such policy"),
        "b": ("failed", "1 of 32 values differ"),
        "c": ("skipped", "one device"),
        "d": ("skipped", "one device"),
    }
    assert states(record) == {
        "first": ("failed", None),
        "second": ("skipped", "one device"),
    }
    tensors = record.parts[0].findings[1].tensors
    line = f"| first | b | emulated | failed | 1 of 32 values differ; [tensors]({tensors}) |"
    page = path.with_suffix(".md").read_text()
    failures = page.partition("| detail |")[2].splitlines()[2:4]
    assert line in failures  # in front of all else
    saved = torch.load(path.with_name(tensors), weights_only=True)
    assert torch.equal(saved["tensors"]["x"], torch.ones(1, 16))


@pytest.mark.parametrize(
    ("error", "again", "found"),
    [
        (Crash(), "cd", "failed: the process ended within it"),
        (KeyboardInterrupt(), "bcd", "passed: as it should be"),
        (RuntimeError("CUDA error: no"), "cd", "failed: RuntimeError: CUDA error:"),
    ],
    ids=["crash", "Ctrl-C", "lost GPU"],
)
def test_after_an_end_the_next_call_goes_on(prove, error, again, found):
    record, _, ran = prove(b=partial(ending, error))
    assert ran == ["a", "b"]
    assert (record.begun is not None) == isinstance(error, Crash)
    record, _, ran = prove()
    assert ran == [*again]
    result, detail = findings(record)["b"]
    assert f"{result}: {detail}".startswith(found)
    assert states(record)["second"] == PASSED
    assert record.begun is None


def test_a_part_that_cannot_make_its_checks_has_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "PARTS", {"broken": lambda _: (1 / 0 for _ in "a")})
    record, _ = run.prove(SETUP, tmp_path, minutes=1, say=id)
    fault = "ZeroDivisionError: division by zero"
    assert findings(record) == {"tasks": ("failed", fault)}
    assert states(record) == {"broken": ("failed", None)}
