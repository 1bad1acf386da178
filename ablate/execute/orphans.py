"""What a worker's runs have started ends with the worker, however that dies: a small process waits for it.

What they have started inherits a mark: a variable of the environment or, in a fork that runs no program of
its own, an open pipe. The mark is found in ``/proc``; without that, or without a way to wait for another
process (macOS, Linux before 5.3), nothing is done.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_VARIABLE = "ABLATE_WORKER"
_LOOKS = 5
_PAUSE_SEC = 0.5


@functools.cache
def end_with_this_process() -> None:
    """Let every process that this one starts from now on be killed when it ends."""
    if not hasattr(os, "pidfd_open"):
        return
    theirs, _ours = os.pipe()  # never written to: our end stays open, and in whatever is forked
    mark = secrets.token_hex(16)
    # Only the standard library is needed, and none of this folder's names.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdin=theirs, stdout=quiet, stderr=quiet, start_new_session=True, check=False)
    os.close(theirs)
    os.environ[_VARIABLE] = mark


def _wait(pid: int, mark: str) -> None:
    """Wait for the end of a process, then kill what bears its mark."""
    worker = os.pidfd_open(pid)
    if os.fork():  # Ray kills the direct children of a worker that ends by itself
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    select.select([worker], [], [])
    pipe = Path("/proc/self/fd/0").readlink()
    for _ in range(_LOOKS):  # what is being started while one looks is seen at the next
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"{_VARIABLE}={mark}".encode() in variables or any(
                    descriptor.readlink() == pipe for descriptor in (folder / "fd").iterdir()
                ):
                    os.kill(int(folder.name), signal.SIGKILL)
        time.sleep(_PAUSE_SEC)


if __name__ == "__main__":
    _wait(int(sys.argv[1]), sys.argv[2])
