"""What a run uses of its machine: a thread beside the training that samples CPU, memory and GPUs.

Samples go to ``system.jsonl``, apart from the metrics, because they are no result: they differ from one time
to the next, and a resumed run simply adds to them.

How it fails: it does not. What a machine cannot tell is left out, and a file that cannot be written has gaps.
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
    """Samples for the time of a ``with`` block, every ten seconds and once at the end."""

    def __init__(self, path: Path, tokens: Callable[[], int], *, every_sec: float = EVERY_SEC) -> None:
        """``tokens`` tells how far the run is."""
        self._path = path
        self._tokens = tokens
        self._every_sec = every_sec
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ablate-usage", daemon=True)

    def _run(self) -> None:
        psutil.cpu_percent()  # counts from the last call of the same thread on
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
        self._process.cpu_percent()  # counts from its last call on
        with contextlib.suppress(OSError):
            _end_last_line(self._path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def gpus() -> dict[str, float]:
    """Return memory, load and power of the GPUs that this process uses, as far as their driver tells."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # asking would make a context on a GPU not in use
        return {}
    found: dict[str, float] = {}
    for index in range(torch.cuda.device_count()):
        # torch raises whatever NVML's and AMD SMI's packages raise, or that they are not there.
        with contextlib.suppress(Exception):
            free, total = torch.cuda.mem_get_info(index)
            found[f"gpu_{index}_memory_usage_megabytes"] = round((total - free) / _MIB, 1)
            found[f"gpu_{index}_memory_usage_percentage"] = round(100 * (total - free) / total, 1)
            found[f"gpu_{index}_utilization_percentage"] = torch.cuda.utilization(index)
            found[f"gpu_{index}_power_usage_watts"] = torch.cuda.power_draw(index) / 1000
    return found


def _end_last_line(path: Path) -> None:
    """End a line that was cut off, so that the next sample begins one of its own."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
