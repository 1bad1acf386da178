"""What the arms of a plan need on named hardware, modelled: memory and GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, Any

from ablate.cli.common import format_table, names_text
from ablate.modelled.on_hardware import CPU, FITS_SHARE, PURPOSES, on_hardware
from ablate.plan.estimate import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ablate.modelled.on_hardware import OnHardware
    from ablate.plan import Plan

    Entry = dict[str, Any]

_RANGE_ENDS = {"": "estimate", "_low": "low", "_high": "high"}
"""Suffixes of a key, for the estimate and for the ends of its 95 % range."""
_EMULATED = "modelled from an H200's measured factors"


@dataclass(frozen=True, kw_only=True)
class HardwareNeeds:
    """What each arm and the whole study need, by hardware; None: the user's own model or trainer."""

    arms: dict[str, dict[str, Any]]
    study: dict[str, Entry]


def hardware_needs(plan: Plan, hardware: Collection[str]) -> HardwareNeeds:
    """Model what a plan needs on each hardware; without any, each arm on the CPU.

    Errors of all runs are taken to be alike, as on one kind of device.
    """
    shared = shared_tokens(plan)
    whole_runs = []
    for arm in plan.arms:
        tokens_of_others = sum(shared.get(run.id, 0) for run in arm.runs)
        whole_runs.append(len(arm.runs) - tokens_of_others / arm.batches.tokens)
    needs = HardwareNeeds(arms={arm.name: {} for arm in plan.arms}, study={})
    for name in hardware or (CPU,):
        entries = []
        for arm in plan.arms:
            need = on_hardware(arm.config, arm.resources, name)
            entry = None if need is None else _arm_entry(need)
            needs.arms[arm.name][name] = entry
            entries.append(entry)
        if name != CPU:
            needs.study[name] = _study_entry(entries, whole_runs)
    return needs


def _arm_entry(need: OnHardware) -> Entry:
    memory: Entry = {purpose: need.memory[purpose] for purpose in PURPOSES}
    entry: Entry = {
        "memory_bytes": memory | {"total": need.memory.total()},
        "capacity_bytes": need.capacity_bytes,
        "fits": need.fits,
        "figures_are": _EMULATED if need.is_emulated else "modelled",
    }
    for suffix, end in _RANGE_ENDS.items():
        hours = need.gpu_hours
        entry[f"gpu_hours_per_run{suffix}"] = hours and getattr(hours, end)
    return entry


def _study_entry(entries: list[Entry | None], whole_runs: list[float]) -> Entry:
    """Add up what the arms need; None where that of an arm is not modelled."""
    known = [entry for entry in entries if entry is not None]
    is_whole = len(known) == len(entries)
    is_emulated = any(entry["figures_are"] == _EMULATED for entry in known)
    study: Entry = {
        "fits": all(entry["fits"] for entry in known) if is_whole else None,
        "figures_are": _EMULATED if is_emulated else "modelled",
    }
    for suffix in _RANGE_ENDS:
        hours = [entry[f"gpu_hours_per_run{suffix}"] for entry in known]
        is_modelled = is_whole and None not in hours
        total = sum(map(mul, whole_runs, hours)) if is_modelled else None
        study[f"gpu_hours{suffix}"] = total
    return study


def hardware_lines(needs: HardwareNeeds) -> Iterator[str]:
    """Yield the lines for people: memory by part, what fits, GPU-hours of arms and of the study."""
    modelled = []
    not_modelled = []
    for arm_name, by_hardware in needs.arms.items():
        if None in by_hardware.values():
            not_modelled.append(arm_name)
        else:
            modelled.append(by_hardware)
    if not_modelled:
        yield (
            "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for "
            f"{names_text(not_modelled)}"
        )
    if not modelled:
        return
    yield "\nmodelled, with 95 % ranges (–: no unit for a format, or not modelled)"
    for name, study in needs.study.items():
        yield from _lines_of(name, study, [entries[name] for entries in modelled])
    yield "\nGPU-hours a run, modelled:"
    rows = []
    for arm_name, by_hardware in needs.arms.items():
        entries = by_hardware.values()
        hours = [_range_text(entry, "gpu_hours_per_run") for entry in entries]
        rows.append((arm_name, *hours))
    yield format_table(("arm", *needs.study), rows)
    if any(study["figures_are"] == _EMULATED for study in needs.study.values()):
        yield f"\n~ emulated: {_EMULATED}, which the ranges leave out"


def _lines_of(name: str, study_entry: Entry, entries: list[Entry]) -> Iterator[str]:
    largest = max(entries, key=lambda entry: entry["memory_bytes"]["total"])
    memory = ", ".join(
        f"{part} {size / 1e9:.3g}"
        for part, size in largest["memory_bytes"].items()
        if size
    )
    num_fitting = sum(bool(entry["fits"]) for entry in entries)
    yield f"{name:<9} {largest['capacity_bytes'] / 1e9:.3g} GB; at its peak the largest arm takes {memory}"
    yield f"          arms that fit into {FITS_SHARE:.0%} of it: {num_fitting} of {len(entries)}"
    yield f"          all runs: {_range_text(study_entry, 'gpu_hours')} GPU-hours"
    num_without_unit = sum(
        entry["figures_are"] == _EMULATED or entry["gpu_hours_per_run"] is None
        for entry in entries
    )
    if num_without_unit:
        yield (
            f"          no unit for a format of {num_without_unit} of {len(entries)} arms: emulated with "
            "exact values; their time there is no measure of the format's speed"
        )


def _range_text(entry: Entry | None, key: str) -> str:
    """Write an estimate with its range, two significant digits of each: 1.7 [1.1, 1,300]."""
    if entry is None or entry[key] is None:
        return "–"
    rounded = [float(f"{entry[key + suffix]:.2g}") for suffix in _RANGE_ENDS]
    about = "~" if entry["figures_are"] == _EMULATED else ""
    return about + "{:,.12g} [{:,.12g}, {:,.12g}]".format(*rounded)
