"""``ablate check``: the back ends of this machine, a device, a quantiser, and the time of training steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import (
    NO_COMPILER,
    chosen_device,
    cpp_compiler,
    device_of_arch,
)
from ablate.base.errors import UserError, likely
from ablate.check import MINUTES, OUT
from ablate.cli.check_quantiser import arm, function, recipe
from ablate.cli.check_steps import steps
from ablate.cli.common import PATH, deliver, flag, format_table, json_option, out_option
from ablate.run import backend_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.backends.device import Device

_FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


class _CheckGroup(click.Group):
    """A group that says which words it takes."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and not cmd_name.startswith("-"):
            words = f"expected one of {', '.join(self.commands)}; a GPU: ablate check device cuda"
            hint = likely(cmd_name, self.commands, words)
            raise UserError(f"check: no command '{cmd_name}' ({hint})")
        return command


@click.group(
    "check",
    cls=_CheckGroup,
    epilog="\b\nExamples:\n"
    "  ablate check backends\n"
    "  ablate check device cuda\n"
    "  ablate check recipe tseng\n"
    "  ablate check steps quickstart",
)
def command() -> None:
    """Check the back ends of this machine, a device, a quantiser, or the time of training steps.

    Exit code 1 if a check failed, or if a quantiser is not what it claims to be.
    """


@command.command(
    "backends",
    short_help="Show which back end supports which format, and test each.",
    epilog="\b\nExamples:\n"
    "  ablate check backends --details\n"
    "  ablate check backends gfx950      what an MI355X would do",
)
@click.argument("architecture", required=False, metavar="[ARCHITECTURE]")
@flag(
    "--details",
    help="Say how, or why not, for every back end and format.",
)
@json_option
@out_option
def backends(
    architecture: str | None, *, details: bool, as_json: bool, out: Path | None
) -> int:
    """Show which back end supports which format here, and run the short self-test of each.

    native: the device has an instruction for the format. upcast: packed codes are widened to bf16 before they
    are multiplied. emulated: a bf16 GEMM multiplies dequantised values, exact but for how products are added.
    no: the back end cannot do it. A format means both operands of a GEMM; all three GEMMs are alike unless a
    note says so.

    ARCHITECTURE names hardware that is not here, such as sm_100 or gfx950: the table shows what the back ends
    would do there with the packages installed here, and the kernels are compiled for it and read back.
    """
    from ablate.backends.select import Selection
    from ablate.backends.testing.suite import both
    from ablate.recipes import OperandPolicy

    if architecture is None:
        torch_device, device = chosen_device(None)
    else:
        device = device_of_arch(architecture)
    say: Callable[[str], None] = (lambda _: None) if as_json else click.echo
    elsewhere = ", not here: as its support is known" if architecture else ""
    say(f"{device.name} ({device.arch}){elsewhere}\n")
    gemms: dict[str, Any] = {
        name: both(OperandPolicy(format=name))  # type: ignore[arg-type]
        for name in _FORMATS
    }
    auto = {
        fmt: Selection("auto").choose(gemm, device)[0].name
        for fmt, gemm in gemms.items()
    }
    support = _support(gemms, device)
    modes: dict[str, dict[str, str]] = {}
    for row in support:
        modes.setdefault(row["backend"], {})[row["format"]] = row["mode"]
    table = [
        (fmt, chosen, *(by_format[fmt] for by_format in modes.values()))
        for fmt, chosen in auto.items()
    ]
    say(format_table(("format", "auto", *modes), table) + "\n")
    if details:
        for row in support:
            say("{backend:<13} {format:<11} {mode}: {detail}".format(**row))
        say("")
    else:
        say("--details says how, and why not.\n")
    if architecture is None:
        usable = [
            name
            for name, by_format in modes.items()
            if {*by_format.values()} - {"no", "reference"}
        ]
        tests = _self_tests(usable, torch_device, say)
        findings: dict[str, Any] = {"self_tests": tests}
        failed = not all(test["passed"] for test in tests)
    else:
        from ablate.check.__main__ import compiled_for

        findings, failed = compiled_for(architecture, say)
    about = {
        "kind": device.kind,
        "arch": device.arch,
        "name": device.name,
        "here": architecture is None,
    }
    content = {"device": about, "backends": support, "auto": auto, **findings}
    deliver(content, (), as_json=as_json, out=out)
    return int(failed)


def _support(gemms: dict[str, Any], device: Device) -> list[dict[str, Any]]:
    """Return a row for each back end and format: how the back end does it on the device, or why not."""
    from ablate.backends.protocol import Support
    from ablate.backends.select import load_backend

    rows = []
    for name in backend_names():
        if name == "auto":
            continue
        for fmt, gemm in gemms.items():
            try:
                support = load_backend(name).support(gemm, device)
            except ValueError as error:
                support = Support(mode="no", detail=str(error))
            rows.append(
                {"backend": name, "format": fmt, "gemm": "all", **asdict(support)}
            )
    return rows


def _self_tests(
    names: list[str], torch_device: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    from ablate.backends.select import quick_self_test

    tests: list[dict[str, Any]] = []
    for name in names:
        results = quick_self_test(name, torch_device)
        failures = [
            f"{test['check']}: {test['detail']}"
            for test in results
            if not test["passed"]
        ]
        if failures:
            say(f"self-test of {name}: FAILED: {'; '.join(failures)}")
        else:
            say(f"self-test of {name}: {len(results)} checks passed")
        tests += results
    if torch_device == "cpu" and cpp_compiler() is None:
        say(NO_COMPILER)
    return tests


@command.command(
    "device",
    short_help="Test a device bit by bit, and time it.",
    epilog="\b\nExamples:\n"
    "  ablate check device cuda                the GPU, in ten minutes\n"
    "  ablate check device cpu --minutes 3     what fits; the same command continues\n"
    "  python -m ablate.check cuda             the same without click",
)
@click.argument("device", required=False, metavar="[DEVICE]")
@click.option(
    "--minutes",
    type=float,
    default=MINUTES,
    help="Start no further check after this many minutes.",
)
@json_option
@click.option("--out", type=PATH, default=OUT, help="Folder of the record.")
def device(device: str | None, *, minutes: float, as_json: bool, out: Path) -> int:
    """Test DEVICE (cpu or cuda; default: the first GPU, else the CPU) bit by bit, and time it.

    Quantised bits are compared with plain torch on the CPU, and products with exact ones. The exact probe
    finds an accumulator that is narrower than fp32. Then follow a short training run beside emulation, rates
    of GEMMs and times of training steps. --out holds the record (JSON), a page (Markdown) and the tensors
    that show a failure. The same command run again continues with what did not fit the time.
    """
    from ablate.check.__main__ import main

    return main(device, minutes, str(out), as_json=as_json)


for _subcommand in (recipe, arm, function, steps):
    command.add_command(_subcommand)
