"""Threads beside a training run: ``Watch`` shows that the worker lives, ``Usage`` samples what it uses.

How it fails: neither raises. ``Watch`` ends a process that hangs. ``Usage`` leaves unknown values out; a file
that cannot be written has gaps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import psutil

from ablate.base.files import append_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.store.leases import Lease

BEAT_SEC = 5.0
EXIT_HUNG = 75
"""Exit code of a process that ended itself because it hung (EX_TEMPFAIL: try again)."""
EVERY_SEC = 10.0
_MIB = 1 << 20


class _Beside:
    """A thread during a ``with`` block, which ends soon after ``_done`` is set."""

    def __init__(self, name: str) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


class Watch(_Beside):
    """Beats a lease during a ``with`` block, and notes when the run was taken over (``lost``).

    It ends the process if the trainer makes no progress for too long: nothing else can end a call that never
    returns. The next attempt resumes from the last checkpoint.
    """

    def __init__(self, lease: Lease, *, hang_after_sec: float, on_hang: Callable[[str], None]) -> None:
        """``on_hang`` is called with one line before the process is ended."""
        super().__init__("ablate-watch")
        self._lease = lease
        self._hang_after_sec = hang_after_sec
        self._on_hang = on_hang
        self._progress_sec = time.monotonic()
        self.lost = False
        self.tokens = 0

    def progress(self, tokens: int | None = None) -> None:
        """Record that the run made progress, and its tokens."""
        self._progress_sec = time.monotonic()
        if tokens is not None:
            self.tokens = tokens

    def _run(self) -> None:
        pause = min(BEAT_SEC, self._hang_after_sec / 4)
        while not self._done.wait(pause):
            self._lease.beat()
            self.lost = self.lost or not self._lease.is_mine()
            idle = time.monotonic() - self._progress_sec
            if idle > self._hang_after_sec:
                self._on_hang(f"no progress for {idle:.0f} s")
                os._exit(EXIT_HUNG)


class Usage(_Beside):
    """Takes samples during a ``with`` block, every ten seconds and once at the end.

    They are no results and not among the metrics: they differ each time, and a resumed run adds to them.
    """

    def __init__(self, path: Path, tokens: Callable[[], int], *, every_sec: float = EVERY_SEC) -> None:
        """``tokens`` returns the run's tokens so far."""
        super().__init__("ablate-usage")
        self._path = path
        self._tokens = tokens
        self._every_sec = every_sec
        self._process = psutil.Process()

    def _run(self) -> None:
        psutil.cpu_percent()  # both measure from their last call, this one from the same thread's
        self._process.cpu_percent()
        # An incomplete line is ended, so that the next sample starts a new one.
        with contextlib.suppress(OSError), self._path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        while not self._done.wait(self._every_sec):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        memory = psutil.virtual_memory()
        row = {
            "kind": "system",
            "time_unix": time.time(),
            "tokens": self._tokens(),
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "process_cpu_percentage": self._process.cpu_percent(),  # 100 is one core
            "process_memory_usage_megabytes": round(self._process.memory_info().rss / _MIB, 1),
            "system_memory_usage_megabytes": round(memory.used / _MIB, 1),
            "system_memory_usage_percentage": memory.percent,
        }
        with contextlib.suppress(OSError):
            append_line(self._path, row | gpus())


def gpus() -> dict[str, float]:
    """Return memory, load and power of the GPUs that this process uses, if the driver reports them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # a query would create a context on an unused GPU
        return {}
    found: dict[str, float] = {}
    for index in range(torch.cuda.device_count()):
        # torch passes on the errors of the packages of NVML and AMD SMI, which may also be missing.
        with contextlib.suppress(Exception):
            free, total = torch.cuda.mem_get_info(index)
            found[f"gpu_{index}_memory_usage_megabytes"] = round((total - free) / _MIB, 1)
            found[f"gpu_{index}_memory_usage_percentage"] = round(100 * (total - free) / total, 1)
            found[f"gpu_{index}_utilization_percentage"] = torch.cuda.utilization(index)
            found[f"gpu_{index}_power_usage_watts"] = torch.cuda.power_draw(index) / 1000
    return found
