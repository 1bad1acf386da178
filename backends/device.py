"""The device of a GEMM as plain data, so that support can be checked for absent hardware."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["cpu", "cuda", "hip"]

KNOWN: dict[str, tuple[Kind, str]] = {
    "cpu": ("cpu", "CPU"),
    "sm_90": ("cuda", "Hopper: H100, H200"),
    "sm_100": ("cuda", "Blackwell: B200, GB200"),
    "sm_103": ("cuda", "Blackwell Ultra: B300, GB300"),
    "sm_120": ("cuda", "Blackwell: RTX 50, RTX PRO 6000"),
    "gfx950": ("hip", "CDNA 4: MI350X, MI355X"),
}
"""Architectures known to the back ends: (kind, example products)."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's kind, architecture (``cpu``, ``sm_100``, ``gfx950``), name and number of processors."""

    kind: Kind
    arch: str
    name: str
    processors: int = 1


def device_of_arch(arch: str) -> Device:
    """Return a stand-in for absent hardware.

    Raises:
        ValueError: the architecture is unknown.
    """
    if arch not in KNOWN:
        raise ValueError(f"no architecture '{arch}' (expected {', '.join(KNOWN)})")
    kind, name = KNOWN[arch]
    return Device(kind=kind, arch=arch, name=name)


@lru_cache(maxsize=64)
def device_of(where: str) -> Device:
    """Describe a torch device (``cpu``, ``cuda``, ``cuda:1``).

    Raises:
        RuntimeError: the driver's own, if the device cannot be queried.
    """
    import torch

    if torch.device(where).type != "cuda":
        return Device(kind="cpu", arch="cpu", name="CPU")
    found = torch.cuda.get_device_properties(where)
    if torch.version.hip:
        arch = str(found.gcnArchName).split(":")[0]
        return Device(kind="hip", arch=arch, name=found.name, processors=found.multi_processor_count)
    arch = f"sm_{found.major}{found.minor}"
    return Device(kind="cuda", arch=arch, name=found.name, processors=found.multi_processor_count)


def default_device() -> str:
    """Return the default torch device of a run here: the first GPU, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
