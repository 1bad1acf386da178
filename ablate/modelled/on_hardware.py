"""What an arm needs on named hardware, *modelled*: memory of a device, whether it fits, and GPU-hours.

GPU-hours are ``speed.token_time`` times the run's tokens, with the range of a step's time. Evaluation counts
as forward passes, and recomputed activations as one more forward pass. GPU-hours sum over all devices of a
run. They leave out communication, launches, data and checkpoints. Emulated formats have no GPU-hours.

How it fails: unknown hardware is a ``KeyError``; an arm with its own model or trainer gives None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ablate.modelled.hardware import PEAKS
from ablate.modelled.memory import StepMemory, step_memory
from ablate.modelled.speed import FORWARD, token_time, workload_of
from ablate.modelled.spread import Range, seconds_range
from ablate.recipes import Recipe
from ablate.run.schedule import evaluated_in, plan_steps

if TYPE_CHECKING:
    from ablate.run.config import ArmConfig, ResourcesConfig

FITS_SHARE = 0.9
"""Usable share of a device's memory: the rest is for uncounted parts and the allocator's losses."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHardware:
    """One arm on one kind of hardware.

    ``capacity_bytes`` and ``fits`` are None for a CPU. ``gpu_hours`` (of one run), with their 95 % range, are
    None where the hardware has no unit for one of the arm's formats.
    """

    memory: StepMemory
    capacity_bytes: int | None
    fits: bool | None
    gpu_hours: Range | None


@cache  # one `ablate plan` asks several times, of thousands of arms
def on_hardware(config: ArmConfig, resources: ResourcesConfig, hardware: str) -> OnHardware | None:
    """Return an arm's needs on ``hardware``, of ``PEAKS`` or ``CPU``; None for the user's own code."""
    if not config.model.is_built_in or config.trainer is not None:
        return None
    where = None if hardware == CPU else hardware
    memory = step_memory(config, resources, hardware=where)
    if where is None:
        return OnHardware(memory=memory, capacity_bytes=None, fits=None, gpu_hours=None)
    training = config.training
    counts = plan_steps(training, resources.devices_per_run)
    work = replace(workload_of(config), devices=resources.devices_per_run)
    gpu_hours = None
    if (time := token_time(work, config.recipe, hardware)) is not None:
        forward = time.of(*FORWARD)
        twice = forward if resources.activation_checkpointing else 0.0
        in_bf16 = token_time(work, Recipe(), hardware)
        assert in_bf16 is not None  # every hardware multiplies in bf16
        passes = {"recipe": forward, "bf16": in_bf16.of(*FORWARD)}
        evaluation = counts.evals * training.eval_tokens * sum(passes[one] for one in evaluated_in(config))
        seconds = counts.tokens * (time.total + twice) + evaluation
        gpu_hours = seconds_range(time).times(seconds / time.total / 3600)
    capacity = round(PEAKS[hardware].capacity * 1e9)
    fits = memory.peak.total <= FITS_SHARE * capacity
    return OnHardware(memory=memory, capacity_bytes=capacity, fits=fits, gpu_hours=gpu_hours)
