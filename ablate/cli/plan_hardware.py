"""The part of ``ablate plan`` about named hardware: what a study needs there, modelled and labelled so."""

from __future__ import annotations

import operator
from itertools import product
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.cli.common import format_table, names_text
from ablate.modelled.hardware import PEAKS
from ablate.modelled.on_hardware import CPU, FITS_SHARE, PURPOSES, on_hardware
from ablate.modelled.speed import HARDWARE
from ablate.plan.estimate import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.plan import Plan, PlannedArm

    Entry = dict[str, Any]

_ENDS = {"": "estimate", "_low": "low", "_high": "high"}
"""Suffixes of a key, for the estimate and for the ends of its 95 % range."""


def chosen_hardware(plan: Plan, names: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...]:
    """Choose the hardware to show: what is named (else a usual set for GPU studies), and what is priced.

    Raises:
        UserError: a name that is not known.
    """
    for name in names:
        if name not in PEAKS:
            raise UserError(f"--hardware: no hardware '{name}' (expected {', '.join(PEAKS)})")
    usual = HARDWARE if any(arm.resources.gpus for arm in plan.arms) else ()
    return tuple(dict.fromkeys([*(names or usual), *prices]))


def hardware_content(
    plan: Plan, hardware: Sequence[str], prices: Mapping[str, float]
) -> tuple[list[dict[str, Entry | None]], dict[str, Entry]]:
    """Return what each arm, and the whole study, needs on each hardware; without any, each arm on the CPU.

    Errors of all runs are taken to be alike, as on one kind of device. None: the user's own model or trainer.
    """
    shared = shared_tokens(plan)
    runs = [
        len(arm.runs) - sum(shared.get(run.id, 0) for run in arm.runs) / arm.batches.tokens
        for arm in plan.arms
    ]
    arms = [{name: _entry(arm, name, prices.get(name)) for name in hardware or (CPU,)} for arm in plan.arms]
    study: dict[str, Entry] = {}
    for name in hardware:
        entries = [arm[name] for arm in arms]
        whole: Entry = {"fits": None if None in entries else all(entry["fits"] for entry in entries if entry)}
        for key, end in product(("gpu_hours", "usd"), _ENDS):
            each = [entry and entry[f"{key}_per_run{end}"] for entry in entries]
            whole[key + end] = None if None in each else sum(map(operator.mul, runs, each))
        study[name] = whole
    return arms, study


def _entry(arm: PlannedArm, name: str, price: float | None) -> Entry | None:
    found = on_hardware(arm.config, arm.resources, name)
    if found is None:
        return None
    memory, hours = found.memory, found.gpu_hours
    entry = {
        "memory_bytes": {name: memory.peak[name] for name in PURPOSES} | {"total": memory.peak.total()},
        "peak_at": memory.at,
        "largest_quantised_bytes": memory.largest_copies,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        "figures_are": "modelled",
    }
    for (key, factor), (end, of) in product((("gpu_hours", 1.0), ("usd", price)), _ENDS.items()):
        entry[f"{key}_per_run{end}"] = (
            None if hours is None or factor is None else getattr(hours, of) * factor
        )
    return entry


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
    if len(others) == len(names):
        return
    rows = []
    for name in study:
        known = [entry for own in arms if (entry := own[name]) is not None]
        most = max(known, key=lambda entry: entry["memory_bytes"]["total"])
        parts = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in most["memory_bytes"].items() if size)
        fits = f"{sum(bool(entry['fits']) for entry in known)} of {len(known)} arms"
        rows.append((name, f"{most['capacity_bytes'] / 1e9:.3g}", parts, fits))
    yield "\nGB of a device, modelled at the peak of the arm that needs most:"
    yield format_table(("hardware", "has", "needs", f"fit into {FITS_SHARE:.0%}"), rows)
    yield "\nGPU-hours a run, modelled, with 95 % ranges (–: no unit for a format, or not modelled):"
    table = [
        (name, *_ranges(own, "gpu_hours_per_run", ",.1f")) for name, own in zip(names, arms, strict=True)
    ]
    table.append(("all runs", *_ranges(study, "gpu_hours", ",.0f")))
    if any(one["usd"] is not None for one in study.values()):
        table.append(("USD", *_ranges(study, "usd", ",.0f")))
    yield format_table(("arm", *study), table)


def _ranges(entries: Mapping[str, Entry | None], key: str, form: str) -> Iterator[str]:
    for entry in entries.values():
        ends = [entry and entry[key + end] for end in _ENDS]
        yield "–" if None in ends else "{} [{}, {}]".format(*(format(end, form) for end in ends))
