"""Threads beside a training run: ``Watch`` shows that the worker lives, ``sampled`` notes what it uses.

How it fails: neither raises. ``Watch`` ends a process that hangs. Samples leave unknown values out; a file
that cannot be written has gaps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil

from ablate.base.files import append_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.store.leases import Lease

BEAT_SEC = 5.0
EXIT_HUNG = 75
"""Exit code of a process that ended itself because it hung (EX_TEMPFAIL: try again)."""
EVERY_SEC = 10.0
_MIB = 1 << 20


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread during the block; it ends soon after the event is set."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Watch(contextlib.ExitStack):
    """Beats a lease during a ``with`` block, and notes when the run was taken over (``lost``).

    It ends the process if the trainer makes no progress for too long: nothing else can end a call that never
    returns. The next attempt resumes from the last checkpoint.
    """

    def __init__(self, lease: Lease, hang_after_sec: float, on_hang: Callable[[str], None]) -> None:
        """``on_hang`` is called with one line before the process is ended."""
        super().__init__()
        self._lease, self._hang_after_sec, self._on_hang = lease, hang_after_sec, on_hang
        self._progress_sec = time.monotonic()
        self.lost = False
        self.tokens = 0
        self.enter_context(_beside(self._watch))

    def progress(self, tokens: int | None = None) -> None:
        """Record that the run made progress, and its tokens."""
        self._progress_sec = time.monotonic()
        self.tokens = self.tokens if tokens is None else tokens

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(min(BEAT_SEC, self._hang_after_sec / 4)):
            self._lease.beat()
            self.lost = self.lost or not self._lease.is_mine()
            idle = time.monotonic() - self._progress_sec
            if idle > self._hang_after_sec:
                self._on_hang(f"no progress for {idle:.0f} s")
                os._exit(EXIT_HUNG)


def sampled(
    path: Path, tokens: Callable[[], int], *, every_sec: float = EVERY_SEC
) -> contextlib.AbstractContextManager[None]:
    """Take samples during a ``with`` block, every ten seconds and once at the end.

    They are no results and not among the metrics: they differ each time, and a resumed run adds to them.
    ``tokens`` returns the run's tokens so far.
    """

    def sample(done: threading.Event) -> None:
        process = psutil.Process()
        psutil.cpu_percent()  # both measure from their last call, this one from the same thread's
        process.cpu_percent()
        with contextlib.suppress(OSError), path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # an incomplete line spoils no other
                file.write(b"\n")
        going = True
        while going:
            going = not done.wait(every_sec)
            memory = psutil.virtual_memory()
            row = {
                "kind": "system",
                "time_unix": time.time(),
                "tokens": tokens(),
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "process_cpu_percentage": process.cpu_percent(),  # 100 is one core
                "process_memory_usage_megabytes": round(process.memory_info().rss / _MIB, 1),
                "system_memory_usage_megabytes": round(memory.used / _MIB, 1),
                "system_memory_usage_percentage": memory.percent,
            }
            with contextlib.suppress(OSError):
                append_line(path, row | gpus())

    return _beside(sample)


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
