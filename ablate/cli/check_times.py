"""What ``ablate check --time`` times and prints: GEMMs of a study's arms, or one layer for each format."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.cli.common import chosen_arms
from ablate.cli.output import figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.check.speed import Shape
    from ablate.recipes import LayerRecipe

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
    for arm in chosen_arms(plan, names, sorted(arm.name for arm in plan.arms)):
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


def show_times(content: dict[str, Any]) -> None:
    """Print a table for each arm, and one of their totals."""
    width = terminal_width(110)
    device = content["device"]
    click.echo(f"{device['name']} ({device['arch']}), medians of {content['repeats']} repeats\n")
    header = [
        "layer", "GEMM", "M×N×K", "by", "quantise ms", "GEMM ms", "TFLOP/s", "of peak", "× bf16", "× FP8",
    ]  # fmt: skip
    for name in dict.fromkeys(row["arm"] for row in content["gemms"]):
        lines = [
            [
                row["layer"].split(".")[-1], row["gemm"].capitalize(), f"{row['m']}×{row['n']}×{row['k']}",
                row["mode"] if row["backend"] == row["mode"] else f"{row['backend']} {row['mode']}",
                f"{row['quantise_ms']:.3f}", f"{row['multiply_ms']:.3f}", f"{row['tflops']:.2f}",
                figure(row["share_of_peak"], ".0%"),
                f"{row['speed_over_bf16']:.2f}", f"{row['speed_over_fp8']:.2f}",
            ]
            for row in content["gemms"]
            if row["arm"] == name
        ]  # fmt: skip
        click.echo(f"{name}\n{format_table(header, lines, width=width)}\n")
    click.echo("All linear layers of a pass, forward and backward:")
    totals = [
        [
            one["arm"], f"{one['total_ms']:.2f}", f"{one['speed_over_bf16']:.2f}",
            f"{one['speed_over_fp8']:.2f}", ", ".join(one["modes"]),
        ]
        for one in content["arms"]
    ]  # fmt: skip
    click.echo(format_table(["arm", "ms", "× bf16", "× FP8", "how"], totals, width=width))
    if any("emulated" in one["modes"] for one in content["arms"]):
        click.echo(
            "\nEmulated GEMMs are slower than bf16 by design; their times say nothing of FP4 hardware."
        )
