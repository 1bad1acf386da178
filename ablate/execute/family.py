"""A process and all that it has started in turn, found by whose children they are.

``orphans`` finds what a worker has started by a mark that is inherited. A daemon may lose it: it clears its
environment and closes what it has inherited. While a family is watched, this process adopts what loses its
parent (Linux): such a daemon becomes its child. Elsewhere it is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

_CAN_ADOPT = sys.platform == "linux"
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Family:
    """A child of this process, and all that it has started. ``bystanders``: the other children."""

    process: subprocess.Popen[bytes]
    bystanders: frozenset[int]

    def poll(self) -> int | None:
        """Return the process's exit code, or None; no adopted process that has ended stays a zombie."""
        if _CAN_ADOPT:
            expected = {self.process.pid, *self.bystanders}
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                while (
                    ended := os.waitid(os.P_ALL, 0, flags)
                ) and ended.si_pid not in expected:
                    os.waitpid(ended.si_pid, 0)
        return self.process.poll()

    def pids(self) -> set[int]:
        """Find all that live and that this user may end."""
        pids = set()
        for child in psutil.Process().children():
            if child.pid in self.bystanders:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in (child, *child.children(recursive=True)):
                    with contextlib.suppress(OSError):
                        os.kill(member.pid, 0)
                        pids.add(member.pid)
        return pids


@contextlib.contextmanager
def watched(start: Callable[[], subprocess.Popen[bytes]]) -> Iterator[Family]:
    """Start a process, and adopt during the block what loses its parent."""
    bystanders = frozenset(child.pid for child in psutil.Process().children())
    _adopt(orphans=True)
    try:
        yield Family(process=start(), bystanders=bystanders)
    finally:
        _adopt(orphans=False)


def _adopt(*, orphans: bool) -> None:
    if _CAN_ADOPT:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)
