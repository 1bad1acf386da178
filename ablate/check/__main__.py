"""``python -m ablate.check``: what ``ablate check DEVICE`` does, without click."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.backends.device import chosen_device, device_of_arch, triton_fault
from ablate.base.errors import UserError, safe_text
from ablate.check import ARCHITECTURE, MINUTES, OUT
from ablate.check.run import prove, setup_of

if TYPE_CHECKING:
    from collections.abc import Callable

DESCRIPTION = (
    "Test this machine's device bit by bit, time it, and leave a record: JSON, and a page in Markdown. "
    "The same command goes on where the time limit ended it. For an architecture that is not here: compile "
    "the kernels and read them back. Exit code 1 if a check failed."
)


def main(device: str | None, minutes: float, out: str, *, as_json: bool) -> int:
    """Test a device (None: the first GPU, else the CPU) and print the findings; return 1 if any failed.

    Raises:
        UserError: a device that cannot be used, no minutes, or a folder that cannot be written to.
    """
    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes: expected a number above 0, got {minutes:g}")
    where, found = chosen_device(device)

    def say(line: str) -> None:
        if not as_json:
            print(safe_text(line), flush=True)

    say(f"{found.name} ({found.arch})")
    try:
        record, path = prove(setup_of(where, found), Path(out), minutes=minutes, say=say)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from None
    if as_json:
        print(json.dumps(asdict(record), indent=1))
    say(f"{record}. Record: {path}, with a page in Markdown. The same command goes on with what was not run.")
    return int(any(part.state == "failed" for part in record.parts))


def compiled_for(arch: str, say: Callable[[str], None]) -> tuple[dict[str, Any], int]:
    """Compile the kernels for an architecture and read them back; return what is found, and the exit code.

    The code is 1 if a kernel is faulty, else 0: also without Triton, where nothing is compiled.

    Raises:
        UserError: an unknown architecture.
    """
    device_of_arch(arch)
    if fault := triton_fault():
        say(f"The kernels are not compiled: {fault}.")
        return {"triton": None, "compiled": []}, 0
    import triton

    from ablate.backends.triton.compiled import every_kernel

    say(f"Kernels compiled by Triton {triton.__version__}:")
    found = []
    for one in every_kernel(arch):
        found.append(one)
        what = "".join(f", {count} × {name}" for name, count in one.instructions.items())
        problems = "; ".join(one.problems) or "ok"
        say(f"{one.kernel} {one.variant}: {problems}{what}, {one.shared_bytes / 1024:.0f} KiB")
    content = {"triton": triton.__version__, "compiled": [asdict(one) for one in found]}
    # A GEMM on Hopper always has problems: there is no FP4 unit.
    return content, int(any(one.problems and (one.kernel, one.target) != ("gemm", "sm_90") for one in found))


def _door() -> int:
    parser = argparse.ArgumentParser(prog="python -m ablate.check", description=DESCRIPTION)
    parser.add_argument("device", nargs="?", help="cpu, cuda, sm_100 …; default: the first GPU, else the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"default: {MINUTES}")
    parser.add_argument("--out", default=OUT, help=f"folder of the record; default: {OUT}")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the record")
    asked = parser.parse_args()
    if not ARCHITECTURE.fullmatch(asked.device or ""):
        return main(**vars(asked))
    content, code = compiled_for(asked.device, (lambda _: None) if asked.as_json else print)
    if asked.as_json:
        print(json.dumps(content, indent=1))
    return code


if __name__ == "__main__":
    try:
        sys.exit(_door())
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.stderr.write(safe_text(str(error), keep="\n") + "\n")
        sys.exit(2)
