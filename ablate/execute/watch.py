"""The thread beside a training run: shows that the worker lives, and ends a run that hangs.

It beats the lease, notes when the run was taken over (``lost``), and ends the process if the trainer makes no
progress for too long: nothing else can end a call that never returns. The next attempt resumes from the last
checkpoint.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.store.leases import Lease

BEAT_SEC = 5.0
EXIT_HUNG = 75
"""Exit code of a process that ended itself because it hung (EX_TEMPFAIL: try again)."""


class Watch:
    """Beats a lease during a ``with`` block."""

    def __init__(self, lease: Lease, *, hang_after_sec: float, on_hang: Callable[[str], None]) -> None:
        """``on_hang`` is called with one line before the process is ended."""
        self._lease = lease
        self._hang_after_sec = hang_after_sec
        self._on_hang = on_hang
        self._progress_sec = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ablate-watch", daemon=True)
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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
