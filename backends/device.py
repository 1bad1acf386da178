"""The device of a GEMM as plain data, to check support for absent hardware; which tools are here."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ablate.base.errors import UserError, first_line
from ablate.base.files import refuse_open_folder

Kind = Literal["cpu", "cuda", "hip"]

KNOWN: dict[str, tuple[Kind, str]] = {
    "cpu": ("cpu", "CPU"),
    "sm_80": ("cuda", "Ampere: A100"),
    "sm_90": ("cuda", "Hopper: H100, H200"),
    "sm_100": ("cuda", "Blackwell: B200, GB200"),
    "sm_103": ("cuda", "Blackwell Ultra: B300, GB300"),
    "sm_120": ("cuda", "Blackwell: RTX 50, RTX PRO 6000"),
    "gfx942": ("hip", "CDNA 3: MI300X, MI325X"),
    "gfx950": ("hip", "CDNA 4: MI350X, MI355X"),
}
"""Architectures known to the back ends: (kind, example products)."""

TRITON_PACKAGES = ("triton", "pytorch-triton-rocm", "triton-rocm")
"""The names under which builds of torch bring Triton."""

OLDEST_TRITON = (3, 6)
NEWEST_TRITON = (3, 9)
"""The range of Triton in which the tests interpret the kernels and compile them. A newer one is not refused:
the self-test on the device decides."""

OLDEST_TO_INTERPRET = (3, 8)
"""The oldest Triton whose interpreter supports ``tl.dot_scaled``."""
OLDEST_TO_WIDEN_NVFP4 = (3, 8)
"""The oldest Triton that widens NVFP4 to bf16 without an FP4 unit; older ones cannot compile it."""
_DRIVER = Path("/proc/driver/nvidia/version")

NO_COMPILER = "no C++ compiler: emulated steps take 5 to 10 times as long (`pip install ziglang` brings one)"
"""The times are those of ``benchmarks/train_step.py`` at width 128 with and without ABLATE_CPU_KERNEL=off."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's kind, architecture (``cpu``, ``sm_100``, ``gfx950``), name and number of processors."""

    kind: Kind
    arch: str
    name: str
    processors: int = 1


def device_of_arch(arch: str) -> Device:
    """Describe an architecture (``sm_100``) whose hardware is absent.

    Raises:
        UserError: the architecture is unknown.
    """
    if arch not in KNOWN:
        raise UserError(f"no architecture '{arch}' (expected {', '.join(KNOWN)})")
    kind, name = KNOWN[arch]
    return Device(kind=kind, arch=arch, name=name)


@lru_cache(maxsize=64)
def device_of(where: str) -> Device:
    """Describe a torch device (``cpu``, ``cuda``, ``cuda:1``).

    Raises:
        RuntimeError, AssertionError: torch's own, if the device cannot be queried.
    """
    import torch

    if torch.device(where).type != "cuda":
        return Device(kind="cpu", arch="cpu", name="CPU")
    properties = torch.cuda.get_device_properties(where)
    kind: Kind = "cuda"
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        kind = "hip"
        arch = str(properties.gcnArchName).split(":")[0]
    return Device(
        kind=kind,
        arch=arch,
        name=properties.name,
        processors=properties.multi_processor_count,
    )


def default_device() -> str:
    """Choose a run's default torch device: the first GPU, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_device(where: str | None) -> tuple[str, Device]:
    """Check the torch device that a command names (None: ``default_device``); return it and what it is.

    Raises:
        UserError: the device cannot be used.
    """
    chosen = where or default_device()
    try:
        return chosen, device_of(chosen)
    except (RuntimeError, AssertionError) as error:  # torch's own, of driver and build
        raise UserError(
            f"device '{chosen}' cannot be used ({first_line(error)}); try cpu"
        ) from None


def cpp_compiler() -> tuple[str, ...] | None:
    """Find the command of a C++ compiler: CXX, the system's, or that of the package ziglang."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if path := shutil.which(name):
            return (path,)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def driver_version() -> str | None:
    """Read the version of NVIDIA's driver, which tells it without any package; None if there is none."""
    text = _DRIVER.read_text("utf-8") if _DRIVER.is_file() else ""
    version_text = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version_text and version_text.group()


def triton_build() -> str | None:
    """Read the whole version of the installed Triton, also of ROCm's; None if there is none."""
    for package in TRITON_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, ...] | None:
    """Read (major, minor) of the installed Triton; None if there is none."""
    build = triton_build()
    return None if build is None else release(build)


def release(text: str) -> tuple[int, ...]:
    """Return (major, minor) of a version."""
    return tuple(int(part) for part in re.split(r"[.+]", text)[:2])


@lru_cache(maxsize=1)
def _cache_fault() -> str | None:
    """Say whether somebody else could have put code where Triton loads its kernels from."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    try:
        refuse_open_folder(folder)
    except UserError as error:
        return f"Triton's kernels would not be safe: {error}"
    entry = _entry_of_another(folder) if folder.exists() else None
    return (
        entry
        and f"Triton's kernels would not be safe: {entry} belongs to another user (remove it)"
    )


def _entry_of_another(folder: Path) -> str | None:
    """Find what another user put into the folder while it was open; a group that shares it may."""
    status = folder.stat()
    if status.st_mode & stat.S_ISGID:
        return None
    owners = {0, os.geteuid(), status.st_uid}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_uid not in owners:
                return entry.path
    return None


def triton_fault() -> str | None:
    """Say why Triton's kernels cannot run, with a remedy; None if they can."""
    installed = triton_version()
    if installed is None:
        return "Triton is not installed (pip install triton)"
    if installed < OLDEST_TRITON:
        have = ".".join(map(str, installed))
        need = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {have} is too old (needs {need}; pip install -U triton)"
    return _cache_fault()
