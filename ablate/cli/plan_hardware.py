"""The part of ``ablate plan`` about named hardware: what a study needs there, modelled and labelled so."""

from __future__ import annotations

import operator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.cli.common import format_table, names_text
from ablate.modelled.hardware import PEAKS
from ablate.modelled.on_hardware import CPU, FITS_SHARE, on_hardware
from ablate.modelled.speed import HARDWARE
from ablate.plan.estimate import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.modelled.spread import Range
    from ablate.plan import Plan, PlannedArm

    Entry = dict[str, Any]

_ENDS = {"": "estimate", "_low": "low", "_high": "high"}
"""What is added to a key for each end of a 95 % range."""


def chosen_hardware(plan: Plan, names: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...]:
    """Return the hardware to show: what is named or priced, else a usual set for studies that take GPUs."""
    for name in names:
        if name not in PEAKS:
            raise UserError(f"--hardware: no hardware '{name}' (expected {', '.join(PEAKS)})")
    usual = HARDWARE if any(arm.resources.gpus for arm in plan.arms) else ()
    return tuple(dict.fromkeys([*(names or usual), *prices]))


def hardware_content(
    plan: Plan, hardware: Sequence[str], prices: Mapping[str, float]
) -> tuple[list[dict[str, Entry | None]], dict[str, Entry]]:
    """Return for each arm, and for the whole study, what it takes on the CPU or on each hardware."""
    shared = shared_tokens(plan)
    runs = [
        len(arm.runs) - sum(shared.get(run.id, 0) for run in arm.runs) / arm.batches.tokens
        for arm in plan.arms
    ]
    arms = [{name: _entry(arm, name, prices.get(name)) for name in hardware or (CPU,)} for arm in plan.arms]
    return arms, {name: _study([arm[name] for arm in arms], runs) for name in hardware}


def _entry(arm: PlannedArm, name: str, price: float | None) -> Entry | None:
    """Return what a run of an arm takes; None where its model or trainer is the user's own."""
    found = on_hardware(arm.config, arm.resources, name)
    if found is None:
        return None
    memory = found.memory
    usd = None if found.gpu_hours is None or price is None else found.gpu_hours.times(price)
    return {
        "memory_bytes": asdict(memory.peak) | {"total": memory.peak.total},
        "peak_at": memory.at,
        "largest_quantised_bytes": memory.largest_copies,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        **_ends("gpu_hours_per_run", found.gpu_hours),
        **_ends("usd_per_run", usd),
        "figures_are": "modelled",
    }


def _ends(key: str, found: Range | None) -> Entry:
    return {key + end: None if found is None else getattr(found, of) for end, of in _ENDS.items()}


def _study(arms: Sequence[Entry | None], runs: Sequence[float]) -> Entry:
    """Return the sums over all runs, whose errors go together as on one kind of device; or None."""
    known = [one for one in arms if one is not None]
    sums: Entry = {"fits": all(one["fits"] for one in known) if len(known) == len(arms) else None}
    for key in ("gpu_hours", "usd"):
        for end in _ENDS:
            each = [None if one is None else one[f"{key}_per_run{end}"] for one in arms]
            sums[key + end] = None if None in each else sum(map(operator.mul, runs, each))
    return sums


def hardware_lines(
    names: Sequence[str], arms: Sequence[Mapping[str, Entry | None]], study: Mapping[str, Entry]
) -> Iterator[str]:
    """Yield the lines for people: memory by part, what fits, GPU-hours of arms and of the study."""
    others = [name for name, own in zip(names, arms, strict=True) if None in own.values()]
    if others:
        yield (
            "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for "
            f"{names_text(others)}"
        )
    rows = []
    for name in study:
        known = [entry for own in arms if (entry := own[name]) is not None]
        if not known:
            return
        most = max(known, key=lambda entry: entry["memory_bytes"]["total"])
        parts = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in most["memory_bytes"].items() if size)
        fits = f"{sum(bool(entry['fits']) for entry in known)} of {len(known)} arms"
        rows.append((name, f"{most['capacity_bytes'] / 1e9:.3g}", parts, fits))
    yield "\nGB of a device, modelled at the peak of the arm that needs most:"
    yield format_table(("hardware", "has", "needs", f"fit into {FITS_SHARE:.0%}"), rows)
    yield "\nGPU-hours a run, modelled, with 95 % ranges (–: no unit for a format, or not modelled):"
    table = [
        [name, *(_range_text(entry, "gpu_hours_per_run", ",.1f") for entry in own.values())]
        for name, own in zip(names, arms, strict=True)
    ]
    table.append(["all runs", *(_range_text(one, "gpu_hours", ",.0f") for one in study.values())])
    if any(one["usd"] is not None for one in study.values()):
        table.append(["USD", *(_range_text(one, "usd", ",.0f") for one in study.values())])
    yield format_table(["arm", *study], table)


def _range_text(entry: Entry | None, key: str, form: str) -> str:
    if entry is None or entry[key] is None:
        return "–"
    return f"{entry[key]:{form}} [{entry[f'{key}_low']:{form}}, {entry[f'{key}_high']:{form}}]"
