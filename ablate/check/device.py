"""The first part: what the device is, its clocks, and which back ends claim it. Each is found by trying."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ablate._version import __version__
from ablate.backends.device import TRITON_PACKAGES, Device
from ablate.backends.select import load_backend
from ablate.backends.testing.check import Check, Skip, Told, in_short
from ablate.backends.testing.suite import POLICIES, both
from ablate.check.record import NO_WORK, OTHER_WORK, Machine
from ablate.execute.environment import cpu_name, fingerprint, other_work
from ablate.run.backends import backend_names

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend

_DRIVER, _CPUS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A torch device, what it is, the back ends that claim it, and why others do not."""

    where: str
    device: Device
    backends: dict[str, Backend]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.kind != "cpu"


Checks = Callable[[Setup], Iterator[Check]]
"""A part: it yields its checks in the same order each time, and does no work between them."""


def setup_of(where: str, device: Device) -> Setup:
    """Ask every back end but the reference, with which they are compared, whether it claims the device."""
    setup = Setup(where=where, device=device, backends={})
    for name in backend_names():
        if name in ("auto", "reference"):
            continue
        try:
            backend = load_backend(name)
        except ValueError as error:
            setup.refused[name] = str(error)
            continue
        supports = {policy: backend.support(both(policy), device) for policy in POLICIES}
        if any(one.mode != "no" for one in supports.values()):
            setup.backends[name] = backend
        else:
            setup.refused[name] = next(
                one.detail for policy, one in supports.items() if policy.format == "mxfp4"
            )
    return setup


def skipped(name: str, why: str, backend: str = "") -> Check:
    """Return a check that says why there is nothing to test."""

    def run() -> str:
        raise Skip(why)

    return Check(backend=backend, of=name, run=run)


def machine_of(setup: Setup) -> Machine:
    """Describe what is tested, and with which versions."""
    versions: dict[str, str | None] = {"ablate": __version__, "python": platform.python_version()}
    for package in ("torch", *TRITON_PACKAGES, "numpy", "pydantic"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    # NVIDIA's driver tells its version without any package.
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text("utf-8") if _DRIVER.is_file() else "")
    versions |= {
        "cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": driver and driver.group(),
    }  # fmt: skip
    return Machine(
        device=setup.device,
        cpu=cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        versions=versions,
    )


def facts(setup: Setup) -> Iterator[Check]:
    """Yield the device, its clocks, the fingerprint of its arithmetic, and its back ends."""
    yield Check(of="device", run=partial(_device, setup))
    yield Check(of="clocks", run=partial(_clocks, setup))
    yield work_beside(setup)
    yield Check(of="arithmetic", run=lambda: Told(detail=f"fingerprint {fingerprint(setup.where)}"))
    for name, backend in setup.backends.items():
        yield Check(of="back end", backend=name, run=lambda one=backend: Told(detail=one.detail()))  # type: ignore[misc]
    for name, why in setup.refused.items():
        yield skipped("back end", f"does not claim this device: {why}", name)


def work_beside(setup: Setup) -> Check:
    """Return a look at what else the device does now."""
    return Check(of=OTHER_WORK, run=lambda: Told(detail=other_work(setup.where) or NO_WORK))


def _device(setup: Setup) -> Told:
    if not setup.on_gpu:
        return Told(detail=f"{cpu_name()}, threads: {torch.get_num_threads()}")
    found = torch.cuda.get_device_properties(setup.where)
    figures = {"memory_GB": found.total_memory / 1e9, "processors": float(found.multi_processor_count)}
    return Told(detail=f"{found.name} ({setup.device.arch})", figures=figures)


def _clocks(setup: Setup) -> Told:
    """Tell each clock that can be read; which can is told, too."""
    where, found = setup.where, {}
    sources: dict[str, Callable[[], float]] = {
        "clock_MHz": lambda: statistics.median(
            map(float, re.findall(r"cpu MHz\s*:\s*([\d.]+)", _CPUS.read_text("utf-8")))
        )
    }
    if setup.on_gpu:
        properties: Any = torch.cuda.get_device_properties(where)
        sources = {
            "largest_clock_MHz": lambda: properties.clock_rate / 1e3,
            "clock_MHz": lambda: float(torch.cuda.clock_rate(where)),
            "power_W": lambda: torch.cuda.power_draw(where) / 1e3,
            "temperature_C": lambda: float(torch.cuda.temperature(where)),
        }
    unknown = []
    for name, read in sources.items():
        try:
            found[name] = read()
        except Exception as error:  # torch lacks it, or the packages of NVML and AMD SMI are missing
            unknown.append(f"{name} ({in_short(error)})")
    return Told(detail=f"not known: {'; '.join(unknown)}" if unknown else "all read", figures=found)
