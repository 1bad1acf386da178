"""What both doors do, ``ablate prove`` and ``python -m ablate.prove``: choose the device, run, print."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError, safe_text
from ablate.prove.page import in_words
from ablate.prove.run import RestartError, prove
from ablate.prove.task import setup_of


def main(device: str | None, minutes: float, out: str, *, as_json: bool) -> int:
    """Test a device, print what is found, and return the exit code.

    Raises:
        UserError: a device that cannot be used, no minutes, or a folder that cannot be written to.
    """
    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes: expected a number above 0, got {minutes:g}")
    started = time.monotonic()
    where, found = chosen_device(device)

    def say(line: str) -> None:
        if not as_json:
            print(safe_text(line), flush=True)

    say(f"{found.name} ({found.arch})")
    try:
        record, path = prove(setup_of(where, found), Path(out), minutes=minutes, say=say)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from None
    except RestartError as error:
        left = minutes - (time.monotonic() - started) / 60
        say(f"The device is lost to this process ({error}); a new one goes on.")
        options = ["--device", where, "--minutes", str(max(left, 1e-3)), "--out", out, *["--json"] * as_json]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "ablate.prove", *options])  # noqa: S606  this program
    if as_json:
        print(json.dumps(asdict(record), indent=1))
    say(f"{in_words(record)}. Record: {path}, page: {path.with_suffix('.md').name}")
    if "not run" in record.states():
        say("The same command goes on with what was not run.")
    return int(bool(record.failed))
