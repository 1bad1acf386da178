"""``ablate backends``: which formats this machine runs, how, and how fast."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import KNOWN, chosen_device
from ablate.base.errors import UserError
from ablate.cli.common import AT_LEAST_1, chosen_arms, json_option, known_backend, out_option
from ablate.cli.output import deliver, figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ablate.backends.device import Device
    from ablate.plan import PlannedArm
    from ablate.recipes import GemmPolicy, LayerRecipe

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_FEATURES = 1024
_TOKENS = 1024
"""The layer that is timed for each format where no study is given."""
_EXAMPLES = """\b
Examples:
  ablate backends                        what this machine does
  ablate backends --arch gfx950          what an MI355X would do with the packages installed here
  ablate backends --time                 time a GEMM of each format
  ablate backends --time quickstart      time the GEMMs of a study's arms at the shapes of its model
  ablate backends --time my-study.yaml --arm "all three" --tokens 8192 --out gemms.json
"""


@click.command("backends", epilog=_EXAMPLES)
@click.argument("study", required=False)
@click.option("--arch", help=f"Ask of hardware that is not here: {', '.join(KNOWN)}.")
@click.option("--details", is_flag=True, help="Say how, or why not, for every back end and format.")
@click.option("--time", "timed", is_flag=True, help="Time GEMMs on this machine: STUDY's, or one a format.")
@click.option("--arm", "names", multiple=True, help="Time only this arm; may be given again.")
@click.option("--tokens", type=AT_LEAST_1, help="Time with so many rows. Default: a micro batch's tokens.")
@click.option("--repeats", type=AT_LEAST_1, default=20, show_default=True, help="Time so many times.")
@click.option("--device", help="Time on a torch device: cpu, cuda. Default: the first GPU, else the CPU.")
@click.option("--backend", help="Time this back end. Default: as the study says.")
@json_option
@out_option
def command(
    study: str | None,
    arch: str | None,
    details: bool,
    timed: bool,
    names: tuple[str, ...],
    tokens: int | None,
    repeats: int,
    device: str | None,
    backend: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Show which back end does which format on this machine, and with --time how fast.

    native: the device has an instruction for the format. upcast: packed codes are widened to bf16 before they
    are multiplied. emulated: a bf16 GEMM of dequantised values, exact but for how products are added.
    no: it cannot. A format means both operands of a GEMM; all three GEMMs are alike unless a note says so.

    --time gives for each linear layer and GEMM the time to quantise both operands and to multiply, TFLOP/s
    and the share of the device's published peak, and the speed over bf16 and over FP8 (one scale a tensor,
    quantising included). Medians, measured in turns. Emulated times are times of the emulation, not of FP4
    hardware.
    """
    if study is not None and not timed:
        raise UserError(f"'{study}': a study is given to --time alone")
    if timed:
        if names and study is None:
            raise UserError("--arm: without a study there are no arms")
        if backend is not None:
            known_backend(backend)
        where, _ = chosen_device(device)
        if study is None:
            layers = _layers_of_formats(tokens, backend)
        else:
            layers = _layers_of_study(study, names, tokens, backend)
        content = _gemm_times(layers, where, repeats)
    else:
        content = _support(arch)
    if deliver(content, out, as_json=as_json):
        return
    if timed:
        _show_times(content)
    else:
        _show_support(content, details=details)


def _support(arch: str | None) -> dict[str, Any]:
    """Return what each back end does on this machine, or on an architecture that is not here."""
    from ablate.backends.device import KNOWN, default_device, device_of, device_of_arch
    from ablate.backends.select import Selection

    if arch is not None and arch not in KNOWN:
        raise UserError(f"--arch: unknown architecture '{arch}' (expected {', '.join(KNOWN)})")
    device = device_of_arch(arch) if arch else device_of(default_device())
    where = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": arch is None}
    selection = Selection("auto")
    auto = {fmt: selection.choose(_gemm_in(fmt), device)[0].name for fmt in _FORMATS}
    return {"device": where, "backends": _rows(device), "auto": auto}


def _rows(device: Device) -> list[dict[str, str]]:
    """Return one row a back end and format; the three GEMMs are alike."""
    from ablate.backends.select import load_backend
    from ablate.run.backends import backend_names

    rows = []
    for name in (name for name in backend_names() if name != "auto"):
        for fmt in _FORMATS:
            try:
                backend = load_backend(name)
            except ValueError as error:
                mode, detail = "no", str(error)
            else:
                support = backend.support(_gemm_in(fmt), device)
                mode, detail = support.mode, support.detail
            rows.append({"backend": name, "format": fmt, "gemm": "all", "mode": mode, "detail": detail})
    return rows


def _gemm_in(fmt: str) -> GemmPolicy:
    from ablate.recipes import GemmPolicy, OperandPolicy

    operand = OperandPolicy(format=fmt)  # type: ignore[arg-type]
    return GemmPolicy(left=operand, right=operand)


def _show_support(content: dict[str, Any], *, details: bool) -> None:
    device, rows = content["device"], content["backends"]
    elsewhere = "" if device["here"] else ", not here: as its support is known"
    click.echo(f"{device['name']} ({device['arch']}){elsewhere}\n")
    modes = {(row["backend"], row["format"]): row["mode"] for row in rows}
    widths = {row["backend"]: max(len(row["backend"]), 9) for row in rows}
    names = " ".join(f"{name:<{width}}" for name, width in widths.items())
    click.echo(f"format      auto       {names}")
    for fmt in _FORMATS:
        cells = " ".join(f"{modes[name, fmt]:<{width}}" for name, width in widths.items())
        click.echo(f"{fmt:<11} {content['auto'][fmt]:<10} {cells}".rstrip())
    click.echo("" if details else "\n--details says how, and why not.")
    for row in rows if details else ():
        click.echo(f"{row['backend']:<13} {row['format']:<11} {row['mode']}: {row['detail']}")


@dataclass(frozen=True, kw_only=True)
class _Layers:
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


def _layers_of_study(
    study: str, names: tuple[str, ...], tokens: int | None, backend: str | None
) -> Iterator[_Layers]:
    """Yield the layers of a study's arms, those of ``names`` alone if there are any."""
    from ablate.plan import build_plan
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    for arm in chosen_arms(plan, names, sorted(arm.name for arm in plan.arms)):
        yield from _layers_of_arm(arm, tokens, backend)


def _layers_of_formats(tokens: int | None, backend: str | None) -> Iterator[_Layers]:
    """Yield one layer for each format, all of its GEMMs in it."""
    from ablate.recipes import GEMMS, LayerRecipe

    for fmt in _FORMATS:
        yield _Layers(
            arm=fmt, part="layer", count=1, tokens=tokens or _TOKENS, inputs=_FEATURES, outputs=_FEATURES,
            recipe=LayerRecipe(**dict.fromkeys(GEMMS, _gemm_in(fmt))), backend=backend or "auto",
        )  # fmt: skip


def _layers_of_arm(arm: PlannedArm, tokens: int | None, backend: str | None) -> Iterator[_Layers]:
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
        yield _Layers(
            arm=arm.name, part=part, count=count, tokens=tokens or sequences * training.seq_len,
            inputs=inputs, outputs=outputs, recipe=recipe, backend=backend or arm.config.backend,
        )  # fmt: skip


def _gemm_times(layers: Iterable[_Layers], where: str, repeats: int) -> dict[str, Any]:
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


def _timed_rows(layers: Iterable[_Layers], where: str, device: str, repeats: int) -> Iterator[dict[str, Any]]:
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


def _show_times(content: dict[str, Any]) -> None:
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
