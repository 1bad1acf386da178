"""A run's checkpoints as the trainer sees them: when one is due, and which rows belong to it.

On several devices each process writes its own rows; the first writes the manifest after all have.

How it fails: a checkpoint that cannot be written (a full disk) is skipped with a line in the attempt's log,
and the next one is written when due; the run continues.
"""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ablate.store.checkpoints import save_manifest, save_part
from ablate.train import Snapshot
from ablate.train.group import ALONE, Group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ablate.store.checkpoints import Checkpoint
    from ablate.store.leases import Lease
    from ablate.store.metrics import MetricsWriter

_LARGEST_SHARE = 0.02


@dataclass
class Keeper:
    """The trainer's ``Checkpoints``, in a run's folder.

    ``every_tokens``, if given, replaces ``every_sec``. ``rows``: the writers of the run's
    rows, which only the first process has. ``fingerprints``: of the arithmetic that has trained the run.
    ``prefixes``: after so many tokens the state is kept for other runs, too, in this folder.
    """

    folder: Path
    rows: Sequence[MetricsWriter]
    start: Checkpoint | None
    lease: Lease | None = None
    _: KW_ONLY
    every_sec: float
    every_tokens: int | None = None
    group: Group = ALONE
    fingerprints: Sequence[str] = ()
    prefixes: Mapping[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._passed, self._last, self._cost_sec = 0, time.monotonic(), 0.0
        self._prefix: Path | None = None

    def load(self) -> Snapshot | None:
        """Return the snapshot that the attempt resumes from."""
        if (start := self.start) is None:
            return None
        return Snapshot(step=start.step, tensors=start.tensors, numbers=start.numbers)

    def due(self, tokens: int) -> bool:
        """Whether the interval has passed, or other runs part here; time between them costs under 2 %."""
        self._prefix = self.prefixes.get(tokens)
        if self.every_tokens is not None:
            before, self._passed = self._passed, tokens // self.every_tokens
            is_time = self._passed > before
        else:
            pause = max(self.every_sec, self._cost_sec / _LARGEST_SHARE) if self.every_sec else 0.0
            is_time = time.monotonic() - self._last >= pause
        return is_time or self._prefix is not None

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint with the rows before it, unless the run was taken over."""
        if not self.group.first(self.lease is None or self.lease.is_mine()):
            return  # the checkpoints belong to another attempt
        started, step = time.monotonic(), snapshot.step
        tensors: dict[str, Tensor] = dict(snapshot.tensors)  # type: ignore[arg-type]  # one's own are never stored
        part, fault = None, ""
        try:
            part = save_part(self.folder, step, tensors, index=self.group.rank, count=self.group.size)
        except OSError as error:
            fault = str(error)
        parts, faults = zip(*self.group.gathered((part, fault)), strict=True)
        fault = next(filter(None, faults), "")
        try:
            if self.rows and not fault:
                save_manifest(
                    self.folder,
                    step,
                    parts,
                    numbers=snapshot.numbers,
                    fingerprints=self.fingerprints,
                    rows={writer.name: writer.sync() for writer in self.rows},
                    sharded=snapshot.sharded,
                    prefix=self._prefix,
                )
        except OSError as error:
            fault = str(error)
        if fault:
            print(f"checkpoint after step {step} not written: {fault}", flush=True)
        self._last = time.monotonic()
        self._cost_sec = self._last - started
