"""A run's use of its machine: a thread beside the training that samples CPU, memory and GPUs.

Samples go to ``system.jsonl`` and not to the metrics, because they are not results: they differ each time,
and a resumed run adds to them.

How it fails: it raises nothing. Unknown values are left out, and a file that cannot be written has gaps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import psutil

from ablate.base.files import append_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVERY_SEC = 10.0
_MIB = 1 << 20


class Usage:
    """Takes samples during a ``with`` block, every ten seconds and once at the end."""

    def __init__(self, path: Path, tokens: Callable[[], int], *, every_sec: float = EVERY_SEC) -> None:
        """``tokens`` returns the run's tokens so far."""
        self._path = path
        self._tokens = tokens
        self._every_sec = every_sec
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ablate-usage", daemon=True)

    def _run(self) -> None:
        psutil.cpu_percent()  # measures from the same thread's last call
        while not self._done.wait(self._every_sec):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        row = {"time_unix": time.time(), "tokens": self._tokens(), **self._machine(), **gpus()}
        with contextlib.suppress(OSError):
            append_line(self._path, {"kind": "system", **row})

    def _machine(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "process_cpu_percentage": self._process.cpu_percent(),  # 100 is one core
            "process_memory_usage_megabytes": round(self._process.memory_info().rss / _MIB, 1),
            "system_memory_usage_megabytes": round(memory.used / _MIB, 1),
            "system_memory_usage_percentage": memory.percent,
        }

    def __enter__(self) -> Self:
        self._process.cpu_percent()  # measures from its last call
        with contextlib.suppress(OSError):
            _end_last_line(self._path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


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


def _end_last_line(path: Path) -> None:
    """End an incomplete line, so that the next sample starts a new one."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
