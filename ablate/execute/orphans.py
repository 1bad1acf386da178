"""Processes that a worker's runs have started end with the worker, however it dies.

A small process waits for the worker's end and kills them. It knows them by a mark that they inherit: a
variable of the environment or, in a fork that runs no program of its own, an open pipe. It finds the mark in
``/proc``. Without that, or without a way to wait for another process (macOS, Linux before 5.3), nothing is
done.
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


def end_with_this_process() -> None:
    """Make sure that every process that this one starts from now on is killed when this one ends."""
    if hasattr(os, "pidfd_open"):
        _watch(os.getpid())


@functools.cache
def _watch(pid: int) -> None:
    """Start the process that waits for this one's end, once; a fork of this one has another ``pid``."""
    theirs, _ours = os.pipe()  # never written to; our end stays open, here and in every fork
    mark = secrets.token_hex(16)
    # -S: the standard library is enough. -I: this folder's queue.py must not hide the standard library's.
    command = [sys.executable, "-I", "-S", __file__, str(pid), mark]
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdin=theirs, stdout=quiet, stderr=quiet, start_new_session=True, check=False)
    os.close(theirs)
    os.environ[_VARIABLE] = mark


def _wait(pid: int, mark: str) -> None:
    """Wait for the end of process ``pid``, then kill every process that has the mark."""
    worker = os.pidfd_open(pid)
    if os.fork():  # Ray kills the direct children of a worker that ends by itself
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    select.select([worker], [], [])
    pipe = Path("/proc/self/fd/0").readlink()
    for _ in range(_LOOKS):  # a process that is started during one look is found at the next
        for one in marked(_VARIABLE, mark, pipe):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(one, signal.SIGKILL)
        time.sleep(_PAUSE_SEC)


def marked(variable: str, value: str, pipe: Path | None = None) -> list[int]:
    """Find the processes that inherited a variable of this value, or hold ``pipe`` open; not this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if f"{variable}={value}".encode() in variables or (
                pipe is not None and any(one.readlink() == pipe for one in (folder / "fd").iterdir())
            ):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    _wait(int(sys.argv[1]), sys.argv[2])
