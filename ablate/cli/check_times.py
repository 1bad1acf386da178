"""What ``ablate check --time`` times and prints: GEMMs of a study's arms, or one layer for each format."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.cli.common import chosen_arms
from ablate.cli.output import figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ablate.plan import PlannedArm
    from ablate.recipes import GemmPolicy, LayerRecipe

_FEATURES = 1024
_TOKENS = 1024
"""The layer that is timed for each format where no study is given."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one shape and recipe under one name: their number, and the back end for their GEMMs.

    ``arm`` is the name of a study's arm, or of a format.
    """

    arm: str
    part: str
    count: int
    tokens: int
    inputs: int
    outputs: int
    recipe: LayerRecipe
    backend: str


def layers_of_study(
    study: str, names: tuple[str, ...], tokens: int | None, backend: str | None
) -> Iterator[Layers]:
    """Yield the layers of a study's arms, those of ``names`` alone if there are any."""
    from ablate.plan import build_plan
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    for arm in chosen_arms(plan, names, sorted(arm.name for arm in plan.arms)):
        yield from _layers_of_arm(arm, tokens, backend)


def layers_of_formats(
    formats: Mapping[str, GemmPolicy], tokens: int | None, backend: str | None
) -> Iterator[Layers]:
    """Yield one layer for each format, all of its GEMMs in it."""
    from ablate.recipes import GEMMS, LayerRecipe

    for fmt, gemm in formats.items():
        yield Layers(
            arm=fmt, part="layer", count=1, tokens=tokens or _TOKENS, inputs=_FEATURES, outputs=_FEATURES,
            recipe=LayerRecipe(**dict.fromkeys(GEMMS, gemm)), backend=backend or "auto",
        )  # fmt: skip


def _layers_of_arm(arm: PlannedArm, tokens: int | None, backend: str | None) -> Iterator[Layers]:
    """Yield the layers of an arm at the start of training; those of one recipe and shape count as one."""
    from ablate.recipes.place import phases_of
    from ablate.run.architecture import layer_places

    training = arm.config.training
    sequences = training.micro_batch_size or training.batch_size // arm.resources.devices_per_run
    where = layer_places(arm.layers)
    counted: Counter[tuple[str, int, int, LayerRecipe]] = Counter()
    for layer in arm.layers:
        place = where[layer.name]
        blockless = layer.name.replace(f".{place.block}.", ".", 1) if place.block is not None else layer.name
        recipe = phases_of(arm.config.recipe, place)[0].recipe
        counted[blockless.removeprefix("blocks."), layer.inputs, layer.outputs, recipe] += 1
    for (part, inputs, outputs, recipe), count in counted.items():
        yield Layers(
            arm=arm.name, part=part, count=count, tokens=tokens or sequences * training.seq_len,
            inputs=inputs, outputs=outputs, recipe=recipe, backend=backend or arm.config.backend,
        )  # fmt: skip


def gemm_times(layers: Iterable[Layers], where: str, repeats: int) -> dict[str, Any]:
    """Time every GEMM of some layers on a torch device; return what ``--json`` prints."""
    from ablate.backends.device import device_of
    from ablate.modelled.hardware import peaks_of

    device = device_of(where)
    rows = list(_timed_rows(layers, where, device.name, repeats))
    peaks = peaks_of(device.name)
    return {
        "device": asdict(device),
        "peaks": None if peaks is None else asdict(peaks),
        "repeats": repeats,
        "gemms": rows,
        "arms": _totals(rows),
    }


def _timed_rows(layers: Iterable[Layers], where: str, device: str, repeats: int) -> Iterator[dict[str, Any]]:
    from ablate.backends.select import Selection
    from ablate.backends.testing.bench import Shape, time_gemm
    from ablate.modelled.hardware import peak_tflops
    from ablate.recipes import GEMMS, describe_gemm

    time_once = cache(time_gemm)
    selection = cache(Selection)
    for one in layers:
        shape = Shape(tokens=one.tokens, inputs=one.inputs, outputs=one.outputs)
        for gemm in GEMMS:
            policy = one.recipe.gemm(gemm)
            try:
                timed = time_once(gemm, policy, shape, selection(one.backend), where, repeats=repeats)
            except ValueError as error:
                raise UserError(f"arm '{one.arm}', {one.part}, {gemm.capitalize()}: {error}") from None
            peak = peak_tflops(device, policy.left.format) if timed.mode == "native" else None
            yield {
                "arm": one.arm, "layer": one.part, "layers": one.count, "operands": describe_gemm(policy),
                **asdict(timed), "share_of_peak": peak and timed.tflops / peak, "total_ms": timed.total_ms,
                "speed_over_bf16": timed.speed_over_bf16, "speed_over_fp8": timed.speed_over_fp8,
            }  # fmt: skip


def _totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each arm's time for all linear layers, over bf16's and FP8's."""
    totals = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        parts = ("total_ms", "bf16_ms", "fp8_ms")
        total, bf16, fp8 = (sum(row[part] * row["layers"] for row in own) for part in parts)
        times = {"total_ms": total, "speed_over_bf16": bf16 / total, "speed_over_fp8": fp8 / total}
        totals.append({"arm": name, **times, "modes": sorted({row["mode"] for row in own})})
    return totals


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
