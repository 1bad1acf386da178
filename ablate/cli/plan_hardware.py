"""The part of ``ablate plan`` about named hardware: what a study needs there, modelled and labelled so."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.cli.table import format_table
from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import HARDWARE
from ablate.plan.on_hardware import CPU, FITS_SHARE, HardwareModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.plan import Plan, PlannedArm
    from ablate.plan.on_hardware import OnHardware

_NOT_MODELLED = (
    "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for"
)


def chosen_hardware(plan: Plan, names: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...]:
    """Return the hardware to show: what is named or priced, else a usual set for studies that take GPUs.

    Raises:
        UserError: hardware that is not known.
    """
    for name in names:
        if name not in PEAKS:
            raise UserError(f"--hardware: no hardware '{name}' (expected {', '.join(PEAKS)})")
    usual = HARDWARE if any(arm.resources.gpus for arm in plan.arms) else ()
    return tuple(dict.fromkeys([*(names or usual), *prices]))


def hardware_json(
    plan: Plan, hardware: Sequence[str], prices: Mapping[str, float]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return for each arm, and for the whole study, what it takes on the CPU or on each hardware."""
    model = HardwareModel()
    where = hardware or (CPU,)
    arms = []
    for arm in plan.arms:
        found = {name: model.of(arm, name) for name in where}
        arms.append(
            {name: None if one is None else _entry(one, prices.get(name)) for name, one in found.items()}
        )
    study = {name: _study(plan, model, name, prices.get(name)) for name in hardware}
    return arms, study


def _entry(found: OnHardware, price: float | None) -> dict[str, Any]:
    memory = found.memory
    hours = found.gpu_hours
    return {
        "memory_bytes": asdict(memory.peak) | {"total": memory.peak.total},
        "peak_at": memory.at,
        "largest_quantised_bytes": memory.largest_copies,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        "gpu_hours_per_run": hours,
        "usd_per_run": None if hours is None or price is None else hours * price,
        "figures_are": "modelled",
    }


def _study(plan: Plan, model: HardwareModel, name: str, price: float | None) -> dict[str, Any]:
    """Return the sums over all runs; None where an arm has no figure."""
    found = [(arm, model.of(arm, name)) for arm in plan.arms]
    hours = [
        None if one is None or one.gpu_hours is None else one.gpu_hours * len(arm.runs) for arm, one in found
    ]
    known = [one for one in hours if one is not None]
    total = sum(known) if len(known) == len(hours) else None
    return {
        "fits": None if any(one is None for _, one in found) else all(one.fits for _, one in found if one),
        "gpu_hours": total,
        "usd": None if total is None or price is None else total * price,
    }


def hardware_text(plan: Plan, hardware: Sequence[str], prices: Mapping[str, float], width: int) -> list[str]:
    """Return the lines for people: work, memory by part, what fits, GPU-hours of arms and of the study."""
    model = HardwareModel()
    arms = [arm for arm in plan.arms if model.of(arm, hardware[0]) is not None]
    others = [arm.name for arm in plan.arms if arm not in arms]
    lines = []
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        lines.append(f"{_NOT_MODELLED} {shown}")
    if not arms:
        return lines
    flops = sorted({arm.size.flops_per_token * arm.batches.tokens for arm in arms})
    lines.append(
        "work      "
        + " to ".join(f"{one:.3g}" for one in dict.fromkeys((flops[0], flops[-1])))
        + " FLOPs a run"
    )
    lines += _memory_lines(arms, model, hardware)
    header = ["modelled", *hardware]
    rows = [[arm.name, *(_hours(model.of(arm, name)) for name in hardware)] for arm in arms]
    sums = [_study(plan, model, name, prices.get(name)) for name in hardware]
    rows.append(
        ["all runs", *("–" if one["gpu_hours"] is None else f"{one['gpu_hours']:,.0f}" for one in sums)]
    )
    if prices:
        rows.append(["USD", *("–" if one["usd"] is None else f"{one['usd']:,.0f}" for one in sums)])
    lines += ["", "GPU-hours a run, modelled (–: no unit for a format, where it would be emulated):"]
    header[0] = "arm"
    lines.append(format_table(header, rows, width=width))
    return lines


def _memory_lines(arms: Sequence[PlannedArm], model: HardwareModel, hardware: Sequence[str]) -> list[str]:
    """Return the memory of the arm that needs most on each hardware; one line where it is the same."""
    groups: dict[str, list[str]] = {}
    for name in hardware:
        found = [one for arm in arms if (one := model.of(arm, name)) is not None]
        most = max(found, key=lambda one: one.memory.peak.total)
        peak = most.memory.peak
        parts = ", ".join(f"{part} {_gigabytes(size)}" for part, size in asdict(peak).items() if size)
        need = f"{_gigabytes(peak.total)} GB a device ({parts})"
        assert most.capacity_bytes is not None
        fits = sum(bool(one.fits) for one in found)
        word = (
            "fits"
            if fits == len(found)
            else "does not fit"
            if not fits
            else f"{fits} of {len(found)} arms fit"
        )
        groups.setdefault(need, []).append(f"{name} has {_gigabytes(most.capacity_bytes)}: {word}")
    lines: list[str] = []
    for need, verdicts in groups.items():
        lines.append(f"{'memory' if not lines else '':<9} {need}")
        lines.append(f"{'':<9} {'; '.join(verdicts)}")
    return [
        *lines,
        f"{'':<9} modelled, at the peak of the arm that needs most; up to {FITS_SHARE:.0%} of a device fits",
    ]


def _hours(found: OnHardware | None) -> str:
    if found is None or found.gpu_hours is None:
        return "–"
    return f"{found.gpu_hours:,.1f}" if found.gpu_hours >= 0.1 else "< 0.1"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
