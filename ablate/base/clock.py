"""Clocks for waits and for durations, whatever happens to the process and to the clock of the machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_SEC = 10.0


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_time() -> Callable[[], float]:
    """Return a clock of Unix seconds whose differences are true durations, also if the time is set anew."""
    offset = time.time() - time.clock_gettime(_STEADY)
    return lambda: offset + time.clock_gettime(_STEADY)


def running_clock() -> Callable[[], float]:
    """Return a clock (s) for a wait that looks at it every few seconds, from 0 on.

    A longer gap between two looks counts as ``_LONGEST_SEC``: the process was stopped (SIGSTOP, a frozen
    container), and so perhaps was what it waits for.
    """
    last = time.monotonic()
    total = 0.0

    def read() -> float:
        nonlocal last, total
        now_sec = time.monotonic()
        total += min(now_sec - last, _LONGEST_SEC)
        last = now_sec
        return total

    return read
