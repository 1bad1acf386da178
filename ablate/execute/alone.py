"""Whether a timing says something of a device: native arithmetic, on the whole of it, nobody else at work.

How it fails: it does not. A device that does not tell is not called idle.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.backends.device import Device

_IDLE_PERCENT = 10.0
"""A device with more load than this is not ours alone."""

_WINDOW_SEC = 1.0
"""A GPU's driver tells the load of so long a past, at most; what came before it is not in it."""


def other_work(device: str) -> str | None:
    """Say what else may be at work on a torch device, None where it is known to be idle.

    To be called while this process leaves the device alone.
    """
    import psutil
    import torch

    if torch.device(device).type != "cuda":
        load = psutil.cpu_percent(interval=0.5)
        return f"the processors are {load:.0f} % busy" if load > _IDLE_PERCENT else None
    time.sleep(_WINDOW_SEC)  # our own work of a moment ago is nobody else's
    try:
        load = torch.cuda.utilization(device)
    except Exception:  # NVML's and AMD SMI's packages may be missing, and raise their own
        return "whether others use the GPU is not known (nvidia-ml-py or amdsmi is missing)"
    return f"the GPU is {load} % busy" if load > _IDLE_PERCENT else None


def why_not_valid(mode: str, device: Device, *, threads: int, others: str | None) -> str | None:
    """Say why a timing says nothing of the device's own speed, None where it does.

    ``mode``: of the back ends, see ``ablate.backends.select.overall_mode``. ``threads``: that compute, of the
    processor. ``others``: what ``other_work`` said.
    """
    if mode != "native":
        return f"{mode} arithmetic"
    if " MIG " in f"{device.name} ":
        return "a part of a GPU (MIG)"
    cores = len(os.sched_getaffinity(0))
    if device.kind == "cpu" and threads > cores:
        return f"{threads} threads on {cores} CPU cores"
    return others
