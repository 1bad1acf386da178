"""Run the parts of the proof, most telling first, within a time limit, and keep the record up to date.

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
from typing import TYPE_CHECKING, Any

import torch

from ablate.backends.testing.smallest import FaultError
from ablate.backends.testing.suite import in_short
from ablate.base.files import write_bytes_atomic
from ablate.execute.environment import code_digest
from ablate.prove.arithmetic import ARITHMETIC, other_bits
from ablate.prove.facts import facts, machine_of
from ablate.prove.page import page
from ablate.prove.record import Finding, Part, ProofRecord, State, file_name, read_proof, write_proof
from ablate.prove.sharded import fsdp2
from ablate.prove.speed import bandwidth, rates, steps
from ablate.prove.task import Setup, Skip, Task, Tasks, Told
from ablate.prove.training import linear_gradients, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

PARTS: dict[str, Tasks] = {
    "device": facts,
    **ARITHMETIC,
    "gradients": linear_gradients,
    "training": training,
    "quantiser bandwidth": bandwidth,
    "GEMM rates": rates,
    "quantised bits of other policies": other_bits,
    "step times": steps,
    "FSDP2": fsdp2,
}
"""The parts, in their order."""

OUT_OF_TIME = "time"
"""Why a part was not run that did not fit the time limit."""


class RestartError(Exception):
    """The device was lost, and a new process has to go on."""


class _Keeper:
    """The record on disk, and what an earlier process found."""

    def __init__(self, setup: Setup, out: Path) -> None:
        machine, code = machine_of(setup), code_digest("prove")
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
    parts: Mapping[str, Tasks] | None = None,
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
    for name, tasks in (PARTS if parts is None else parts).items():
        findings: list[Finding] = []
        why = None
        for task in _all(tasks, setup):
            where = (name, task.backend, task.name)
            finding = keeper.known.get(where)
            if finding is None:
                if clock() >= ends:
                    why = OUT_OF_TIME
                    break
                keeper.keep([*done, _part(name, findings, OUT_OF_TIME)], begun=where)
                try:
                    finding, error = _finding(task, clock)
                except KeyboardInterrupt:
                    keeper.keep([*done, _part(name, findings, OUT_OF_TIME)])
                    raise
                if isinstance(error, FaultError):
                    finding = replace(finding, tensors=keeper.save(where, error))
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


def _all(tasks: Tasks, setup: Setup) -> Iterator[Task]:
    """Yield a part's tasks; if it cannot make them, one that says so."""
    try:
        yield from tasks(setup)
    except Exception as error:  # of a driver, say: the other parts still run
        yield Task(name="tasks", run=_raiser(error))


def _raiser(error: Exception) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


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


def _finding(task: Task, clock: Callable[[], float]) -> tuple[Finding, Exception | None]:
    """Run a task; return what it found, and the error that it ended with."""
    started = clock()
    error: Exception | None = None
    result: dict[str, Any]
    try:
        found = task.run()
    except Skip as reason:
        result = {"result": "skipped", "detail": str(reason)}
    except AssertionError as fault:
        error, result = fault, {"result": "failed", "detail": str(fault) or "assertion without a message"}
    except Exception as fault:  # errors of drivers and compilers are what is looked for
        error, result = fault, {"result": "failed", "detail": in_short(fault)}
    else:
        result = {"result": "passed", "detail": found}
        if isinstance(found, Told):
            result = {"result": "told", "detail": found.detail, "figures": found.figures}
    return Finding(backend=task.backend, check=task.name, seconds=clock() - started, **result), error


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
