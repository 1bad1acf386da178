"""Run the parts of a device's proof, most telling first, within a time limit; keep the record up to date.

The record is written before and after each check. A later call takes every finding from it if device,
versions and code are the same, and goes on with the rest. A check in which the process ended (a crash of the
driver, a hang that somebody ended) counts as failed then, and the next one follows; one that Ctrl-C ended is
run again.

A GPU that has failed once (an illegal access, a trap) answers nothing more in its process. ``RestartError``
then says so; a new process goes on behind that check.
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
from ablate.base.files import write_bytes_atomic
from ablate.check.facts import facts, machine_of
from ablate.check.page import page
from ablate.check.record import Finding, Part, ProofRecord, State, file_name, read_proof, write_proof
from ablate.check.sharded import fsdp2
from ablate.check.speed import bandwidth, rates, steps
from ablate.check.training import linear_gradients, training
from ablate.execute.environment import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ablate.check.setup import Checks, Setup
    from ablate.recipes import OperandPolicy


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
    "FSDP2": fsdp2,
}
"""The parts, in their order. On a GPU each policy has kernels of its own, which take minutes to compile: the
bits of a few policies come first, those of all others near the end."""

OUT_OF_TIME = "time"
"""Why a part was not run that did not fit the time limit."""


class RestartError(Exception):
    """The device was lost, and a new process has to go on."""


class _Keeper:
    """The record on disk, and what an earlier process found."""

    def __init__(self, setup: Setup, out: Path) -> None:
        machine, code = machine_of(setup), code_digest("check")
        self.path = out / f"{file_name(machine)}.json"
        self.record = ProofRecord(machine=machine, code=code, measured_unix=time.time(), parts=())
        self.known: dict[tuple[str, str, str], Finding] = {}
        try:
            found = read_proof(self.path)
        except (OSError, ValueError):  # none, or of no use
            return
        if (found.machine, found.code) != (machine, code):
            return
        self.known = {
            (part.name, one.backend, one.check): one for part in found.parts for one in part.findings
        }
        if found.begun is not None:
            _, backend, check = found.begun
            self.known[found.begun] = Finding(
                backend=backend, check=check, result="failed", detail="the process ended within it"
            )

    def save(self, where: tuple[str, str, str], fault: FaultError) -> str:
        """Save the tensors that show a fault beside the record, for ``torch.load``; return its name."""
        words = re.findall(r"[\w.]+", " ".join(where))
        path = self.path.with_name("-".join([self.path.stem, *words]) + ".pt")
        content = io.BytesIO()
        torch.save({"what": str(fault), "tensors": fault.tensors, "facts": fault.facts}, content)
        write_bytes_atomic(path, content.getvalue())
        return path.name

    def keep(self, parts: list[Part], begun: tuple[str, str, str] | None = None) -> None:
        """Write the record with these parts, and all that is known of later ones."""
        names = {part.name for part in parts}
        later: dict[str, list[Finding]] = {}
        for (name, _, _), finding in self.known.items():
            if name not in names:
                later.setdefault(name, []).append(finding)
        parts = parts + [_part(name, findings, OUT_OF_TIME) for name, findings in later.items()]
        self.record = ProofRecord(
            machine=self.record.machine, code=self.record.code, measured_unix=time.time(),
            parts=tuple(parts), begun=begun,
        )  # fmt: skip
        write_proof(self.path, self.record)


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
        RestartError: the GPU answers nothing more in this process; the record is kept.
        OSError: the folder cannot be written to.
    """
    keeper, ends = _Keeper(setup, out), clock() + 60 * minutes
    done: list[Part] = []
    for name, make in (PARTS if parts is None else parts).items():
        findings: list[Finding] = []
        why = None
        for check in _all(make, setup):
            where = (name, check.backend, check.name)
            finding = keeper.known.get(where)
            if finding is None:
                if clock() >= ends:
                    why = OUT_OF_TIME
                    break
                keeper.keep([*done, _part(name, findings, OUT_OF_TIME)], begun=where)
                started = clock()
                try:
                    outcome, error = check.outcome()
                except KeyboardInterrupt:
                    keeper.keep([*done, _part(name, findings, OUT_OF_TIME)])
                    raise
                tensors = keeper.save(where, error) if isinstance(error, FaultError) else None
                finding = Finding(
                    backend=check.backend,
                    check=check.name,
                    seconds=clock() - started,
                    tensors=tensors,
                    **outcome,
                )
                keeper.known[where] = finding
                say(_line(name, finding))
                if error is not None and _is_loss(error):
                    keeper.keep([*done, _part(name, [*findings, finding], OUT_OF_TIME)])
                    raise RestartError(finding.detail)
            findings.append(finding)
        done.append(_part(name, findings, why))
    keeper.keep(done)
    write_bytes_atomic(keeper.path.with_suffix(".md"), page(keeper.record).encode())
    return keeper.record, keeper.path


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
    state: State = "passed"
    if "failed" in results:
        state = "failed"
    elif why is not None:
        state = "not run"
    elif results == {"skipped"}:
        state, why = "skipped", findings[0].detail
    return Part(name=name, state=state, why=why, findings=tuple(findings))


def _is_loss(error: Exception) -> bool:
    """Whether an error leaves the GPU's context useless: what torch raises for an error of the driver."""
    return (
        type(error).__name__ == "AcceleratorError"
        or "CUDA error:" in str(error)
        or "HIP error:" in str(error)
    )


def _line(part: str, one: Finding) -> str:
    who = f" ({one.backend})" if one.backend else ""
    figures = "".join(f"; {name} {value:.4g}" for name, value in one.figures.items())
    return f"{one.result:<7} {part}: {one.check}{who}: {one.detail}{figures}"
