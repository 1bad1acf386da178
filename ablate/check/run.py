"""Run the parts of a device's proof, most telling first, within a time limit; keep the record up to date.

The record is written before and after each check. A later call takes every finding from it if device,
versions and code are the same, and goes on with the rest. A check in which the process ended (a crash of the
driver, a hang that somebody ended) counts as failed then, and the next one follows; one that Ctrl-C ended is
run again. A GPU that has failed once (an illegal access, a trap) answers nothing more in its process: the
proof ends there, and the next call goes on behind that check.
"""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ablate.backends.testing.check import Check, FaultError
from ablate.backends.testing.suite import POLICIES, QUICK, checks
from ablate.base.errors import UserError
from ablate.base.files import write_bytes_atomic
from ablate.check.device import facts, machine_of
from ablate.check.record import Finding, Part, ProofRecord, State, page, read_proof, write_proof
from ablate.check.speed import bandwidth, rates, steps
from ablate.check.training import linear_gradients, training
from ablate.execute.environment import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ablate.check.device import Checks, Setup
    from ablate.recipes import OperandPolicy

    Place = tuple[str, str, str]
    """Part, back end and name of a check."""


def _suite(*kinds: str, policies: tuple[OperandPolicy, ...] = POLICIES) -> Checks:
    """Return the part of the conformance suite's checks of some kinds."""

    def part(setup: Setup) -> Iterator[Check]:
        for name, backend in setup.backends.items():
            for check in checks(backend, setup.where, policies):
                if check.kind in kinds:
                    yield replace(check, backend=name, kind=check.kind if len(kinds) > 1 else "")

    return part


PARTS: dict[str, Checks] = {
    "device": facts,
    "quantised bits": _suite("quantised bits", policies=QUICK),
    "exact probe": _suite("exact probe", "accumulator", "rounding of sums"),
    "products": _suite("product"),
    "gain of SR": _suite("stochastic gain"),
    "Hadamard": _suite("Hadamard cancels in the product"),
    "gradients": linear_gradients,
    "training": training,
    "quantiser bandwidth": bandwidth,
    "GEMM rates": rates,
    "quantised bits of other policies": _suite(
        "quantised bits", policies=tuple(one for one in POLICIES if one not in QUICK)
    ),
    "step times": steps,
}
"""The parts, in their order. On a GPU each policy has kernels of its own, which take minutes to compile: the
bits of a few policies come first, those of all others near the end."""

_OUT_OF_TIME = "time"
"""Why a part was not run that did not fit the time limit."""


def prove(
    setup: Setup,
    out: Path,
    *,
    minutes: float,
    say: Callable[[str], None] = lambda _: None,
    parts: Mapping[str, Checks] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ProofRecord, Path]:
    """Run the parts on a device; write record and page to a folder, return the record and its file.

    Args:
        setup: what is tested.
        out: the folder; what it already holds of this device, with these versions and this code, is kept.
        minutes: no check begins later than that.
        say: called with a line for each new finding.
        parts: by name, in their order; all by default.
        clock: seconds.

    Raises:
        UserError: the GPU answers nothing more in this process; the record is kept.
        OSError: the folder cannot be written to.
    """
    machine, code, ends = machine_of(setup), code_digest("check"), clock() + 60 * minutes
    path = out / f"{machine.file_name}.json"
    try:
        former = read_proof(path)
    except (OSError, ValueError):  # none, or of no use
        former = None
    known: dict[Place, Finding] = {}
    if former is not None and (former.machine, former.code) == (machine, code):
        known = {(part.name, one.backend, one.check): one for part in former.parts for one in part.findings}
        if former.begun is not None:
            known[former.begun] = Finding(
                backend=former.begun[1], check=former.begun[2], result="failed",
                detail="the process ended within it",
            )  # fmt: skip
    done: dict[str, tuple[list[Finding], str | None]] = {}

    def keep(begun: Place | None = None) -> ProofRecord:
        """Write the record with what is done, and all that is known of later parts."""
        found = {name: (list(findings), why) for name, (findings, why) in done.items()}
        for (name, _, _), finding in known.items():
            if name not in done:
                found.setdefault(name, ([], _OUT_OF_TIME))[0].append(finding)
        record = ProofRecord(
            machine=machine, code=code, measured_unix=time.time(), begun=begun,
            parts=tuple(_part(name, *of_part) for name, of_part in found.items()),
        )  # fmt: skip
        write_proof(path, record)
        return record

    for name, make in (PARTS if parts is None else parts).items():
        findings: list[Finding] = []
        for check in _all(make, setup):
            done[name] = findings, _OUT_OF_TIME
            place = (name, check.backend, check.name)
            if place not in known:
                if clock() >= ends:
                    break
                keep(begun=place)
                started = clock()
                try:
                    outcome, error = check.outcome()
                except KeyboardInterrupt:
                    keep()
                    raise
                found = Finding(
                    backend=check.backend, check=check.name, seconds=clock() - started,
                    tensors=_save(path, place, error) if isinstance(error, FaultError) else None, **outcome,
                )  # fmt: skip
                known[place] = found
                figures = "".join(f"; {one} {value:.4g}" for one, value in found.figures.items())
                say(f"{found.result:<7} {name}: {found.check} ({found.backend}): {found.detail}{figures}")
                if type(error).__name__ == "AcceleratorError" or re.search("(CUDA|HIP) error:", str(error)):
                    findings.append(found)
                    keep()
                    what = f"the device is lost to this process ({found.detail})"
                    raise UserError(what, hint="the same command goes on behind that check")
            findings.append(known[place])
        else:
            done[name] = findings, None
    record = keep()
    write_bytes_atomic(path.with_suffix(".md"), page(record).encode())
    return record, path


def _all(make: Checks, setup: Setup) -> Iterator[Check]:
    """Yield a part's checks; if it cannot make them, one that says so."""
    try:
        yield from make(setup)
    except Exception as error:  # of a driver, say: the other parts still run
        fault = error

        def run() -> str:
            raise fault

        yield Check(of="tasks", run=run)


def _part(name: str, findings: list[Finding], why: str | None) -> Part:
    """Return a part; ``why``: the reason if it did not come to its end."""
    results = {one.result for one in findings}
    state: State = "failed" if "failed" in results else "passed" if why is None else "not run"
    if why is None and results == {"skipped"}:
        state, why = "skipped", findings[0].detail
    return Part(name=name, state=state, why=why, findings=tuple(findings))


def _save(path: Path, place: Place, fault: FaultError) -> str:
    """Save the tensors that show a fault beside the record, for ``torch.load``; return the file's name."""
    beside = path.with_name("-".join([path.stem, *re.findall(r"[\w.]+", " ".join(place))]) + ".pt")
    content = io.BytesIO()
    torch.save({"what": str(fault), "tensors": fault.tensors, "facts": fault.facts}, content)
    write_bytes_atomic(beside, content.getvalue())
    return beside.name
