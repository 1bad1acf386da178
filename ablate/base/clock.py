"""Time for waits: only that in which this process ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_SEC = 10.0


def running_clock() -> Callable[[], float]:
    """Return a clock (s) for a wait that looks at it every few seconds, from 0 on.

    A longer gap between two looks counts as ``_LONGEST_SEC``: the process was stopped (SIGSTOP, a frozen
    container), and so perhaps was what it waits for.
    """
    last, total = time.monotonic(), 0.0

    def read() -> float:
        nonlocal last, total
        now = time.monotonic()
        total += min(now - last, _LONGEST_SEC)
        last = now
        return total

    return read
