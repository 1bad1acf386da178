"""``ablate check``: what a machine does; whether a device or a quantiser is right, how it errs, how fast."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import NO_COMPILER, chosen_device, cpp_compiler, device_of_arch
from ablate.base.errors import UserError
from ablate.check import ARCHITECTURE, DEVICE, MINUTES, OUT
from ablate.cli.common import (
    AT_LEAST_1,
    PATH,
    deliver,
    device_option,
    format_table,
    json_option,
    refuse_other_options,
    storage_option,
    table_of,
)
from ablate.run import backend_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.check.certificate import Claim, OperandCertificate
    from ablate.store.records import SpeedRecord

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_WARMUP_STEPS = 3

_EXAMPLES = """\b
Examples:
  ablate check                      what this machine does, and its self-test
  ablate check cuda                 prove and time the GPU in ten minutes
  ablate check cpu --minutes 3      what fits in; the same command goes on
  ablate check gfx950               what an MI355X would do
  ablate check quickstart --steps 10               time training steps of its arms
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
@click.option("--steps", type=AT_LEAST_1, help="Time so many training steps of STUDY's arms, for its report.")
@click.option(
    "--arm", "names", metavar="NAME", multiple=True, help="Of STUDY only this arm; with --steps several."
)
@click.option(
    "--repeats", type=AT_LEAST_1, default=3, show_default=True, help="Time --steps so often in each turn."
)
@click.option("--as", "held_against", metavar="RECIPE[:OPERAND]", help="What a function claims to be.")
@click.option(
    "--draws", type=click.IntRange(min=8), default=64, show_default=True, help="Tensors of each kind of data."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of data and draws.")
@device_option
@storage_option
@click.option("--backend", default="auto", show_default=True, help="The back end that quantises.")
@json_option
@click.option(
    "--out",
    type=PATH,
    help=f"Folder of DEVICE's record (default: {OUT}); else a file for the object.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    subject: str | None,
    *,
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
    The exact probe finds an accumulator that is narrower than fp32. Then come a short training run beside
    emulation, rates of GEMMs and times of training steps. Record (JSON) and page (Markdown) lie in --out,
    with the tensors that show a failure. What did not fit the time is run by the same command once more. Of
    hardware that is not here, such as sm_100 or gfx950: what the back ends would do on it with the packages
    installed here; the kernels are compiled for it and read back.

    RECIPE is a word or a mapping; or name STUDY with --arm. FUNCTION (file.py:function) takes a bf16 matrix
    [rows, k] with blocks along k, and seed=… if it has such a parameter, and returns the matrix dequantised.
    On made-up data of four kinds: gain with its standard error, by operand and by place in the block; the
    relative error; the share of it that is bias. On these data and on ties, clipping, subnormals, NaN, Inf
    and ±0 every difference from the definition is counted by its cause. That the definition itself is biased
    is no failure; the table says it. For a recipe's products see `ablate diagnose`.

    --steps times whole training steps (forward, backward, clipping and optimizer on made-up tokens) of every
    arm of STUDY there and back, and keeps what it measured in the study's folder of the storage, in place of
    what was there; `ablate report` makes the end-to-end speed-up of it. Nothing else should use the device.
    Emulated times are times of the emulation, not of FP4 hardware.

    Exit code 1 if a check failed, or a quantiser is not what it claims to be.
    """
    kinds = {
        "--steps": options["steps"],
        "this machine": subject is None,
        "a device": DEVICE.fullmatch(subject or ""),
        "an architecture": ARCHITECTURE.fullmatch(subject or ""),
        "a quantiser": True,
    }
    what = next(kind for kind, holds in kinds.items() if holds)
    if what == "--steps" and subject is None:
        raise UserError("--steps: expected a study whose arms are timed")
    run, takes = _CHECKS[what]
    refuse_other_options(context, {*takes, "as_json", "out"}, what)
    context.exit(run(subject or "", out, as_json=as_json, **{name: options[name] for name in takes}))


def _machine(arch: str, out: Path | None, *, as_json: bool, details: bool) -> int:
    """Show what back ends do on this machine and test them; or, with the kernels compiled, on ``arch``."""
    from ablate.backends.protocol import Support
    from ablate.backends.select import Selection, load_backend, quick_self_test
    from ablate.backends.testing.suite import both
    from ablate.recipes import OperandPolicy

    where, device = ("", device_of_arch(arch)) if arch else chosen_device(None)
    gemms = {fmt: both(OperandPolicy(format=fmt)) for fmt in _FORMATS}  # type: ignore[arg-type]
    say: Callable[[str], None] = (lambda _: None) if as_json else click.echo
    auto = {fmt: Selection("auto").choose(gemm, device)[0].name for fmt, gemm in gemms.items()}
    modes: dict[str, dict[str, str]] = {}
    rows = []
    for name in backend_names():
        for fmt, gemm in gemms.items() if name != "auto" else ():
            try:
                support = load_backend(name).support(gemm, device)
            except ValueError as error:
                support = Support(mode="no", detail=str(error))
            rows.append({"backend": name, "format": fmt, "gemm": "all", **asdict(support)})
            modes.setdefault(name, {})[fmt] = support.mode
    say(f"{device.name} ({device.arch}){', not here: as its support is known' * bool(arch)}\n")
    table = [(fmt, name, *(mode[fmt] for mode in modes.values())) for fmt, name in auto.items()]
    say(format_table(("format", "auto", *modes), table) + "\n")
    shown = "\n".join("{backend:<13} {format:<11} {mode}: {detail}".format(**row) for row in rows)
    say(f"{shown if details else '--details says how, and why not.'}\n")
    if arch:
        from ablate.check.__main__ import compiled_for

        found, code = compiled_for(arch, say)
    else:
        used = (name for name, mode in modes.items() if {*mode.values()} - {"no", "reference"})
        tests: list[dict[str, Any]] = []
        for name in used:
            own = quick_self_test(name, where)
            failed = [f"{test['check']}: {test['detail']}" for test in own if not test["passed"]]
            said = f"FAILED: {'; '.join(failed)}" if failed else f"{len(own)} checks passed"
            say(f"self-test of {name}: {said}")
            tests += own
        if where == "cpu" and cpp_compiler() is None:
            say(NO_COMPILER)
        found, code = {"self_tests": tests}, int(not all(test["passed"] for test in tests))
    about = {"kind": device.kind, "arch": device.arch, "name": device.name, "here": not arch}
    deliver({"device": about, "backends": rows, "auto": auto, **found}, (), as_json=as_json, out=out)
    return code


def _device(device: str, out: Path | None, **options: Any) -> int:
    from ablate.check.__main__ import main

    return main(device, out=str(out or OUT), **options)


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
    from ablate.backends.testing.inputs import KINDS
    from ablate.check.certificate import certify, claim_of

    names, backend = claimed.pop("names"), claimed.pop("backend")
    if backend not in backend_names():
        raise UserError(f"--backend: no back end '{backend}' (expected {', '.join(backend_names())})")
    if len(names) > 1:
        raise UserError("--arm: one arm is checked at a time (--steps takes several)")
    where, _ = chosen_device(device)
    claim = claim_of(subject, arm=names[0] if names else None, backend=backend, device=where, **claimed)
    try:
        length = len(KINDS) * len(claim.operands) * draws
        with click.progressbar(length=length, label="tensors", hidden=as_json) as bar:
            found = tuple(
                certify(claim, one, draws=draws, seed=seed, done=bar.update) for one in claim.operands
            )
    except ValueError as error:  # a back end that cannot do this recipe here
        raise UserError(f"{subject}: {error} (another --backend or --device?)") from None
    holds, operands = all(one.holds for one in found), []
    for own, one in zip(map(asdict, found), found, strict=True):
        operand = own.pop("operand")
        operands.append({"operands": operand["names"], "policy": operand["policy"], "holds": one.holds} | own)
    content = {
        "format": 1, "subject": claim.name, "backend": claim.backend, "device": claim.device,
        "draws": draws, "seed": seed, "holds": holds, "notes": claim.notes, "operands": operands,
    }  # fmt: skip
    deliver(content, _certificate_lines(claim, draws, found), as_json=as_json, out=out)
    return int(not holds)


def _certificate_lines(claim: Claim, draws: int, found: tuple[OperandCertificate, ...]) -> Iterator[str]:
    from ablate.check.certificate import SIDE
    from ablate.check.differences import HARMLESS
    from ablate.check.figures import BOUND

    yield (
        f"{claim.name}: {draws} tensors {SIDE}×{SIDE} in bf16 of each kind. ± is a standard "
        f"error; what lies within {BOUND:.0f} of them counts as equal."
    )
    yield from claim.notes
    rows: list[dict[str, Any]] = []
    causes, more = [], []
    for one in found:
        name, gaussian = ", ".join(one.operand.names), one.figures["Gaussian"]
        for of, figures in (("", one.figures), (", definition", one.definition)):
            for kind, own in figures.items():
                rows.append({"name": name, "kind": kind + of, "of": own, "off": own.gain.off(1.0)})
        causes += [{"name": name, "one": each} for each in one.differences]
        if (bias := gaussian.scale_bias.value) is not None:
            dead, noise = gaussian.dead_zone.value, gaussian.grid_noise.value
            split = f"scale bias {bias:.1%}, dead zone {dead:.1%}, grid noise {noise:.1%}"
            more.append(f"{name}: of the error's energy {split}")
        if gaussian.pattern:
            shown = " ".join(f"{gain:.4f}" for gain in gaussian.pattern)
            more.append(f"{name}: gain by place in the block, repeating: {shown}")
        if gaussian.largest_alike is not None:
            neighbours, by = gaussian.largest_alike
            correlates = f"correlates by {by.value:.4f} ± {by.error:.4f}"
            more.append(f"{name}: the noise of elements {neighbours} {correlates}")
        if one.disagreements:
            more.append(f"{name}: not the definition's figures: {'; '.join(one.disagreements)}")
    yield "\n" + table_of(_FIGURES, rows)
    yield (
        "Gain: the slope on the exact value; ± from 1: standard errors from 1. Error: relative. Bias: the "
        "share of the error's energy that two draws have in common."
    )
    yield from more
    compared = sum(one.compared for one in found)
    yield f"\nCauses of differences from the definition in {compared:,} values: {len(causes)}"
    if causes:
        yield table_of(_CAUSES, causes)
        yield f"{' and '.join(HARMLESS).capitalize()} do not count."
    yield f"{claim.name} is {'' if all(one.holds for one in found) else 'NOT '}what it claims to be."


_FIGURES = {
    "operand": "{name}", "data": "{kind}", "gain": "{of.gain.value:.5f} ± {of.gain.error:.5f}",
    "± from 1": "{off:+.1f}", "error": "{of.relative_error.value:.2%}",
    "bias": "{of.bias_share.value:.2%} ± {of.bias_share.error:.2%}", "unbiased": "{of.unbiased}",
}  # fmt: skip
_CAUSES = {
    "operand": "{name}", "cause": "{one.cause}", "values": "{one.count:,}", "first in": "{one.data}",
    "at": "{one.row}, {one.column}", "exact": "{one.exact:.6g}", "definition": "{one.expected:.6g}",
    "found": "{one.found:.6g}",
}  # fmt: skip


def _time_steps(
    study: str, out: Path | None, *, as_json: bool, storage: Path, names: tuple[str, ...], steps: int,
    repeats: int, device: str | None,
) -> int:  # fmt: skip
    """Time whole training steps of a study's arms; keep the record for its report; return the exit code."""
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
            raise UserError(f"--arm: no arm '{name}' in study '{plan.study}' (arms: {', '.join(known)})")
    arms = [arm for arm in plan.arms if not names or arm.name in names]
    where, _ = chosen_device(device)
    from ablate.execute.throughput import measure

    settings = SpeedSettings(steps=steps, warmup=_WARMUP_STEPS, repeats=repeats)
    with click.progressbar(length=2 * len(arms), label="arms, two turns", hidden=as_json) as bar:
        measured = measure(
            plan.study, arms, plan.baseline, where, settings=settings, done=lambda _: bar.update(1)
        )
    deliver(asdict(measured), _step_lines(measured), as_json=as_json, out=out)
    # Arms of an earlier record are dropped: turns cancel drift only within one measurement.
    said = f"Kept for the report in {store.throughput_path}, in place of what was measured before"
    if plan.baseline not in [one.arm for one in measured.arms]:
        said = f"Not kept for the report, which needs the baseline timed, too: --arm '{plan.baseline}'"
    else:
        store.refuse_unsafe()
        try:
            write_record(store.throughput_path, asdict(measured))
        except OSError as error:
            raise UserError(f"cannot write {store.throughput_path}: {error.strerror or error}") from None
    click.echo(f"\n{said}", err=as_json)
    return 0


def _step_lines(measured: SpeedRecord) -> Iterator[str]:
    device, settings = measured.device, measured.settings
    yield f"{device.name} ({device.arch}), medians of {2 * settings.repeats} × {settings.steps} steps\n"
    rows = [
        vars(one)
        | {"timing": one.why_not or "native", "peak": one.peak_memory_bytes and one.peak_memory_bytes / 1e9}
        for one in measured.arms
    ]
    yield table_of(_STEPS, rows)
    if measured.other_work:
        yield f"\nPerhaps not alone on the device: {measured.other_work}. Compare with care."


_STEPS = {
    "arm": "{arm}", "tokens/s": "{median:,.0f}", "spread": "{spread:.1%}",
    "× baseline": "{over_baseline:.2f}", "peak GB": "{peak:.2f}", "timing": "{timing}",
}  # fmt: skip


_CHECKS: dict[str, tuple[Callable[..., int], set[str]]] = {
    "this machine": (_machine, {"details"}),
    "a device": (_device, {"minutes"}),
    "an architecture": (_machine, {"details"}),
    "--steps": (_time_steps, {"steps", "names", "repeats", "device", "storage"}),
    "a quantiser": (_quantiser, {"held_against", "names", "draws", "seed", "device", "backend"}),
}
"""How each kind of subject is checked, and which options it takes beside --json and --out."""
