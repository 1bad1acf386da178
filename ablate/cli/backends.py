"""``ablate backends``: which formats this machine runs, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ablate.base.errors import UserError
from ablate.cli.common import device_option, known_backend, write_out
from ablate.cli.gemm_times import gemm_times, layers_of_formats, layers_of_study, show_times

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
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
@click.option("--arch", help="Ask of hardware that is not here: cpu, sm_90, sm_100, sm_103, sm_120, gfx950.")
@click.option("--details", is_flag=True, help="Say how, or why not, for every back end and format.")
@click.option("--time", "timed", is_flag=True, help="Time GEMMs on this machine: STUDY's, or one a format.")
@click.option("--arm", "names", multiple=True, help="Time only this arm; may be given again.")
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Time with so many rows. Default: a micro batch's tokens."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Time so many times."
)
@click.option("--device", help="Time on a torch device: cpu, cuda. Default: the first GPU, else the CPU.")
@click.option("--backend", help="Time this back end. Default: as the study says.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write that object to a file.")
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
    are multiplied. emulated: a bf16 GEMM of dequantised values, exact but for the order of accumulation.
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
        where, _ = device_option(device)
        layers = (
            layers_of_formats(_FORMATS, tokens, backend)
            if study is None
            else layers_of_study(study, names, tokens, backend)
        )
        content = gemm_times(layers, where, repeats)
    else:
        content = _support(arch)
    if out is not None:
        write_out(out, content)
    if as_json:
        click.echo(json.dumps(content, indent=1))
    elif timed:
        show_times(content)
    else:
        _show_support(content, details=details)


def _support(arch: str | None) -> dict[str, Any]:
    """Return what each back end does on this machine, or on an architecture that is not here."""
    from ablate.backends.device import KNOWN, default_device, device_of, device_of_arch

    if arch is not None and arch not in KNOWN:
        raise UserError(f"--arch: unknown architecture '{arch}' (expected {', '.join(KNOWN)})")
    device = device_of_arch(arch) if arch else device_of(default_device())
    where = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": arch is None}
    return {"device": where, "backends": _rows(device), "auto": _chosen(device)}


def _show_support(content: dict[str, Any], *, details: bool) -> None:
    device, rows = content["device"], content["backends"]
    elsewhere = "" if device["here"] else ", not here: as its support is known"
    click.echo(f"{device['name']} ({device['arch']}){elsewhere}\n")
    _print_table(rows, content["auto"])
    if details:
        click.echo()
        for row in rows:
            gemms = "" if row["gemm"] == "all" else f" {row['gemm']}"
            click.echo(f"{row['backend']:<13} {row['format']:<11}{gemms} {row['mode']}: {row['detail']}")
    else:
        click.echo("\n--details says how, and why not.")


def _gemms(fmt: str) -> dict[str, Any]:
    from ablate.recipes import GEMMS, GemmPolicy, OperandPolicy

    policy = OperandPolicy(format=fmt)  # type: ignore[arg-type]
    return {gemm: GemmPolicy(left=policy, right=policy) for gemm in GEMMS}


def _rows(device: Any) -> list[dict[str, str]]:
    """Return one row a back end and format; one for each GEMM only where they differ."""
    from ablate.backends.select import load_backend
    from ablate.run.backends import backend_names

    rows = []
    for name in backend_names():
        if name == "auto":
            continue
        try:
            backend = load_backend(name)
        except ValueError as error:
            rows += [_row(name, fmt, "all", "no", str(error)) for fmt in _FORMATS]
            continue
        for fmt in _FORMATS:
            found = {gemm: backend.support(policy, device) for gemm, policy in _gemms(fmt).items()}
            if len(set(found.values())) == 1:
                support = next(iter(found.values()))
                rows.append(_row(name, fmt, "all", support.mode, support.detail))
            else:
                rows += [_row(name, fmt, gemm, one.mode, one.detail) for gemm, one in found.items()]
    return rows


def _row(backend: str, fmt: str, gemm: str, mode: str, detail: str) -> dict[str, str]:
    return {"backend": backend, "format": fmt, "gemm": gemm, "mode": mode, "detail": detail}


def _chosen(device: Any) -> dict[str, str]:
    """Return which back end ``auto`` takes for each format."""
    from ablate.backends.select import Selection

    selection = Selection("auto")
    return {fmt: selection.choose(_gemms(fmt)["fprop"], device)[0].name for fmt in _FORMATS}


def _print_table(rows: list[dict[str, str]], chosen: dict[str, str]) -> None:
    names = list(dict.fromkeys(row["backend"] for row in rows))
    modes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        modes.setdefault((row["backend"], row["format"]), set()).add(row["mode"])
    widths = {name: max(len(name), 9) for name in names}
    click.echo("format      auto       " + " ".join(f"{name:<{widths[name]}}" for name in names))
    for fmt in _FORMATS:
        cells = " ".join(f"{'/'.join(sorted(modes[name, fmt])):<{widths[name]}}" for name in names)
        click.echo(f"{fmt:<11} {chosen[fmt]:<10} {cells}".rstrip())
