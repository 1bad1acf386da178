"""``ablate check``: what a machine does; whether a device or a quantiser is right, how it errs, how fast."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ablate.backends.device import chosen_device, device_of_arch
from ablate.base.errors import UserError, safe_text
from ablate.check import ARCHITECTURE, DEVICE, MINUTES, OUT
from ablate.cli.check_times import FORMATS
from ablate.cli.common import AT_LEAST_1, Place, device_option, json_option, known_backend
from ablate.cli.output import deliver, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.device import Device

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
    page (Markdown) lie in --out, with the tensors that show a failure. What did not fit the time is
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
    what = "a quantiser"
    if timed:
        what = "--time"
    elif subject is None:
        what = "this machine"
    elif DEVICE.fullmatch(subject):
        what = "a device"
    elif ARCHITECTURE.fullmatch(subject):
        what = "an architecture"
    run, takes = _CHECKS[what]
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE
        if given and option.name in options and option.name not in takes:
            raise UserError(f"{option.opts[0]}: not for {what}")
    taken = {name: options[name] for name in takes}
    context.exit(run(subject or "", out, as_json=as_json, **taken))


def _time(study: str, out: Path | None, *, as_json: bool, device: str | None, **options: Any) -> int:
    from ablate.cli.check_times import gemm_times, show_times

    if options["names"] and not study:
        raise UserError("--arm: without a study there are no arms")
    if options["backend"] is not None:
        known_backend(options["backend"])
    content = gemm_times(study or None, chosen_device(device)[0], **options)
    if not deliver(content, out, as_json=as_json):
        show_times(content)
    return 0


def _here(_: str, out: Path | None, *, as_json: bool, details: bool) -> int:
    from ablate.backends.preflight import quick_self_test

    where, device = chosen_device(None)
    content = _support(device, shown=not as_json, details=details)
    rows = (row for row in content["backends"] if row["mode"] not in ("no", "reference"))
    content["self_tests"] = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        if not as_json:
            click.echo(f"self-test of {name}: ", nl=False)  # on a GPU kernels are compiled now
        tests = quick_self_test(name, where)
        content["self_tests"] += [asdict(one) for one in tests]
        failed = [f"{one.check}: {one.detail}" for one in tests if not one.passed]
        if not as_json:
            click.echo(safe_text(f"FAILED: {'; '.join(failed)}" if failed else f"{len(tests)} checks passed"))
    deliver(content, out, as_json=as_json)
    return int(not all(one["passed"] for one in content["self_tests"]))


def _device(device: str, out: Path | None, *, as_json: bool, minutes: float) -> int:
    from ablate.check.__main__ import main

    return main(device, minutes, str(out or OUT), as_json=as_json)


def _architecture(arch: str, out: Path | None, *, as_json: bool, details: bool) -> int:
    from ablate.check.__main__ import compiled_for

    content = _support(device_of_arch(arch), shown=not as_json, details=details, here=False)
    compiled, code = compiled_for(arch, (lambda _: None) if as_json else click.echo)
    deliver(content | compiled, out, as_json=as_json)
    return code


def _quantiser(
    subject: str,
    out: Path | None,
    *,
    as_json: bool,
    device: str | None,
    draws: int,
    seed: int,
    **claimed: Any,
) -> int:
    from ablate.check.claims import claim_of

    names, backend = claimed.pop("names"), claimed.pop("backend") or "auto"
    if len(names) > 1:
        raise UserError("--arm: one arm is checked at a time (--time takes several)")
    known_backend(backend)
    where, _ = chosen_device(device)
    claim = claim_of(subject, arm=names[0] if names else None, backend=backend, device=where, **claimed)
    from ablate.check.certificate import certify, work
    from ablate.cli.check_text import content_of, lines_of

    try:
        with click.progressbar(length=work(claim, draws), label="tensors", hidden=as_json) as bar:
            found = certify(claim, draws=draws, seed=seed, done=bar.update)
    except ValueError as error:  # a back end that cannot do this recipe here
        raise UserError(f"{subject}: {error} (another --backend or --device?)") from None
    if not deliver(content_of(found, seed), out, as_json=as_json):
        click.echo(safe_text("\n".join(lines_of(found)), keep="\n"))
    return int(not found.holds)


def _support(device: Device, *, shown: bool, details: bool, here: bool = True) -> dict[str, Any]:
    """Return, and show, what each back end does on a device, one row a format; the three GEMMs are alike."""
    from ablate.backends.protocol import Support
    from ablate.backends.select import Selection, load_backend
    from ablate.backends.testing.suite import both
    from ablate.recipes import OperandPolicy
    from ablate.run.backends import backend_names

    gemms = {fmt: both(OperandPolicy(format=fmt)) for fmt in FORMATS}  # type: ignore[arg-type]
    rows, table = [], [[fmt, Selection("auto").choose(gemm, device)[0].name] for fmt, gemm in gemms.items()]
    names = [name for name in backend_names() if name != "auto"]
    for name in names:
        for (fmt, gemm), line in zip(gemms.items(), table, strict=True):
            try:
                support = load_backend(name).support(gemm, device)
            except ValueError as error:
                support = Support(mode="no", detail=str(error))
            rows.append({"backend": name, "format": fmt, "gemm": "all", **asdict(support)})
            line.append(support.mode)
    if shown:
        elsewhere = "" if here else ", not here: as its support is known"
        click.echo(f"{device.name} ({device.arch}){elsewhere}\n")
        click.echo(format_table(("format", "auto", *names), table, width=terminal_width()))
        how = ["{backend:<13} {format:<11} {mode}: {detail}".format(**row) for row in rows if details]
        click.echo("\n".join(["", *(how or ["--details says how, and why not."]), ""]))
    where = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": here}
    return {"device": where, "backends": rows, "auto": {fmt: auto for fmt, auto, *_ in table}}


_CHECKS: dict[str, tuple[Callable[..., int], set[str]]] = {
    "this machine": (_here, {"details"}),
    "a device": (_device, {"minutes"}),
    "an architecture": (_architecture, {"details"}),
    "--time": (_time, {"names", "tokens", "repeats", "device", "backend"}),
    "a quantiser": (_quantiser, {"held_against", "names", "draws", "seed", "device", "backend"}),
}
"""How each thing is checked, and with which options beside --json and --out."""
