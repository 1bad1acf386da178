"""Processes that a worker's runs have started end with the worker, however it dies; a worker that hangs ends.

A small process waits for the worker's end and kills them. It knows them by a mark that they inherit: a
variable of the environment or, in a fork that runs no program of its own, an open pipe. It finds the mark in
``/proc``. Without that, or without a way to wait for another process (macOS, Linux before 5.3), nothing is
done. A process that clears its environment and closes what it has inherited is not found.

The same process counts the seconds without progress (``end_after``), because it can while a call keeps
Python's lock. It counts only those in which both processes ran: either may be stopped for hours.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

_VARIABLE = "ABLATE_WORKER"
_LOOKS = 5
_PAUSE_SEC = 0.5
_STACKS_SEC = 2.0
_HAS_WATCH = hasattr(os, "pidfd_open")


def end_with_this_process() -> None:
    """Make sure that every process that this one starts from now on is killed when this one ends."""
    if _HAS_WATCH:
        _watch(os.getpid())


def end_after(sec: float, log: TextIO) -> None:
    """Kill this process, with its stacks in ``log``, if this is not called again within so many seconds.

    Seconds in which the process was stopped do not count. Infinite: not at all.
    """
    if _HAS_WATCH:
        # it ends the process afterwards
        faulthandler.register(signal.SIGUSR2, log, chain=True)
        os.write(_watch(os.getpid()), f"{sec} {log.name}\n".encode())
    if sec == math.inf:
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.cancel_dump_traceback_later()
    elif not _HAS_WATCH:
        faulthandler.dump_traceback_later(sec, exit=True, file=log)


@functools.cache
def _watch(pid: int) -> int:
    """Start the process that waits for this one's end, once; a fork of this one has another ``pid``."""
    mark = secrets.token_hex(16)
    pipe = start_watch(pid, _VARIABLE, mark)
    os.environ[_VARIABLE] = mark
    return pipe


def start_watch(pid: int, variable: str, mark: str, *folders: Path) -> int:
    """Start a process that waits for the end of ``pid``, kills what has the mark, and removes the folders.

    Returns the pipe by which it is told what ``end_after`` says.
    """
    read_end, write_end = os.pipe()  # the write end stays open, here and in every fork
    # -S: the standard library is enough. -I: this folder's queue.py must not hide the standard library's.
    command = [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(pid),
        variable,
        mark,
        *map(str, folders),
    ]
    quiet = subprocess.DEVNULL
    subprocess.run(
        command,
        stdin=read_end,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
        check=False,
    )
    os.close(read_end)
    return write_end


def _wait(pid: int, variable: str, mark: str, *folders: str) -> None:
    """Wait for the end of process ``pid``, then kill every process that has the mark."""
    try:
        worker = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended before this one was up
        worker = os.open(os.devnull, os.O_RDONLY)  # which is ready at once
    if os.fork():  # Ray kills the direct children of a worker that ends by itself
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    seconds_left = math.inf
    while worker not in (ready := select.select([worker, 0], [], [], _PAUSE_SEC)[0]):
        if ready:
            # nothing: it is just ending
            if messages := os.read(0, 1 << 16).decode().splitlines():
                sec, log = messages[-1].split(" ", 1)
                seconds_left = float(sec)
        elif not _is_stopped(pid):
            seconds_left -= _PAUSE_SEC
        if seconds_left <= 0:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"Timeout ({sec})!\n")
            # it has ended, and its parent knows
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGUSR2)
                select.select([worker], [], [], _STACKS_SEC)
                signal.pidfd_send_signal(worker, signal.SIGKILL)
    pipe = Path("/proc/self/fd/0").readlink()
    # a process that is started during one look is found at the next
    for _ in range(_LOOKS):
        for marked_pid in marked(variable, mark, pipe):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(marked_pid, signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE_SEC)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        )
    return False


def marked(variable: str, value: str, pipe: Path | None = None) -> list[int]:
    """Find the processes that inherited a variable of this value, or hold ``pipe`` open; not this one."""
    pids = []
    entry = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            is_marked = entry in (folder / "environ").read_bytes().split(b"\0")
            if not is_marked and pipe is not None:
                is_marked = any(
                    file.readlink() == pipe for file in (folder / "fd").iterdir()
                )
            if is_marked:
                pids.append(int(folder.name))
    return pids


if __name__ == "__main__":
    _wait(int(sys.argv[1]), *sys.argv[2:])
