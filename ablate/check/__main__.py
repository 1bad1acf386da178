"""``python -m ablate.check``: ``ablate check device`` without click, and kernels for other hardware."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.backends.device import chosen_device, device_of_arch, triton_fault
from ablate.base.errors import UserError, safe_text
from ablate.check import MINUTES, OUT
from ablate.check.run import prove, setup_of

if TYPE_CHECKING:
    from collections.abc import Callable

DESCRIPTION = (
    "Test this machine's device bit by bit, time it, and leave a record: JSON, and a page in Markdown. "
    "The same command run again continues where the time limit ended it. For an architecture that is not "
    "here: compile the kernels and read them back. Exit code 1 if a check failed."
)


def main(device: str | None, minutes: float, out: str, *, as_json: bool) -> int:
    """Test a device (None: the first GPU, else the CPU) and print the findings; return 1 if any failed.

    Raises:
        UserError: a device that cannot be used, no minutes, or a folder that cannot be written to.
    """
    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes: expected a number above 0, got {minutes:g}")
    torch_device, described = chosen_device(device)

    def say(line: str) -> None:
        if not as_json:
            print(safe_text(line), flush=True)

    say(f"{described.name} ({described.arch})")
    try:
        record, path = prove(
            setup_of(torch_device, described), Path(out), minutes=minutes, say=say
        )
    except OSError as error:
        raise UserError(
            f"--out: cannot write {out}: {error.strerror or error}"
        ) from None
    if as_json:
        print(json.dumps(asdict(record), indent=1))
    say(
        f"{record}. Record: {path}, with a page in Markdown. The same command run again continues with what "
        "was not run."
    )
    return int(any(part.state == "failed" for part in record.parts))


def compiled_for(arch: str, say: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """Compile the kernels for an architecture and read them back; return the findings, and if one is faulty.

    Without Triton nothing is compiled, and nothing is faulty.

    Raises:
        UserError: an unknown architecture.
    """
    device_of_arch(arch)
    if fault := triton_fault():
        say(f"The kernels are not compiled: {fault}.")
        return {"triton": None, "compiled": []}, False
    import triton

    from ablate.backends.triton.compiled import every_kernel

    say(f"Kernels compiled by Triton {triton.__version__}:")
    kernels = []
    is_faulty = False
    for kernel in every_kernel(arch):
        kernels.append(asdict(kernel))
        problems = "; ".join(kernel.problems) or "ok"
        instructions = "".join(
            f", {count} × {name}" for name, count in kernel.instructions.items()
        )
        size = kernel.shared_bytes / 1024
        say(
            f"{kernel.kernel} {kernel.variant}: {problems}{instructions}, {size:.0f} KiB"
        )
        # A GEMM on Hopper always has problems: there is no FP4 unit.
        is_expected = kernel.kernel == "gemm" and kernel.target == "sm_90"
        is_faulty |= bool(kernel.problems) and not is_expected
    return {"triton": triton.__version__, "compiled": kernels}, is_faulty


def _run_command_line() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ablate.check", description=DESCRIPTION
    )
    parser.add_argument(
        "device",
        nargs="?",
        help="cpu, cuda, sm_100 …; default: the first GPU, else the CPU",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"start no further check after this many minutes; default: {MINUTES}",
    )
    parser.add_argument(
        "--out", default=OUT, help=f"folder of the record; default: {OUT}"
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print the record"
    )
    options = parser.parse_args()
    if options.device is None or not options.device.startswith(("sm_", "gfx")):
        return main(**vars(options))
    content, is_faulty = compiled_for(
        options.device, (lambda _: None) if options.as_json else print
    )
    if options.as_json:
        print(json.dumps(content, indent=1))
    return int(is_faulty)


if __name__ == "__main__":
    try:
        sys.exit(_run_command_line())
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.stderr.write(safe_text(str(error), keep="\n") + "\n")
        sys.exit(2)
