"""A run's checkpoints as the trainer sees them: when one is due, and which metrics belong to it.

On several devices each process writes its own rows; the first writes the manifest after all have.

How it fails: a checkpoint that cannot be written (a full disk) is skipped with a line in the attempt's log,
and the next one is written when due; the run continues.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ablate.store.checkpoints import Manifest, Part, save_manifest, save_part
from ablate.train import Snapshot
from ablate.train.group import ALONE, Group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ablate.store.checkpoints import Checkpoint
    from ablate.store.leases import Lease
    from ablate.store.metrics import MetricsWriter

_LARGEST_SHARE = 0.02


class Keeper:
    """The trainer's ``Checkpoints``, in a run's folder."""

    def __init__(
        self,
        folder: Path,
        metrics: MetricsWriter | None,
        start: Checkpoint | None,
        lease: Lease | None = None,
        *,
        every_sec: float,
        every_tokens: int | None = None,
        group: Group = ALONE,
    ) -> None:
        """``every_tokens``, if given, replaces ``every_sec``; only the first process has ``metrics``."""
        self._folder = folder
        self._group = group
        self._metrics = metrics
        self._start = start
        self._lease = lease
        self._every_sec = every_sec
        self._every_tokens = every_tokens
        self._passed = 0
        self._last = time.monotonic()
        self._cost_sec = 0.0

    def load(self) -> Snapshot | None:
        """Return the snapshot that the attempt resumes from."""
        if self._start is None:
            return None
        return Snapshot(step=self._start.step, tensors=self._start.tensors, numbers=self._start.numbers)

    def due(self, tokens: int) -> bool:
        """Whether the interval has passed; intervals in time are kept so long that they cost under 2 %."""
        if self._every_tokens is not None:
            before, self._passed = self._passed, tokens // self._every_tokens
            return self._passed > before
        pause = max(self._every_sec, self._cost_sec / _LARGEST_SHARE) if self._every_sec else 0.0
        return time.monotonic() - self._last >= pause

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint with the metrics before it, unless the run was taken over."""
        if not self._group.first(self._lease is None or self._lease.is_mine()):
            return  # the checkpoints belong to another attempt
        started = time.monotonic()
        tensors: dict[str, Tensor] = dict(snapshot.tensors)  # type: ignore[arg-type]  # one's own are never stored
        part, fault = None, ""
        try:
            part = save_part(
                self._folder, snapshot.step, tensors, index=self._group.rank, count=self._group.size
            )
        except OSError as error:
            fault = str(error)
        parts, faults = zip(*self._group.gathered((part, fault)), strict=True)
        if any(faults):
            _print_fault(snapshot, next(filter(None, faults)))
        elif self._metrics is not None:
            self._finish(snapshot, parts)
        self._last = time.monotonic()
        self._cost_sec = self._last - started

    def _finish(self, snapshot: Snapshot, parts: Sequence[Part]) -> None:
        assert self._metrics is not None
        try:
            count, digest = self._metrics.sync()
            save_manifest(
                self._folder,
                Manifest(
                    step=snapshot.step,
                    parts=parts,
                    numbers=snapshot.numbers,
                    sharded=snapshot.sharded,
                    metrics_bytes=count,
                    metrics_hash=digest,
                ),
            )
        except OSError as error:
            _print_fault(snapshot, str(error))


def _print_fault(snapshot: Snapshot, fault: str) -> None:
    print(f"checkpoint after step {snapshot.step} not written: {fault}", flush=True)
