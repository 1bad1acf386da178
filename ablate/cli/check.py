"""``ablate check``: what a machine does; whether a device or a quantiser is right, how it errs, how fast."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ablate.backends.device import chosen_device, device_of_arch
from ablate.base.errors import UserError, safe_text
from ablate.check import ARCHITECTURE, DEVICE, MINUTES, OUT
from ablate.cli.common import AT_LEAST_1, Place, device_option, json_option, known_backend
from ablate.cli.output import deliver

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_EXAMPLES = """\b
Examples:
  ablate check                      what this machine does, and its self-test
  ablate check cuda                 prove and time the GPU in ten minutes
  ablate check cpu --minutes 3      what fits in; the same command goes on
  ablate check gfx950               what an MI355X would do
  ablate check --time               time a GEMM of each format
  ablate check quickstart --time    those of a study, at its model's shapes
  ablate check tseng                a published recipe's quantisers
  ablate check my-study.yaml --arm "all three"     an arm's
  ablate check quant.py:mxfp4 --as mxfp4           a function of yours
  ablate check quant.py:sr --as tseng:wgrad.dy     one that claims to be an operand's
  python -m ablate.check cuda       where only torch, triton, numpy and pydantic are
"""
_TAKES = {
    "this machine": {"details"},
    "a device": {"minutes"},
    "an architecture": {"details"},
    "--time": {"names", "tokens", "repeats", "device", "backend"},
    "a quantiser": {"held_against", "names", "draws", "seed", "device", "backend"},
}
"""The options of each thing that can be checked, beside --json and --out."""


@click.command("check", epilog=_EXAMPLES)
@click.argument("subject", required=False, metavar="[DEVICE | RECIPE | FUNCTION | STUDY]")
@click.option("--details", is_flag=True, help="Say how, or why not, for every back end and format.")
@click.option(
    "--minutes", type=float, default=MINUTES, show_default=True, help="Of DEVICE no check begins later."
)
@click.option("--time", "timed", is_flag=True, help="Time GEMMs on this machine: STUDY's, or one a format.")
@click.option(
    "--arm", "names", metavar="NAME", multiple=True, help="Of STUDY only this arm; to --time several."
)
@click.option("--tokens", type=AT_LEAST_1, help="Time with so many rows. Default: a micro batch's tokens.")
@click.option("--repeats", type=AT_LEAST_1, default=20, show_default=True, help="Time so many times.")
@click.option("--as", "held_against", metavar="RECIPE[:OPERAND]", help="What a function claims to be.")
@click.option(
    "--draws", type=click.IntRange(min=8), default=64, show_default=True, help="Tensors of each kind of data."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of data and draws.")
@device_option
@click.option("--backend", help="The back end that quantises, or is timed. Default: auto, or as STUDY says.")
@json_option
@click.option(
    "--out",
    type=Place(path_type=Path),
    help=f"Folder of DEVICE's record (default: {OUT}); else a file for the object.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    subject: str | None,
    *,
    timed: bool,
    as_json: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Check what this machine does in FP4, a device, or a quantiser: bit by bit, on average, and how fast.

    Without an argument: which back end does which format here, and the short self-test of each. native: the
    device has an instruction for the format. upcast: packed codes are widened to bf16 before they are
    multiplied. emulated: a bf16 GEMM of dequantised values, exact but for how products are added. no: it
    cannot. A format means both operands of a GEMM; all three GEMMs are alike unless a note says so.

    DEVICE is cpu or cuda: quantised bits are compared with plain torch on the CPU, products with exact ones.
    The exact probe finds an accumulator that is narrower than fp32. Then come gradients, a short training run
    beside emulation, the quantiser's bandwidth, rates of GEMMs and times of training steps. Record (JSON) and
    page (Markdown) lie in --out, with the smallest tensors that show a failure. What did not fit the time is
    run by the same command once more. Of hardware that is not here, such as sm_100 or gfx950: what the back
    ends would do on it with the packages installed here; the kernels are compiled for it and read back.

    RECIPE is a word or a mapping; or name STUDY with --arm. FUNCTION (file.py:function) takes a bf16 matrix
    [rows, k] with blocks along k, and seed=… if it has such a parameter, and returns the matrix dequantised.
    On made-up data of four kinds: gain with its standard error, by operand and by place in the block; the
    relative error; the share of it that is bias; what becomes of ties, clipping, subnormals, NaN, Inf and ±0;
    and of a recipe gain, error and bias of each GEMM's product. Every difference from the definition is
    counted by its cause. That the definition itself is biased is no failure; the table says it.

    --time gives for each linear layer and GEMM the time to quantise both operands and to multiply, TFLOP/s
    and the share of the device's published peak, and the speed over bf16 and over FP8 (one scale a tensor,
    quantising included). Medians, measured in turns. Emulated times are times of the emulation, not of FP4
    hardware.

    Exit code 1 if a check failed, or a quantiser is not what it claims to be.
    """
    run: Callable[..., int]
    if timed:
        what, run = "--time", partial(_time, subject)
    elif subject is None:
        what, run = "this machine", _here
    elif DEVICE.fullmatch(subject):
        what, run = "a device", partial(_device, subject)
    elif ARCHITECTURE.fullmatch(subject):
        what, run = "an architecture", partial(_architecture, subject)
    else:
        what, run = "a quantiser", partial(_quantiser, subject)
    taken = {}
    for option in context.command.params:
        name = option.name or ""
        if name in _TAKES[what]:
            taken[name] = options[name]
        elif name in options and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UserError(f"{option.opts[0]}: not for {what}")
    context.exit(run(as_json=as_json, out=out, **taken))


def _time(
    study: str | None,
    *,
    names: tuple[str, ...],
    tokens: int | None,
    repeats: int,
    device: str | None,
    backend: str | None,
    as_json: bool,
    out: Path | None,
) -> int:
    from ablate.cli import check_times

    if names and study is None:
        raise UserError("--arm: without a study there are no arms")
    if backend is not None:
        known_backend(backend)
    where, _ = chosen_device(device)
    if study is None:
        layers = check_times.layers_of_formats({fmt: _gemm_in(fmt) for fmt in _FORMATS}, tokens, backend)
    else:
        layers = check_times.layers_of_study(study, names, tokens, backend)
    content = check_times.gemm_times(layers, where, repeats)
    if not deliver(content, out, as_json=as_json):
        check_times.show_times(content)
    return 0


def _here(*, details: bool, as_json: bool, out: Path | None) -> int:
    from ablate.backends.testing.suite import quick_self_test

    where, device = chosen_device(None)
    content = _support(device, here=True)
    if not as_json:
        _show_support(content, details=details)
    rows = (row for row in content["backends"] if row["mode"] not in ("no", "reference"))
    content["self_tests"] = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        tests = quick_self_test(name, where)
        failed = [f"{one.check}: {one.detail}" for one in tests if not one.passed]
        content["self_tests"] += [asdict(one) for one in tests]
        if not as_json:
            found = f" FAILED: {'; '.join(failed)}" if failed else f": {len(tests)} checks passed"
            click.echo(safe_text(f"self-test of {name}{found}"))
    deliver(content, out, as_json=as_json)
    return int(not all(one["passed"] for one in content["self_tests"]))


def _device(device: str, *, minutes: float, as_json: bool, out: Path | None) -> int:
    from ablate.check.__main__ import main

    return main(device, minutes, str(out or OUT), as_json=as_json)


def _architecture(arch: str, *, details: bool, as_json: bool, out: Path | None) -> int:
    from ablate.check.__main__ import compiled_for

    content = _support(device_of_arch(arch), here=False)
    if not as_json:
        _show_support(content, details=details)
    compiled, code = compiled_for(arch, (lambda _: None) if as_json else click.echo)
    deliver(content | compiled, out, as_json=as_json)
    return code


def _quantiser(
    subject: str,
    *,
    held_against: str | None,
    names: tuple[str, ...],
    draws: int,
    seed: int,
    device: str | None,
    backend: str | None,
    as_json: bool,
    out: Path | None,
) -> int:
    from ablate.diagnose.claims import claim_of

    if len(names) > 1:
        raise UserError("--arm: one arm is checked at a time (--time takes several)")
    backend = backend or "auto"
    known_backend(backend)
    where, _ = chosen_device(device)
    arm = names[0] if names else None
    claim = claim_of(subject, arm=arm, held_against=held_against, backend=backend, device=where)
    from ablate.cli.check_text import content_of, lines_of
    from ablate.diagnose.certificate import certify, work

    try:
        with click.progressbar(length=work(claim, draws), label="tensors", hidden=as_json) as bar:
            found = certify(claim, draws=draws, seed=seed, done=bar.update)
    except ValueError as error:  # a back end that cannot do this recipe here
        raise UserError(f"{subject}: {error} (another --backend or --device?)") from None
    if not deliver(content_of(found, seed), out, as_json=as_json):
        click.echo(safe_text("\n".join(lines_of(found)), keep="\n"))
    return int(not found.holds)


def _gemm_in(fmt: str) -> GemmPolicy:
    from ablate.recipes import GemmPolicy, OperandPolicy

    operand = OperandPolicy(format=fmt)  # type: ignore[arg-type]
    return GemmPolicy(left=operand, right=operand)


def _support(device: Device, *, here: bool) -> dict[str, Any]:
    """Return what each back end does on a device, one row a format; the three GEMMs are alike."""
    from ablate.backends.select import Selection, load_backend
    from ablate.run.backends import backend_names

    rows = []
    for name in (name for name in backend_names() if name != "auto"):
        for fmt in _FORMATS:
            try:
                support = load_backend(name).support(_gemm_in(fmt), device)
            except ValueError as error:
                mode, detail = "no", str(error)
            else:
                mode, detail = support.mode, support.detail
            rows.append({"backend": name, "format": fmt, "gemm": "all", "mode": mode, "detail": detail})
    where = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": here}
    selection = Selection("auto")
    auto = {fmt: selection.choose(_gemm_in(fmt), device)[0].name for fmt in _FORMATS}
    return {"device": where, "backends": rows, "auto": auto}


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
