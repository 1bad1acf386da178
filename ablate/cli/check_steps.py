"""``ablate check steps``: the time of whole training steps of a study's arms, for the study's report."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError, as_user_error, likely
from ablate.cli.common import (
    count_option,
    deliver,
    device_option,
    json_option,
    out_option,
    storage_option,
    study_argument,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.records import SpeedRecord

_WARMUP_STEPS = 3
_COLUMNS = {
    "arm": "{of.arm}", "tokens/s": "{of.median:,.0f}", "spread": "{of.spread:.1%}",
    "× baseline": "{of.over_baseline:.2f}", "peak GB": "{peak:.2f}", "timing": "{timing}",
}  # fmt: skip


@click.command(
    "steps",
    short_help="Time training steps of a study's arms.",
    epilog="\b\nExamples:\n"
    "  ablate check steps quickstart\n"
    "  ablate check steps my-study.yaml --steps 50 --arm bf16 --arm fp4",
)
@study_argument
@count_option(
    "--steps",
    default=10,
    help="Number of steps in each measurement.",
)
@count_option(
    "--repeats",
    default=3,
    help="Number of measurements of each arm in each of the two turns.",
)
@click.option(
    "--arm",
    "names",
    metavar="NAME",
    multiple=True,
    help="Time only this arm (may be repeated).",
)
@device_option
@storage_option
@json_option
@out_option
def steps(
    study: str, *, steps: int, repeats: int, names: tuple[str, ...], device: str | None, storage: Path,
    as_json: bool, out: Path | None,
) -> int:  # fmt: skip
    """Time whole training steps of every arm of STUDY: forward, backward, clipping and optimizer.

    The tokens are made up, and the arms are timed there and back. The result is kept in the study's folder of
    the storage, in place of an earlier one; `ablate report` makes the end-to-end speed-up of it. Nothing else
    should use the device. Emulated times are times of the emulation, not of FP4 hardware.
    """
    from ablate.base.files import write_record
    from ablate.plan import build_plan, known_plan
    from ablate.store import StudyStore
    from ablate.store.records import SpeedSettings
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    store = StudyStore(storage / plan.study)
    plan = known_plan(plan, store)
    known = [arm.name for arm in plan.arms]
    for name in names:
        if name not in known:
            hint = likely(name, known, f"arms: {', '.join(known)}")
            raise UserError(f"--arm: no arm '{name}' in study '{plan.study}' ({hint})")
    arms = [arm for arm in plan.arms if not names or arm.name in names]
    torch_device, _ = chosen_device(device)
    from ablate.execute.throughput import measure

    settings = SpeedSettings(steps=steps, warmup=_WARMUP_STEPS, repeats=repeats)
    with click.progressbar(
        length=2 * len(arms), label="arms, two turns", hidden=as_json
    ) as bar:
        record = measure(
            plan.study,
            arms,
            plan.baseline,
            torch_device,
            settings=settings,
            done=lambda _: bar.update(1),
        )
    deliver(asdict(record), _lines(record), as_json=as_json, out=out)
    # Arms of an earlier record are dropped: turns cancel drift only within one measurement.
    if plan.baseline in [timed.arm for timed in record.arms]:
        store.refuse_unsafe()
        with as_user_error(f"cannot write {store.throughput_path}"):
            write_record(store.throughput_path, asdict(record))
        outcome = f"Kept for the report in {store.throughput_path}, in place of what was measured before"
    else:
        outcome = f"Not kept for the report, which needs the baseline timed, too: --arm '{plan.baseline}'"
    click.echo(f"\n{outcome}", err=as_json)
    return 0


def _lines(record: SpeedRecord) -> Iterator[str]:
    device = record.device
    settings = record.settings
    yield f"{device.name} ({device.arch}), medians of {2 * settings.repeats} × {settings.steps} steps\n"
    rows = []
    for timed in record.arms:
        if timed.peak_memory_bytes is None:
            peak = None
        else:
            peak = timed.peak_memory_bytes / 1e9
        rows.append({"of": timed, "peak": peak, "timing": timed.why_not or "native"})
    yield table_of(_COLUMNS, rows)
    if record.other_work:
        yield f"\nPerhaps not alone on the device: {record.other_work}. Compare with care."
