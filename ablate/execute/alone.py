"""Whether a timing is valid for a device: native arithmetic on a whole device that nobody else uses.

How it fails: it raises nothing. A device whose load is unknown is not called idle.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.backends.device import Device

_IDLE_PERCENT = 10.0
"""Above this load a device counts as shared."""

_WINDOW_SEC = 1.0
"""A GPU's driver averages the load over at most this time."""


def other_work(device: str) -> str | None:
    """Describe other work on a torch device, None if the device is known to be idle.

    Call it while this process does not use the device.
    """
    import psutil
    import torch

    if torch.device(device).type != "cuda":
        load = psutil.cpu_percent(interval=0.5)
        return f"the processors are {load:.0f} % busy" if load > _IDLE_PERCENT else None
    time.sleep(_WINDOW_SEC)  # leave this process's own work out of the average
    try:
        load = torch.cuda.utilization(device)
    except Exception:  # the packages of NVML and AMD SMI may be missing, and raise their own errors
        return "whether others use the GPU is not known (nvidia-ml-py or amdsmi is missing)"
    return f"the GPU is {load} % busy" if load > _IDLE_PERCENT else None


def why_not_valid(mode: str, device: Device, *, threads: int, others: str | None) -> str | None:
    """Return why a timing is not valid for the device's own speed, None if it is valid.

    ``mode``: of the back ends, see ``ablate.backends.select.overall_mode``. ``threads``: computing threads of
    the processor. ``others``: the result of ``other_work``.
    """
    if mode != "native":
        return f"{mode} arithmetic"
    if " MIG " in f"{device.name} ":
        return "a part of a GPU (MIG)"
    cores = len(os.sched_getaffinity(0))
    if device.kind == "cpu" and threads > cores:
        return f"{threads} threads on {cores} CPU cores"
    return others
