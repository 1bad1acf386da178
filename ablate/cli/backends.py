"""``ablate backends``: which formats this machine runs, and how."""

from __future__ import annotations

import json
from typing import Any

import click

from ablate.base.errors import UserError

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_EXAMPLES = """\b
Examples:
  ablate backends                  what this machine does
  ablate backends --arch gfx950    what an MI355X would do with the packages installed here
  ablate backends --json           for scripts
"""


@click.command("backends", epilog=_EXAMPLES)
@click.option("--arch", help="Ask of hardware that is not here: cpu, sm_90, sm_100, sm_103, sm_120, gfx950.")
@click.option("--details", is_flag=True, help="Say how, or why not, for every back end and format.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def command(arch: str | None, details: bool, as_json: bool) -> None:
    """Show which back end does which format on this machine.

    native: the device has an instruction for the format. upcast: packed codes are widened to bf16 before they
    are multiplied. emulated: a bf16 GEMM of dequantised values, exact but for the order of accumulation.
    no: it cannot. A format means both operands of a GEMM; all three GEMMs are alike unless a note says so.
    """
    from ablate.backends.device import KNOWN, default_device, device_of, device_of_arch

    if arch is not None and arch not in KNOWN:
        raise UserError(f"--arch: unknown architecture '{arch}' (expected {', '.join(KNOWN)})")
    device = device_of_arch(arch) if arch else device_of(default_device())
    rows = _rows(device)
    chosen = _chosen(device)
    if as_json:
        where = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": arch is None}
        click.echo(json.dumps({"device": where, "backends": rows, "auto": chosen}, indent=1))
        return
    click.echo(
        f"{device.name} ({device.arch}){'' if arch is None else ', not here: as its support is known'}\n"
    )
    _print_table(rows, chosen)
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
