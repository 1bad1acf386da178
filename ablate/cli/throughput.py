"""``ablate throughput``: the speed of each arm's training steps, alone on the device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import (
    AT_LEAST_1,
    chosen_arms,
    device_option,
    json_option,
    out_option,
    storage_option,
)
from ablate.cli.output import deliver, figure, format_table, terminal_width

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.plan import Plan, PlannedArm
    from ablate.store import StudyStore
    from ablate.store.records import SpeedRecord

_EXAMPLES = """\b
Examples:
  ablate throughput my-study.yaml
  ablate throughput my-study.yaml --arm bf16 --arm fprop --steps 50 --out speed.json
"""


@click.command("throughput", epilog=_EXAMPLES)
@click.argument("study")
@click.option("--arm", "names", multiple=True, help="Only this arm; may be given again.")
@click.option("--steps", type=AT_LEAST_1, default=10, show_default=True, help="Steps of a repeat.")
@click.option(
    "--warmup", type=AT_LEAST_1, default=3, show_default=True, help="Steps before that do not count."
)
@click.option("--repeats", type=AT_LEAST_1, default=3, show_default=True, help="In each of two turns.")
@device_option
@json_option
@out_option
@storage_option
def command(
    study: str,
    storage: Path,
    names: tuple[str, ...],
    device: str | None,
    as_json: bool,
    out: Path | None,
    **counts: int,
) -> None:
    """Time whole training steps of every arm of STUDY, one arm after the other.

    Forward, backward, clipping and optimizer on made-up tokens, without data, evaluation and checkpoints; the
    arms are gone through twice, there and back. Nothing else should use the device. Emulated times are
    times of the emulation, not of FP4 hardware.

    What was measured is kept in the study's folder of the storage, in place of what was measured before.
    `ablate report` makes the end-to-end speed-up of it, where the timing is native and the device was idle.
    """
    from ablate.plan import build_plan, known_plan
    from ablate.store import StudyStore
    from ablate.store.records import SpeedSettings
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    store = StudyStore(storage / plan.study)
    plan = known_plan(plan, store)
    arms = chosen_arms(plan, names, [arm.name for arm in plan.arms])
    where, found = chosen_device(device)
    from ablate.execute.throughput import measure, record

    settings = SpeedSettings(**counts)
    with click.progressbar(length=2 * len(arms), label="arms, two turns", hidden=as_json) as bar:
        speeds, others = measure(arms, plan.baseline, where, settings=settings, done=lambda _: bar.update(1))
    measured = record(plan.study, found, speeds, others, settings)
    if not deliver(asdict(measured), out, as_json=as_json):
        _show(measured, plan)
    click.echo("\n" + _keep(store, measured, plan.baseline), err=as_json)


def _show(measured: SpeedRecord, plan: Plan) -> None:
    device, settings = measured.device, measured.settings
    click.echo(f"{device.name} ({device.arch}), medians of {2 * settings.repeats} × {settings.steps} steps\n")
    rows = [
        (
            one.arm,
            f"{one.median:,.0f}",
            f"{one.spread:.1%}",
            figure(one.over_baseline, ".2f"),
            _memory(plan.arm(one.arm), one.peak_memory_bytes, device.name),
            one.why_not or "native",
        )
        for one in measured.arms
    ]
    header = ("arm", "tokens/s", "spread", f"× {plan.baseline}", "memory", "timing")
    click.echo(format_table(header, rows, width=terminal_width(110)))
    if measured.other_work:
        click.echo(f"\nPerhaps not alone on the device: {measured.other_work}. Compare with care.")


def _memory(arm: PlannedArm, peak_bytes: int | None, device_name: str) -> str:
    """Return the measured peak, with what the plan models for one such device that computes nothing twice."""
    if peak_bytes is None:
        return "–"
    from ablate.modelled.hardware import PEAKS
    from ablate.modelled.on_hardware import on_hardware
    from ablate.run.config import ResourcesConfig

    measured = f"{peak_bytes / 1e9:.2f} GB"
    hardware = next((name for name in PEAKS if name in device_name), None)
    found = on_hardware(arm.config, ResourcesConfig(), hardware) if hardware else None
    return f"{measured} (modelled {found.memory.peak.total / 1e9:.2f})" if found else measured


def _keep(store: StudyStore, measured: SpeedRecord, baseline: str) -> str:
    """Write the record that the report reads, as a whole, and say so in a line.

    Arms of an earlier record are not carried over: two arms are compared only within one measurement, whose
    turns cancel what drifts.
    """
    from ablate.base.files import read_record, write_record
    from ablate.store.records import SpeedRecord, checked

    timed = [one.arm for one in measured.arms]
    if baseline not in timed:
        return f"Not kept for the report, which needs the baseline timed, too: --arm '{baseline}'"
    try:
        before = [one.arm for one in checked(SpeedRecord, read_record(store.throughput_path)).arms]
    except (OSError, ValueError):  # none, or damaged
        before = []
    try:
        write_record(store.throughput_path, asdict(measured))
    except OSError as error:
        raise UserError(f"cannot write {store.throughput_path}: {error.strerror or error}") from None
    dropped = [name for name in before if name not in timed]
    lost = f"; no longer in it, as not timed now: {', '.join(dropped)}" if dropped else ""
    return safe_text(f"Kept for the report in {store.throughput_path}{lost}")
