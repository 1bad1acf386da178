"""The part of ``ablate plan`` about named hardware: what a study needs there, modelled and labelled so."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.cli.output import format_table, names_text
from ablate.modelled.hardware import PEAKS
from ablate.modelled.on_hardware import CPU, FITS_SHARE, on_hardware
from ablate.modelled.speed import HARDWARE
from ablate.modelled.spread import Range
from ablate.plan.estimate import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.modelled.on_hardware import OnHardware
    from ablate.plan import Plan, PlannedArm

_NOT_MODELLED = (
    "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for"
)


def chosen_hardware(plan: Plan, names: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...]:
    """Return the hardware to show: what is named or priced, else a usual set for studies that take GPUs."""
    for name in names:
        if name not in PEAKS:
            raise UserError(f"--hardware: no hardware '{name}' (expected {', '.join(PEAKS)})")
    usual = HARDWARE if any(arm.resources.gpus for arm in plan.arms) else ()
    return tuple(dict.fromkeys([*(names or usual), *prices]))


def hardware_json(
    plan: Plan, hardware: Sequence[str], prices: Mapping[str, float]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return for each arm, and for the whole study, what it takes on the CPU or on each hardware."""
    where = hardware or (CPU,)
    arms = [
        {name: _entry(on_hardware(arm.config, arm.resources, name), prices.get(name)) for name in where}
        for arm in plan.arms
    ]
    return arms, {name: _study(plan, name, prices.get(name)) for name in hardware}


def _entry(found: OnHardware | None, price: float | None) -> dict[str, Any] | None:
    if found is None:
        return None
    memory, hours = found.memory, found.gpu_hours
    return {
        "memory_bytes": asdict(memory.peak) | {"total": memory.peak.total},
        "peak_at": memory.at,
        "largest_quantised_bytes": memory.largest_copies,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        **_range_json("gpu_hours_per_run", hours),
        **_range_json("usd_per_run", _cost(hours, price)),
        "figures_are": "modelled",
    }


def _study(plan: Plan, name: str, price: float | None) -> dict[str, Any]:
    """Return the sums over all runs; None where an arm has no figure."""
    found = [one for arm in plan.arms if (one := on_hardware(arm.config, arm.resources, name)) is not None]
    hours = _hours_of_all(plan, name)
    return {
        "fits": all(one.fits for one in found) if len(found) == len(plan.arms) else None,
        **_range_json("gpu_hours", hours),
        **_range_json("usd", _cost(hours, price)),
    }


def _hours_of_all(plan: Plan, name: str) -> Range | None:
    """Return the hours of all runs; their errors are taken to go together, as on one kind of device."""
    shared = shared_tokens(plan)
    hours = []
    for arm in plan.arms:
        found = on_hardware(arm.config, arm.resources, name)
        if found is None or found.gpu_hours is None:
            return None
        runs = len(arm.runs) - sum(shared.get(run.id, 0) for run in arm.runs) / arm.batches.tokens
        hours.append(found.gpu_hours.times(runs))
    ends = ("estimate", "low", "high")
    return Range(**{end: sum(getattr(one, end) for one in hours) for end in ends})


def _cost(hours: Range | None, price: float | None) -> Range | None:
    return None if hours is None or price is None else hours.times(price)


def _range_json(key: str, found: Range | None) -> dict[str, float | None]:
    ends = {"": "estimate", "_low": "low", "_high": "high"}
    return {key + end: None if found is None else getattr(found, of) for end, of in ends.items()}


def hardware_text(plan: Plan, hardware: Sequence[str], prices: Mapping[str, float], width: int) -> list[str]:
    """Return the lines for people: work, memory by part, what fits, GPU-hours of arms and of the study."""
    arms = [arm for arm in plan.arms if on_hardware(arm.config, arm.resources, hardware[0]) is not None]
    others = [arm.name for arm in plan.arms if arm not in arms]
    lines = [f"{_NOT_MODELLED} {names_text(others)}"] if others else []
    if not arms:
        return lines
    flops = [arm.size.flops_per_token * arm.batches.tokens for arm in arms if arm.size is not None]
    ends = " to ".join(f"{one:.3g}" for one in dict.fromkeys((min(flops), max(flops))))
    lines += [f"{'work':<9} {ends} FLOPs a run", *_memory_lines(arms, hardware)]
    rows = [
        [arm.name, *(_hours(on_hardware(arm.config, arm.resources, name)) for name in hardware)]
        for arm in arms
    ]
    sums = {name: _hours_of_all(plan, name) for name in hardware}
    rows.append(["all runs", *(_range_text(hours, ",.0f") for hours in sums.values())])
    if prices:
        usd = (_cost(hours, prices.get(name)) for name, hours in sums.items())
        rows.append(["USD", *(_range_text(one, ",.0f") for one in usd)])
    lines += [
        "",
        "GPU-hours a run, modelled, with 95 % ranges (–: no unit for a format, where it would be emulated):",
    ]
    return [*lines, format_table(["arm", *hardware], rows, width=width)]


def _memory_lines(arms: Sequence[PlannedArm], hardware: Sequence[str]) -> list[str]:
    """Return the memory of the arm that needs most on each hardware; one line where it is the same."""
    groups: dict[str, list[str]] = {}
    for name in hardware:
        found = [one for arm in arms if (one := on_hardware(arm.config, arm.resources, name)) is not None]
        most = max(found, key=lambda one: one.memory.peak.total)
        peak = most.memory.peak
        parts = ", ".join(f"{part} {_gigabytes(size)}" for part, size in asdict(peak).items() if size)
        need = f"{_gigabytes(peak.total)} GB a device ({parts})"
        assert most.capacity_bytes is not None
        fits = sum(bool(one.fits) for one in found)
        word = {len(found): "fits", 0: "does not fit"}.get(fits, f"{fits} of {len(found)} arms fit")
        groups.setdefault(need, []).append(f"{name} has {_gigabytes(most.capacity_bytes)}: {word}")
    lines = [line for need, verdicts in groups.items() for line in (need, "; ".join(verdicts))]
    lines.append(f"modelled, at the peak of the arm that needs most; up to {FITS_SHARE:.0%} of a device fits")
    return [f"{'' if place else 'memory':<9} {line}" for place, line in enumerate(lines)]


def _hours(found: OnHardware | None) -> str:
    hours = None if found is None else found.gpu_hours
    return "< 0.1" if hours and hours.estimate < 0.1 else _range_text(hours, ",.1f")


def _range_text(found: Range | None, form: str) -> str:
    return "–" if found is None else f"{found.estimate:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
