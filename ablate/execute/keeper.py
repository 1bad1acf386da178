"""A run's checkpoints as the trainer sees them: when one is due, and the metrics that belong to it.

How it fails: a checkpoint that cannot be written (a full disk) is passed over with a line in the attempt's
log, and tried again when the next one is due; the run goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ablate.store.checkpoints import Checkpoint, save_checkpoint
from ablate.train import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.store.leases import Lease
    from ablate.store.metrics import MetricsWriter

_LARGEST_SHARE = 0.02


class Keeper:
    """``Checkpoints`` for the trainer, over a run's folder."""

    def __init__(
        self,
        folder: Path,
        metrics: MetricsWriter,
        start: Checkpoint | None,
        lease: Lease | None = None,
        *,
        every_sec: float,
        every_tokens: int | None = None,
    ) -> None:
        """``every_tokens``, where it is given, takes the place of ``every_sec``."""
        self._folder = folder
        self._metrics = metrics
        self._start = start
        self._lease = lease
        self._every_sec = every_sec
        self._every_tokens = every_tokens
        self._passed = 0
        self._last = time.monotonic()
        self._cost_sec = 0.0

    def load(self) -> Snapshot | None:
        """Return what the attempt goes on from."""
        if self._start is None:
            return None
        return Snapshot(step=self._start.step, tensors=self._start.tensors, numbers=self._start.numbers)

    def due(self, tokens: int) -> bool:
        """Return whether the interval has passed; one in time is never so short that it costs over 2 %."""
        if self._every_tokens is not None:
            before, self._passed = self._passed, tokens // self._every_tokens
            return self._passed > before
        pause = max(self._every_sec, self._cost_sec / _LARGEST_SHARE) if self._every_sec else 0.0
        return time.monotonic() - self._last >= pause

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint with the metrics that came before it, unless the run was taken over."""
        if self._lease is not None and not self._lease.is_mine():
            return  # the checkpoints there are another attempt's
        started = time.monotonic()
        try:
            count, digest = self._metrics.sync()
            save_checkpoint(
                self._folder,
                Checkpoint(
                    step=snapshot.step,
                    tensors=snapshot.tensors,
                    numbers=snapshot.numbers,
                    metrics_bytes=count,
                    metrics_hash=digest,
                ),
            )
        except OSError as error:
            print(f"checkpoint after step {snapshot.step} not written: {error}", flush=True)
        self._last = time.monotonic()
        self._cost_sec = self._last - started
