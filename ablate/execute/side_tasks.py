"""What a worker does beside a run: shows that it lives, notes what it uses, keeps checkpoints.

On several devices each process writes its own rows of a checkpoint; then the first process writes the
manifest.

How it fails: ``Watch`` ends a process that hangs, with its stacks in the attempt's log. Samples leave unknown
values out; where their file cannot be written, samples are missing. A checkpoint that cannot be written (a
full disk) is skipped with a line in the attempt's log, and the next one is written when due; the run goes on.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from ablate.base.files import append_line
from ablate.execute.orphans import end_after
from ablate.store.checkpoints import save_manifest, save_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ablate.store.checkpoints import Checkpoint, Snapshot
    from ablate.store.leases import Leases
    from ablate.store.metrics import MetricsWriter
    from ablate.train.group import Group

BEAT_SEC = 5.0
EVERY_SEC = 10.0
_MIB = 1 << 20
_LARGEST_SHARE = 0.02


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread during the block; it must end soon after its event is set."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Watch(contextlib.ExitStack):
    """Beats a lease during a ``with`` block, and notes when the run was taken over (``lost``).

    Another process ends this one if the trainer makes no progress for too long: nothing else can end a call
    that never returns, and may keep Python's lock. The next attempt resumes from the last checkpoint.
    """

    def __init__(self, lease: Leases, hang_after_sec: float) -> None:
        super().__init__()
        self._lease = lease
        self._hang_after_sec = hang_after_sec
        self._log = sys.stderr
        self._has_progress = True
        self.lost = False
        self.tokens = 0
        self.callback(end_after, math.inf, self._log)
        self.enter_context(_beside(self._watch))

    def progress(self, tokens: int | None = None) -> None:
        """Record that the run made progress. ``tokens``: seen so far; None: the number is unchanged."""
        self._has_progress = True
        if tokens is not None:
            self.tokens = tokens

    def writing(self, writer: MetricsWriter) -> Callable[[dict[str, Any]], None]:
        """Return a function that appends a row with the time, which is progress."""

        def write(row: dict[str, Any]) -> None:
            self.progress(row.get("tokens"))
            writer.append({**row, "time_unix": self._lease.now()})

        return write

    def _watch(self, is_over: threading.Event) -> None:
        every_sec = min(BEAT_SEC, self._hang_after_sec / 4)
        while True:
            if self._has_progress:
                self._has_progress = False
                end_after(self._hang_after_sec + every_sec, self._log)
            if is_over.wait(every_sec):
                return
            self._lease.beat()
            self.lost = self.lost or not self._lease.is_mine()


def sampled(
    path: Path, tokens: Callable[[], int]
) -> contextlib.AbstractContextManager[None]:
    """Append samples of the use of the machine to ``path`` during a ``with`` block, and one at its end.

    They are kept apart from the metrics, because they differ each time and a resumed run adds to them.
    ``tokens`` returns the run's tokens so far.
    """

    def sample(is_over: threading.Event) -> None:
        process = psutil.Process()
        psutil.cpu_percent()  # both measure since their last call, this one since the last in its thread
        process.cpu_percent()
        is_last = False
        while not is_last:
            is_last = is_over.wait(EVERY_SEC)
            memory = psutil.virtual_memory()
            row = {
                "kind": "system",
                "time_unix": time.time(),
                "tokens": tokens(),
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "process_cpu_percentage": process.cpu_percent(),  # 100 is one core
                "process_memory_usage_megabytes": round(
                    process.memory_info().rss / _MIB, 1
                ),
                "system_memory_usage_megabytes": round(memory.used / _MIB, 1),
                "system_memory_usage_percentage": memory.percent,
            }
            with contextlib.suppress(OSError):
                append_line(path, row | _gpus())

    return _beside(sample)


def _gpus() -> dict[str, float]:
    """Return memory, load and power of the GPUs that this process uses, if the driver reports them."""
    torch = sys.modules.get("torch")
    usage: dict[str, float] = {}
    # a query would create a context on an unused GPU
    try:
        if torch is None or not torch.cuda.is_initialized():
            return usage
    except AttributeError:
        # another thread is importing it still
        return usage
    for index in range(torch.cuda.device_count()):
        name = f"gpu_{index}"
        # torch passes on the errors of the packages of NVML and AMD SMI, which may also be missing.
        with contextlib.suppress(Exception):
            free, total = torch.cuda.mem_get_info(index)
            usage[f"{name}_memory_usage_megabytes"] = round((total - free) / _MIB, 1)
            usage[f"{name}_memory_usage_percentage"] = round(
                100 * (total - free) / total, 1
            )
            usage[f"{name}_utilization_percentage"] = torch.cuda.utilization(index)
            usage[f"{name}_power_usage_watts"] = torch.cuda.power_draw(index) / 1000
    return usage


@dataclass
class Keeper:
    """The trainer's ``Checkpoints``, in a run's folder.

    ``rows``: the writers of the run's rows; only the first process has them. ``fingerprints``: of the
    arithmetic that has trained the run. ``prefixes``: the folders for states that other runs start from, by
    the number of tokens before the state.
    """

    folder: Path
    rows: Sequence[MetricsWriter]
    start: Checkpoint | None
    lease: Leases | None = None
    _: KW_ONLY
    group: Group
    every_sec: float
    fingerprints: Sequence[str] = ()
    prefixes: Mapping[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_sec = time.monotonic()
        self._cost_sec = 0.0
        self._prefix: Path | None = None

    def load(self) -> Snapshot | None:
        """Return the snapshot to resume from, None for a run that starts at step 0."""
        return self.start

    def due(self, tokens: int) -> bool:
        """Whether the interval has passed, or other runs start from the state after so many tokens.

        An interval in seconds is lengthened so that checkpoints take about 2 % of the time at most.
        """
        self._prefix = self.prefixes.get(tokens)
        pause = 0.0
        if self.every_sec:
            pause = max(self.every_sec, self._cost_sec / _LARGEST_SHARE)
        is_time = time.monotonic() - self._last_sec >= pause
        return is_time or self._prefix is not None

    def is_mine(self) -> bool:
        """Whether nobody has taken the run over, as the first process of the group sees it."""
        return self.group.first(self.lease is None or self.lease.is_mine())

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint with the rows before it, unless the run was taken over."""
        if not self.is_mine():
            return  # the checkpoints belong to another attempt
        started_sec = time.monotonic()
        try:
            self._save(snapshot)
        except OSError as error:
            print(
                f"checkpoint after step {snapshot.step} not written: {error}",
                flush=True,
            )
        self._last_sec = time.monotonic()
        self._cost_sec = self._last_sec - started_sec

    def _save(self, snapshot: Snapshot) -> None:
        """Write this process's part; in the first process then the manifest, if all parts are written."""
        part: dict[str, Any] | str
        tensors: dict[str, Tensor] = dict(snapshot.tensors)  # type: ignore[arg-type]  # one's own are never stored
        try:
            part = save_part(
                self.folder,
                snapshot.step,
                tensors,
                index=self.group.rank,
                count=self.group.size,
            )
        except OSError as error:
            part = str(error)
        parts = []
        for saved in self.group.gathered(part):
            if isinstance(saved, str):
                raise OSError(saved)
            parts.append(saved)
        if self.rows:
            save_manifest(
                self.folder,
                snapshot.step,
                parts,
                numbers=snapshot.numbers,
                fingerprints=self.fingerprints,
                rows={writer.name: writer.sync() for writer in self.rows},
                sharded=snapshot.sharded,
                prefix=self._prefix,
            )
