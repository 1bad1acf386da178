"""What an arm needs on named hardware, *modelled*: memory of a device, whether it fits, and GPU-hours.

GPU-hours are ``speed.token_time`` times the run's tokens. Evaluation counts as forward passes, and recomputed
activations as one more forward pass. GPU-hours sum over all devices of a run. They leave out communication,
launches, data and checkpoints. Emulated formats have no GPU-hours.

How it fails: unknown hardware is a ``KeyError``; an arm with its own model or trainer gives None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.modelled.hardware import PEAKS
from ablate.modelled.memory import StepMemory, step_memory
from ablate.modelled.speed import token_time, workload_of

if TYPE_CHECKING:
    from ablate.plan.plan import PlannedArm

FITS_SHARE = 0.9
"""Usable share of a device's memory: the rest is for uncounted parts and the allocator's losses."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHardware:
    """One arm on one kind of hardware.

    ``capacity_bytes`` and ``fits`` are None for a CPU. ``gpu_hours`` (of one run) is None where the hardware
    has no unit for one of the arm's formats.
    """

    memory: StepMemory
    capacity_bytes: int | None
    fits: bool | None
    gpu_hours: float | None


class HardwareModel:
    """Models arms on hardware; shared parts are computed once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], OnHardware] = {}

    def of(self, arm: PlannedArm, hardware: str) -> OnHardware | None:
        """Return an arm's needs on ``hardware``, of ``PEAKS`` or ``CPU``; None for the user's own code."""
        config = arm.config
        if not config.model.is_built_in or config.trainer is not None:
            return None
        parts = (config.model, config.training, config.recipe, arm.resources)
        key = (*parts, config.vocab_size, hardware)
        if key not in self._found:
            self._found[key] = _on_hardware(arm, hardware)
        return self._found[key]


def _on_hardware(arm: PlannedArm, hardware: str) -> OnHardware:
    memory = step_memory(arm.config, arm.resources, hardware=None if hardware == CPU else hardware)
    if hardware == CPU:
        return OnHardware(memory=memory, capacity_bytes=None, fits=None, gpu_hours=None)
    capacity = round(PEAKS[hardware].capacity * 1e9)
    return OnHardware(
        memory=memory,
        capacity_bytes=capacity,
        fits=memory.peak.total <= FITS_SHARE * capacity,
        gpu_hours=_gpu_hours(arm, hardware),
    )


def _gpu_hours(arm: PlannedArm, hardware: str) -> float | None:
    work = replace(workload_of(arm.config), devices=arm.resources.devices_per_run)
    time = token_time(work, arm.config.recipe, hardware)
    if time is None:
        return None
    forward = time.fprop + time.quantise_forward + time.rest_forward
    twice = forward if arm.resources.activation_checkpointing else 0.0
    evaluation = arm.batches.evals * arm.config.training.eval_tokens
    return (arm.batches.tokens * (time.total + twice) + evaluation * forward) / 3600
