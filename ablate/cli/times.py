"""``ablate throughput``: whole steps of a study's arms; ``ablate check --time``: GEMMs of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError
from ablate.cli.common import (
    AT_LEAST_1,
    chosen_arms,
    deliver,
    device_option,
    figure,
    format_table,
    json_option,
    out_option,
    storage_option,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.check.speed import Shape
    from ablate.recipes import LayerRecipe
    from ablate.store import StudyStore
    from ablate.store.records import SpeedRecord

_EXAMPLES = """\b
Examples:
  ablate throughput my-study.yaml
  ablate throughput my-study.yaml --arm bf16 --arm fprop --steps 50 --out speed.json
"""
FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_FEATURES = 1024
_TOKENS = 1024
"""The layer that is timed for each format where no study is given."""


def _layers(
    study: str | None, names: tuple[str, ...], tokens: int | None
) -> Iterator[tuple[str, str, int, Shape, LayerRecipe, str]]:
    """Yield (arm or format, part, number of layers, shape, recipe, back end); those that are alike at once.

    An arm's recipe is that of the start of training.
    """
    from ablate.backends.testing.suite import both
    from ablate.check.speed import Shape
    from ablate.plan import build_plan
    from ablate.recipes import GEMMS, LayerRecipe, OperandPolicy
    from ablate.recipes.place import phases_of
    from ablate.run.architecture import layer_places
    from ablate.study import load_study

    if study is None:
        for fmt in FORMATS:
            gemm = both(OperandPolicy(format=fmt))  # type: ignore[arg-type]
            shape = Shape(tokens=tokens or _TOKENS, inputs=_FEATURES, outputs=_FEATURES)
            yield fmt, "layer", 1, shape, LayerRecipe(**dict.fromkeys(GEMMS, gemm)), "auto"
        return
    plan = build_plan(load_study(study))
    for arm in chosen_arms(plan, names):
        training = arm.config.training
        sequences = training.micro_batch_size or training.batch_size // arm.resources.devices_per_run
        where = layer_places(arm.layers)
        counted: Counter[tuple[str, Shape, LayerRecipe]] = Counter()
        for layer in arm.layers:
            place = where[layer.name]
            part = layer.name.replace(f".{place.block}.", ".", 1) if place.block is not None else layer.name
            rows = tokens or sequences * training.seq_len
            shape = Shape(tokens=rows, inputs=layer.inputs, outputs=layer.outputs)
            recipe = phases_of(arm.config.recipe, place)[0].recipe
            counted[part.removeprefix("blocks."), shape, recipe] += 1
        for (part, shape, recipe), count in counted.items():
            yield arm.name, part, count, shape, recipe, arm.config.backend


def gemm_times(
    study: str | None,
    where: str,
    *,
    names: tuple[str, ...],
    tokens: int | None,
    repeats: int,
    backend: str | None,
) -> dict[str, Any]:
    """Time every GEMM of a study's arms, or one of each format; return what ``--json`` prints."""
    from ablate.backends.device import device_of
    from ablate.backends.select import Selection
    from ablate.check.speed import time_gemm
    from ablate.modelled.hardware import peak_tflops, peaks_of
    from ablate.recipes import GEMMS, describe_gemm

    device = device_of(where)
    time_once, selection = cache(time_gemm), cache(Selection)
    rows: list[dict[str, Any]] = []
    for arm, part, count, shape, recipe, own in _layers(study, names, tokens):
        for gemm in GEMMS:
            policy = recipe.gemm(gemm)
            try:
                timed = time_once(gemm, policy, shape, selection(backend or own), where, repeats=repeats)
            except ValueError as error:
                raise UserError(f"arm '{arm}', {part}, {gemm.capitalize()}: {error}") from None
            peak = peak_tflops(device.name, policy.left.format) if timed.mode == "native" else None
            about = {"arm": arm, "layer": part, "layers": count, "operands": describe_gemm(policy)}
            rows.append(about | asdict(timed) | {"share_of_peak": peak and timed.tflops / peak})
    arms = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        whole = [row for row in rows if row["arm"] == name]
        total, bf16, fp8 = (
            sum(row[part] * row["layers"] for row in whole) for part in ("total_ms", "bf16_ms", "fp8_ms")
        )
        speeds = {"speed_over_bf16": bf16 / total, "speed_over_fp8": fp8 / total}
        modes = sorted({row["mode"] for row in whole})
        arms.append({"arm": name, "total_ms": total, **speeds, "modes": modes})
    peaks = peaks_of(device.name)
    return {
        "device": asdict(device), "peaks": peaks and asdict(peaks), "repeats": repeats,
        "gemms": rows, "arms": arms,
    }  # fmt: skip


def times_lines(content: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the GEMMs, and one of each arm's totals."""
    device = content["device"]
    yield f"{device['name']} ({device['arch']}), medians of {content['repeats']} repeats\n"
    rows = [
        (
            row["arm"], row["layer"], row["gemm"].capitalize(), f"{row['m']}×{row['n']}×{row['k']}",
            f"{row['backend']} {row['mode']}", f"{row['quantise_ms']:.3f}", f"{row['multiply_ms']:.3f}",
            f"{row['tflops']:.2f}", figure(row["share_of_peak"], ".0%"),
            f"{row['speed_over_bf16']:.2f}", f"{row['speed_over_fp8']:.2f}",
        )
        for row in content["gemms"]
    ]  # fmt: skip
    header: tuple[str, ...] = (
        "arm", "layer", "GEMM", "M×N×K", "by", "quantise ms", "GEMM ms", "TFLOP/s", "of peak", "× bf16",
        "× FP8",
    )  # fmt: skip
    yield format_table(header, rows)
    yield "\nAll linear layers of a pass, forward and backward:"
    totals = [
        (
            one["arm"], f"{one['total_ms']:.2f}", f"{one['speed_over_bf16']:.2f}",
            f"{one['speed_over_fp8']:.2f}", ", ".join(one["modes"]),
        )
        for one in content["arms"]
    ]  # fmt: skip
    yield format_table(("arm", "ms", "× bf16", "× FP8", "how"), totals)
    yield "\nTimes of emulated GEMMs say nothing of FP4 hardware."


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
def throughput(
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
    arms = chosen_arms(plan, names)
    where, found = chosen_device(device)
    from ablate.execute.throughput import measure, record

    settings = SpeedSettings(**counts)
    with click.progressbar(length=2 * len(arms), label="arms, two turns", hidden=as_json) as bar:
        speeds, others = measure(arms, plan.baseline, where, settings=settings, done=lambda _: bar.update(1))
    measured = record(plan.study, found, speeds, others, settings)
    deliver(asdict(measured), lambda: _speed_lines(measured, plan.baseline), as_json=as_json, out=out)
    click.echo("\n" + _keep(store, measured, plan.baseline), err=as_json)


def _speed_lines(measured: SpeedRecord, baseline: str) -> Iterator[str]:
    device, settings = measured.device, measured.settings
    yield f"{device.name} ({device.arch}), medians of {2 * settings.repeats} × {settings.steps} steps\n"
    rows = [
        (
            one.arm,
            f"{one.median:,.0f}",
            f"{one.spread:.1%}",
            figure(one.over_baseline, ".2f"),
            "–" if one.peak_memory_bytes is None else f"{one.peak_memory_bytes / 1e9:.2f}",
            one.why_not or "native",
        )
        for one in measured.arms
    ]
    yield format_table(("arm", "tokens/s", "spread", f"× {baseline}", "peak GB", "timing"), rows)
    if measured.other_work:
        yield f"\nPerhaps not alone on the device: {measured.other_work}. Compare with care."


def _keep(store: StudyStore, measured: SpeedRecord, baseline: str) -> str:
    """Write the record that the report reads, as a whole, and say so in a line.

    Arms of an earlier record are not carried over: two arms are compared only within one measurement, whose
    turns cancel what drifts.
    """
    from ablate.base.files import write_record

    if baseline not in [one.arm for one in measured.arms]:
        return f"Not kept for the report, which needs the baseline timed, too: --arm '{baseline}'"
    try:
        write_record(store.throughput_path, asdict(measured))
    except OSError as error:
        raise UserError(f"cannot write {store.throughput_path}: {error.strerror or error}") from None
    return f"Kept for the report in {store.throughput_path}, in place of what was measured before"
