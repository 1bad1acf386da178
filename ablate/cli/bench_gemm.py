"""``ablate bench-gemm``: what each arm's GEMMs cost on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.cli.common import device_option, known_backend, write_out
from ablate.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.plan import Plan, PlannedArm
    from ablate.recipes import LayerRecipe

_EXAMPLES = """\b
Examples:
  ablate bench-gemm quickstart
  ablate bench-gemm my-study.yaml --arm "all three" --tokens 8192 --out gemms.json
"""


@click.command("bench-gemm", epilog=_EXAMPLES)
@click.argument("study")
@click.option("--arm", "names", multiple=True, help="Only this arm; may be given again.")
@click.option("--tokens", type=click.IntRange(min=1), help="Rows of a GEMM. Default: a micro batch's tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--device", help="A torch device: cpu, cuda. Default: the first GPU, else the CPU.")
@click.option("--backend", help="Who quantises and multiplies. Default: as the study says.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write that object to a file.")
def command(
    study: str,
    names: tuple[str, ...],
    tokens: int | None,
    repeats: int,
    device: str | None,
    backend: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Time the GEMMs of every arm of STUDY at the shapes of its model.

    For each linear layer and GEMM: the time to quantise both operands and to multiply, TFLOP/s and the share
    of the device's published peak, and the speed over bf16 and over FP8 (one scale a tensor, quantising
    included). Medians, measured in turns. Emulated times are times of the emulation, not of FP4 hardware.
    """
    from ablate.modelled.hardware import peaks_of
    from ablate.plan import build_plan
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    known = {arm.name for arm in plan.arms}
    for name in names:
        if name not in known:
            raise UserError(
                f"--arm: no arm '{name}' in study '{plan.study}' (arms: {', '.join(sorted(known))})"
            )
    if backend is not None:
        known_backend(backend)
    where, found = device_option(device)
    rows = list(_rows(plan, names, tokens, repeats, where, backend))
    peaks = peaks_of(found.name)
    content = {
        "device": asdict(found),
        "peaks": None if peaks is None else asdict(peaks),
        "repeats": repeats,
        "gemms": rows,
        "arms": _totals(rows),
    }
    if out is not None:
        write_out(out, content)
    if as_json:
        click.echo(json.dumps(content, indent=1))
    else:
        _show(content)


def _layers(arm: PlannedArm) -> Iterator[tuple[str, int, int, int, LayerRecipe]]:
    """Yield (layer, how many follow the same recipe, inputs, outputs, recipe) at the start of training."""
    from ablate.recipes.place import stages
    from ablate.run.architecture import layer_places

    where = layer_places(arm.layers)
    counted: dict[tuple[str, int, int, Any], int] = {}
    for layer in arm.layers:
        place = where[layer.name]
        blockless = layer.name.replace(f".{place.block}.", ".", 1) if place.block is not None else layer.name
        part = blockless.removeprefix("blocks.")
        recipe = next(stage.recipe for stage in stages(arm.config.recipe, place) if not stage.start(1))
        key = (part, layer.inputs, layer.outputs, recipe)
        counted[key] = counted.get(key, 0) + 1
    for (part, inputs, outputs, recipe), count in counted.items():
        yield part, count, inputs, outputs, recipe


def _rows(
    plan: Plan, names: tuple[str, ...], tokens: int | None, repeats: int, where: str, backend: str | None
) -> Iterator[dict[str, Any]]:
    from ablate.backends.device import device_of
    from ablate.backends.select import Selection
    from ablate.backends.testing.bench import Shape, time_gemm
    from ablate.modelled.hardware import peak_tflops
    from ablate.recipes import GEMMS, describe_gemm

    name = device_of(where).name
    timed: dict[Any, Any] = {}
    for arm in plan.arms:
        if names and arm.name not in names:
            continue
        training = arm.config.training
        share = training.batch_size // arm.resources.devices_per_run
        rows = tokens or (training.micro_batch_size or share) * training.seq_len
        chosen = backend or arm.config.backend
        for part, count, inputs, outputs, recipe in _layers(arm):
            shape = Shape(tokens=rows, inputs=inputs, outputs=outputs)
            for gemm in GEMMS:
                policy = recipe.gemm(gemm)
                key = (gemm, policy, shape, chosen)
                try:
                    if key not in timed:
                        timed[key] = time_gemm(gemm, policy, shape, Selection(chosen), where, repeats=repeats)
                except ValueError as error:
                    raise UserError(f"arm '{arm.name}', {part}, {gemm.capitalize()}: {error}") from None
                one = timed[key]
                peak = peak_tflops(name, policy.left.format) if one.mode == "native" else None
                yield {
                    "arm": arm.name, "layer": part, "layers": count, "operands": describe_gemm(policy),
                    **asdict(one), "share_of_peak": peak and one.tflops / peak, "total_ms": one.total_ms,
                    "speed_over_bf16": one.speed_over_bf16,
                    "speed_over_fp8": one.speed_over_fp8,
                }  # fmt: skip


def _totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each arm's time for all linear layers, over bf16's and FP8's."""
    totals = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        total, bf16, fp8 = (
            sum(row[which] * row["layers"] for row in own) for which in ("total_ms", "bf16_ms", "fp8_ms")
        )
        modes = sorted({row["mode"] for row in own})
        totals.append(
            {
                "arm": name, "total_ms": total, "speed_over_bf16": bf16 / total,
                "speed_over_fp8": fp8 / total,
                "modes": modes,
            }
        )  # fmt: skip
    return totals


def _show(content: dict[str, Any]) -> None:
    import shutil

    width = shutil.get_terminal_size((110, 24)).columns
    device = content["device"]
    click.echo(f"{device['name']} ({device['arch']}), medians of {content['repeats']} repeats\n")
    header = [
        "layer",
        "GEMM",
        "M×N×K",
        "by",
        "quantise ms",
        "GEMM ms",
        "TFLOP/s",
        "of peak",
        "× bf16",
        "× FP8",
    ]
    for name in dict.fromkeys(row["arm"] for row in content["gemms"]):
        lines = [
            [
                row["layer"].split(".")[-1], row["gemm"].capitalize(), f"{row['m']}×{row['n']}×{row['k']}",
                row["mode"] if row["backend"] == row["mode"] else f"{row['backend']} {row['mode']}",
                f"{row['quantise_ms']:.3f}", f"{row['multiply_ms']:.3f}", f"{row['tflops']:.2f}",
                "–" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}",
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
