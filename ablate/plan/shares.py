"""Runs that share a GPU: how many at a time, and how much of its memory each may take.

``resources.gpus: auto`` becomes a share of a GPU, a whole one, or 0. A run's memory is *modelled*. Runs of
the user's own models, trainers and commands take whole GPUs, because nothing is modelled for them; so do runs
on several devices, and all runs where a GPU's memory is unknown.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.modelled.hardware import PEAKS, peaks_of
from ablate.modelled.on_hardware import FITS_SHARE, step_memory
from ablate.run.config import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ablate.plan.plan import PlannedArm
    from ablate.run.config import ArmConfig, ResourcesConfig
    from ablate.study import Study

    Machines = Callable[[], Sequence["Machine"]]
    """Looks up the machines that runs go to."""

MOST_RUNS = 8
"""More processes on a GPU have not been measured. Eight kept an H200 busy for 98 to 100 % of the time."""
CONTEXT_BYTES = 10**9
"""Assumed size of a process on a GPU beside torch's tensors: CUDA's context, kernels, libraries."""

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_RAYS_DIGITS = 10**4
"""Ray counts shares of a GPU in ten-thousandths."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that runs go to. ``gpu_bytes``: memory of its smallest GPU, 0 if unknown."""

    cores: int
    gpus: int = 0
    gpu_name: str = ""
    gpu_bytes: int = 0


@lru_cache(maxsize=1)
def this_machine() -> tuple[Machine, ...]:
    """Describe this machine; torch is loaded only where a GPU's driver is."""
    cores = os.cpu_count() or 1
    if not any(Path(path).exists() for path in _DRIVERS):
        return (Machine(cores=cores),)
    import torch

    if not torch.cuda.is_available():
        return (Machine(cores=cores),)
    devices = [
        torch.cuda.get_device_properties(index)
        for index in range(torch.cuda.device_count())
    ]
    smallest = min(devices, key=lambda device: device.total_memory)
    machine = Machine(
        cores=cores,
        gpus=len(devices),
        gpu_name=smallest.name,
        gpu_bytes=smallest.total_memory,
    )
    return (machine,)


def decided(
    config: ArmConfig, resources: ResourcesConfig, machines: Machines
) -> ResourcesConfig:
    """Return the resources with a number in place of ``auto``; it suits each machine that has a GPU."""
    if resources.gpus != AUTO:
        return resources
    at_once = [
        _runs_at_once(config, resources, machine)
        for machine in machines()
        if machine.gpus
    ]
    share: float = 0
    if at_once:
        share = math.floor(_RAYS_DIGITS / min(at_once)) / _RAYS_DIGITS
    return replace(resources, gpus=share)


def _runs_at_once(
    config: ArmConfig, resources: ResourcesConfig, machine: Machine
) -> int:
    size = run_bytes(config, resources, machine.gpu_name)
    if size is None or resources.devices_per_run > 1:
        return 1
    by_memory = machine.gpu_bytes // size
    by_cores = machine.cores // (machine.gpus * resources.cpus)
    return max(1, min(by_memory, by_cores, MOST_RUNS))


def run_bytes(
    config: ArmConfig, resources: ResourcesConfig, gpu_name: str
) -> int | None:
    """Model the memory that a run takes of a GPU, with a margin; None for the user's own code."""
    if config.trainer is not None or not config.model.is_built_in:
        return None
    # An unknown GPU counts as one without units for low precision: copies of operands are largest there.
    peaks = peaks_of(gpu_name) or PEAKS["A100"]
    tensors = step_memory(config, resources, peaks).total()
    return round(tensors / FITS_SHARE) + CONTEXT_BYTES


def sharing_text(
    study: Study, arms: Iterable[PlannedArm], machines: Machines
) -> str | None:
    """Say how many runs a GPU has at a time, and what each takes of it.

    None where no run has a GPU, and where the study asks for whole ones.
    """
    on_gpu = [
        arm
        for arm in arms
        if arm.resources.num_gpus and arm.resources.devices_per_run == 1
    ]
    shares = {arm.resources.num_gpus for arm in on_gpu}
    if not shares or (min(shares) >= 1 and not is_auto(study)):
        return None
    most = math.floor(1 / min(1, *shares))
    runs = "1 run" if most == 1 else f"{most} runs"
    text = f"{runs} at a time on each GPU"
    if len(shares) > 1:
        text = f"up to {text}"
    known = [machine for machine in machines() if machine.gpu_bytes]
    if not known:
        return text
    machine = min(known, key=lambda machine: machine.gpu_bytes)
    sizes = [
        run_bytes(arm.config, arm.resources, machine.gpu_name) or 0 for arm in on_gpu
    ]
    if any(sizes):
        text += f", {max(sizes) / 1e9:.1f} of {machine.gpu_bytes / 1e9:.0f} GB each"
    return f"{text} ({machine.gpu_name})"


def is_auto(study: Study) -> bool:
    """Whether an arm of the study leaves the number of GPUs open."""
    return any(arm.resources.gpus == AUTO for arm in study.arms)
