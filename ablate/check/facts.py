"""The first part: what the device is, its clocks, which features it has. Each is found by trying."""

from __future__ import annotations

import os
import platform
import re
import statistics
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from ablate._version import __version__
from ablate.backends.device import TRITON_PACKAGES
from ablate.backends.quantisers import cpu_kernel
from ablate.backends.testing.check import Check, Told, in_short
from ablate.check.record import NO_WORK, OTHER_WORK, Machine
from ablate.check.setup import skipped
from ablate.execute.environment import cpu_name, other_work
from ablate.execute.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.backends.protocol import Backend
    from ablate.check.setup import Setup

_PACKAGES = ("torch", *TRITON_PACKAGES, "numpy", "pydantic")
_DRIVER, _CPUS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")
_FEATURES = {
    "F.scaled_mm": "torch.nn.functional:scaled_mm",
    "float4_e2m1fn_x2": "torch:float4_e2m1fn_x2",
    "fully_shard": "torch.distributed.fsdp:fully_shard",
    "tl.dot_scaled": "triton.language:dot_scaled",
}
"""What is tried by name; what raises is missing."""


def machine_of(setup: Setup) -> Machine:
    """Describe what is tested, and with which versions."""
    versions: dict[str, str | None] = {"ablate": __version__, "python": platform.python_version()}
    versions |= {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    return Machine(
        device=setup.device,
        cpu=cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        versions=versions | {"cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": _driver()},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, which the kernel module tells without any package."""
    if not _DRIVER.is_file():
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text(encoding="utf-8"))
    return found and found.group()


def facts(setup: Setup) -> Iterator[Check]:
    """Yield the device, its clocks, the fingerprint of its arithmetic, its features and its back ends."""
    yield Check(of="device", run=partial(_device, setup))
    yield Check(of="clocks", run=partial(_clocks, setup))
    yield work_beside(setup)
    yield Check(of="arithmetic", run=lambda: Told(detail=f"fingerprint {fingerprint(setup.where)}"))
    features: dict[str, Callable[[], object]] = {
        name: partial(resolve_name, place) for name, place in _FEATURES.items()
    }
    features |= (
        {"NVML or AMD SMI": torch.cuda.utilization}
        if setup.on_gpu
        else {"compiled CPU quantiser": _cpu_quantiser}
    )
    for name, attempt in features.items():
        yield Check(of=f"feature: {name}", run=partial(_tried, attempt))
    for name, backend in setup.backends.items():
        yield Check(of="back end", backend=name, run=partial(_told, backend))
    for name, why in setup.refused.items():
        yield skipped("back end", f"does not claim this device: {why}", name)


def work_beside(setup: Setup) -> Check:
    """Return a look at what else the device does now."""
    return Check(of=OTHER_WORK, run=lambda: Told(detail=other_work(setup.where) or NO_WORK))


def _told(backend: Backend) -> Told:
    return Told(detail=backend.detail())


def _device(setup: Setup) -> Told:
    if not setup.on_gpu:
        cores = len(os.sched_getaffinity(0))
        return Told(
            detail=f"{cpu_name()}, threads: {torch.get_num_threads()}", figures={"cores": float(cores)}
        )
    found = torch.cuda.get_device_properties(setup.where)
    figures = {"memory_GB": found.total_memory / 1e9, "processors": float(found.multi_processor_count)}
    more = {"L2_MB": ("L2_cache_size", 1e6), "memory_bus_bits": ("memory_bus_width", 1)}
    figures |= {name: getattr(found, key) / unit for name, (key, unit) in more.items() if hasattr(found, key)}
    return Told(detail=f"{found.name} ({setup.device.arch})", figures=figures)


def _clocks(setup: Setup) -> Told:
    """Tell each clock that can be read; which can is told, too."""
    where = setup.where
    sources: dict[str, Callable[[], float]] = {
        "clock_MHz": lambda: statistics.median(
            map(float, re.findall(r"cpu MHz\s*:\s*([\d.]+)", _CPUS.read_text(encoding="utf-8")))
        )
    }
    if setup.on_gpu:
        found: Any = torch.cuda.get_device_properties(where)
        sources = {
            "largest_clock_MHz": lambda: found.clock_rate / 1e3,
            "largest_memory_clock_MHz": lambda: found.memory_clock_rate / 1e3,
            "clock_MHz": lambda: float(torch.cuda.clock_rate(where)),
            "power_W": lambda: torch.cuda.power_draw(where) / 1e3,
            "temperature_C": lambda: float(torch.cuda.temperature(where)),
        }
    figures, unknown = {}, []
    for name, read in sources.items():
        try:
            figures[name] = read()
        except Exception as error:  # torch lacks it, or the packages of NVML and AMD SMI are missing
            unknown.append(f"{name} ({in_short(error)})")
    return Told(detail=f"not known: {'; '.join(unknown)}" if unknown else "all read", figures=figures)


def _cpu_quantiser() -> str:
    library, how = cpu_kernel.loaded()
    if library is None:
        raise RuntimeError(how)
    return how


def _tried(attempt: Callable[[], object]) -> Told:
    try:
        attempt()
    except Exception as error:  # whatever it raises, it is not there
        return Told(detail=f"missing: {in_short(error)}")
    return Told(detail="there")
