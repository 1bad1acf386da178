"""Run the parts of a device's proof, most telling first, within a time limit; keep the record up to date.

The record is written before and after each check. A later call takes every finding from it if device,
versions and code are the same, and runs the rest. A check in which the process ended (a crash of the
driver, a hang that somebody ended) counts as failed then, and the next one follows; one that Ctrl-C ended is
run again. A GPU that has failed once (an illegal access, a trap) answers nothing more in its process: the
proof ends there, and the next call continues after that check.
"""

from __future__ import annotations

import io
import itertools
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ablate._version import __version__
from ablate.backends.device import TRITON_PACKAGES, Device, driver_version
from ablate.backends.select import load_backend
from ablate.backends.testing import Check, FaultError, Skip, Told, ending
from ablate.backends.testing.inputs import POLICIES, QUICK
from ablate.backends.testing.suite import both, checks
from ablate.base.errors import UserError, with_type
from ablate.base.files import write_bytes_atomic, write_record
from ablate.check import Setup
from ablate.check.record import (
    NO_WORK,
    OTHER_WORK,
    CheckedPart,
    CheckFinding,
    ProofRecord,
    State,
    TestedMachine,
    detail_of,
    page,
    read_proof,
)
from ablate.check.speed import rates, steps
from ablate.check.training import training
from ablate.execute.environment import (
    code_digest,
    cpu_name,
    fingerprint,
    other_work,
    version_of,
)
from ablate.run import backend_names

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend

Checks = Callable[[Setup], Iterator[Check]]
"""A part: it yields its checks in the same order each time, and does no work between them."""
_CPUS = Path("/proc/cpuinfo")


def setup_of(where: str, device: Device) -> Setup:
    """Ask each back end whether it claims the device; not the reference, which they are compared with."""
    setup = Setup(where=where, device=device, backends={})
    for name in backend_names():
        if name in ("auto", "reference"):
            continue
        try:
            backend = load_backend(name)
        except ValueError as error:
            setup.refused[name] = str(error)
            continue
        supports = [backend.support(both(policy), device) for policy in POLICIES]
        if any(support.mode != "no" for support in supports):
            setup.backends[name] = backend
        else:
            setup.refused[name] = backend.support(both(QUICK[0]), device).detail
    return setup


def machine_of(setup: Setup) -> TestedMachine:
    """Describe what is tested, and with which versions."""
    versions: dict[str, str | None] = {
        "ablate": __version__,
        "python": platform.python_version(),
    }
    for package in ("torch", *TRITON_PACKAGES, "numpy", "pydantic"):
        version = version_of(package)
        if version:
            versions[package] = version
    versions["cuda"] = torch.version.cuda
    versions["rocm"] = torch.version.hip
    versions["driver"] = driver_version()
    return TestedMachine(
        device=setup.device,
        cpu=cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        versions=versions,
    )


def facts(setup: Setup) -> Iterator[Check]:
    """Yield checks that tell the device, other work on it, its arithmetic's fingerprint and its back ends."""
    yield Check(of="device", run=partial(_device, setup))
    yield _work_beside(setup)
    threads = torch.get_num_threads()
    yield Check(
        of="arithmetic",
        run=lambda: Told(f"fingerprint {fingerprint(setup.where, threads)}"),
    )
    for name, backend in setup.backends.items():
        yield Check(of="back end", backend=name, run=partial(_detail, backend))
    for name, why in setup.refused.items():
        skip = Skip(f"does not claim this device: {why}")
        yield Check(of="back end", backend=name, run=partial(ending, skip))


def _work_beside(setup: Setup) -> Check:
    """Make a check that tells what else the device does now."""
    return Check(of=OTHER_WORK, run=lambda: Told(other_work(setup.where) or NO_WORK))


def _detail(backend: Backend) -> Told:
    return Told(backend.detail())


def _device(setup: Setup) -> Told:
    """Tell the device and its figures that can be read; name those that cannot."""
    cuda = torch.cuda
    figures: dict[str, float] = {}
    sources: dict[str, Callable[[], float]] = {
        "clock_MHz": lambda: statistics.median(
            map(float, re.findall(r"cpu MHz\s*:\s*([\d.]+)", _CPUS.read_text("utf-8")))
        )
    }
    name = f"{cpu_name()}, threads: {torch.get_num_threads()}"
    if setup.on_gpu:
        about: Any = cuda.get_device_properties(setup.where)
        name = f"{about.name} ({setup.device.arch})"
        figures = {
            "memory_GB": about.total_memory / 1e9,
            "processors": float(about.multi_processor_count),
        }
        sources = {
            "largest_clock_MHz": lambda: about.clock_rate / 1e3,
            "clock_MHz": lambda: float(cuda.clock_rate(setup.where)),
            "power_W": lambda: cuda.power_draw(setup.where) / 1e3,
            "temperature_C": lambda: float(cuda.temperature(setup.where)),
        }
    for figure, read in sources.items():
        try:
            figures[figure] = read()
        except Exception as error:
            # torch lacks it, or the packages of NVML and AMD SMI are missing
            name += f"; not known: {figure} ({with_type(error)})"
    return Told(name, figures)


def _suite(*kinds: str, quick: bool | None = None) -> Checks:
    """Make a part of the suite's checks of these kinds, of QUICK policies, the others, or (None) all."""

    def part(setup: Setup) -> Iterator[Check]:
        policies = tuple(
            policy for policy in POLICIES if quick is None or quick == (policy in QUICK)
        )
        for name, backend in setup.backends.items():
            for check in checks(backend, setup.where, policies):
                if check.kind in kinds:
                    kind = check.kind if len(kinds) > 1 else ""
                    yield replace(check, backend=name, kind=kind)

    return part


PARTS: dict[str, Checks] = {
    "device": facts,
    "quantised bits": _suite("quantised bits", quick=True),
    "exact probe": _suite("exact probe", "accumulator", "rounding of sums"),
    "products": _suite("product"),
    "training": training,
    "GEMM rates": rates,
    "quantised bits of other policies": _suite("quantised bits", quick=False),
    "step times": lambda setup: itertools.chain(steps(setup), [_work_beside(setup)]),
}
"""The parts, in their order. On a GPU each policy has kernels of its own, which take minutes to compile: the
bits of a few policies come first, those of all others near the end."""


_Place = tuple[str, str, str]
"""Where a finding belongs: the part, the back end and the check."""


class _Keeper:
    """The findings so far, and the record of them on disk.

    It begins with those of an earlier record of the same device, versions and code.
    """

    def __init__(self, setup: Setup, out: Path) -> None:
        self.machine = machine_of(setup)
        self.code = code_digest("check")
        self.path = out / f"{self.machine.file_name}.json"
        self.findings: dict[_Place, CheckFinding] = {}
        self.finished_parts: set[str] = set()
        try:
            former = read_proof(self.path)
        except (OSError, ValueError):  # no record, or a damaged one
            return
        if former.machine != self.machine or former.code != self.code:
            return
        for part in former.parts:
            for finding in part.findings:
                self.findings[part.name, finding.backend, finding.check] = finding
        if former.begun is not None:
            _, backend, check = former.begun
            self.findings[former.begun] = CheckFinding(
                backend=backend,
                check=check,
                result="failed",
                detail="the process ended within it",
            )

    def write(self, begun: _Place | None = None) -> ProofRecord:
        """Write the record. ``begun``: the check that runs now."""
        record = ProofRecord(
            machine=self.machine,
            code=self.code,
            measured_unix=time.time(),
            begun=begun,
            parts=tuple(self._part(name) for name in PARTS),
        )
        write_record(self.path, asdict(record))
        return record

    def _part(self, name: str) -> CheckedPart:
        findings = tuple(
            finding for place, finding in self.findings.items() if place[0] == name
        )
        results = {finding.result for finding in findings}
        why = None
        state: State = "passed"
        if name not in self.finished_parts:
            state = "not run"
            why = "time"
        elif results == {"skipped"}:
            state = "skipped"
            why = findings[0].detail
        if "failed" in results:
            state = "failed"
        return CheckedPart(name=name, state=state, why=why, findings=findings)


def prove(
    setup: Setup,
    out: Path,
    *,
    minutes: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ProofRecord, Path]:
    """Run the parts on a device; write record and page to a folder; return the record and its path.

    Args:
        setup: what is tested.
        out: the folder; its findings of this device, with these versions and this code, are kept.
        minutes: no check begins after so many.
        say: called with a line for each new finding.
        clock: seconds.

    Raises:
        UserError: the GPU answers nothing more in this process; the record is kept.
        OSError: the folder cannot be written to.
    """
    end = clock() + 60 * minutes
    keeper = _Keeper(setup, out)
    for name, make in PARTS.items():
        for check in _all(make, setup):
            place = (name, check.backend, check.name)
            if place in keeper.findings:
                continue
            if clock() >= end:
                break
            keeper.write(begun=place)
            started = clock()
            try:
                outcome, error = check.outcome()
            except KeyboardInterrupt:
                keeper.write()
                raise
            tensors = None
            if isinstance(error, FaultError):
                tensors = _save(keeper.path, place, error)
            finding = CheckFinding(
                backend=check.backend,
                check=check.name,
                seconds=clock() - started,
                tensors=tensors,
                **outcome,
            )
            keeper.findings[place] = finding
            say(
                f"{finding.result:<7} {name}: {finding.check} ({finding.backend}): {detail_of(finding)}"
            )
            if re.search(r"AcceleratorError|(CUDA|HIP) error:", repr(error)):
                keeper.write()
                message = f"the device is lost to this process ({finding.detail})"
                hint = "the same command run again continues behind that check"
                raise UserError(message, hint=hint)
        else:
            keeper.finished_parts.add(name)
    record = keeper.write()
    write_bytes_atomic(keeper.path.with_suffix(".md"), page(record).encode())
    return record, keeper.path


def _all(make: Checks, setup: Setup) -> Iterator[Check]:
    """Yield a part's checks; if making them raises an error, yield a check that fails with it."""
    try:
        yield from make(setup)
    except Exception as error:  # such as a driver's: the other parts still run
        yield Check(of="tasks", run=partial(ending, error))


def _save(path: Path, place: _Place, fault: FaultError) -> str:
    """Save the tensors that show a fault beside the record, for ``torch.load``; return the file's name."""
    words = [path.stem, *re.findall(r"[\w.]+", " ".join(place))]
    beside = path.with_name("-".join(words) + ".pt")
    content = io.BytesIO()
    torch.save({"what": str(fault), "tensors": fault.tensors}, content)
    write_bytes_atomic(beside, content.getvalue())
    return beside.name
