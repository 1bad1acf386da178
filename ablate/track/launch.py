"""Starts and stops the mirror for the study's executor, and reports what it could not send.

How it fails: a mirror that does not end in time is killed. Nothing is lost: the cursor is atomic, and the
next ``ablate run`` or ``ablate dashboard`` sends the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.store import StudyStore
from ablate.track.cursor import MirrorReport, cursor_path, mirror_dir, pending
from ablate.track.uri import resolve_tracking_uri

if TYPE_CHECKING:
    from pathlib import Path

STOP_SEC = 30.0
"""The longest time without progress in the last pass."""
LAST_PASS_SEC = 600.0
"""The longest time of the last pass: thousands of short runs are sent more slowly than executed."""
_LOOK_SEC = 0.2


@dataclass(frozen=True, kw_only=True)
class MirrorProcess:
    """A running mirror of one study."""

    store: StudyStore
    tracking_uri: str
    process: subprocess.Popen[bytes]

    def stop(self, idle_sec: float = STOP_SEC, whole_sec: float = LAST_PASS_SEC) -> MirrorReport:
        """Let the mirror send the rest and end; return what is left unsent.

        It is killed after ``idle_sec`` without progress, or after ``whole_sec``.
        """
        self.process.terminate()
        progress = MirrorProgress(self.store, self.tracking_uri)
        give_up = time.monotonic() + whole_sec
        while self.process.poll() is None:
            if progress.idle_sec() > idle_sec or time.monotonic() > give_up:
                self.process.kill()
                self.process.wait()
            time.sleep(_LOOK_SEC)
        return pending(self.store, self.tracking_uri)


class MirrorProgress:
    """The time since the mirror last recorded progress, by this process's own clock."""

    def __init__(self, store: StudyStore, tracking_uri: str) -> None:
        self._cursor = cursor_path(store, tracking_uri)
        self._seen: int | None = None
        self._since = time.monotonic()

    def idle_sec(self) -> float:
        """Return the seconds since the cursor was last seen to change."""
        try:
            now = self._cursor.stat().st_mtime_ns
        except OSError:
            now = None
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since


def start_mirror(study_dir: Path, tracking_uri: str | None = None) -> MirrorProcess:
    """Start the mirror of a study in its own process; returns at once.

    ``tracking_uri``: of MLflow; default: see ``resolve_tracking_uri``.

    The environment carries the address, because every user of the machine can read a command line. The
    process has its own session, so that Ctrl-C in the terminal does not stop its last pass.
    """
    uri = resolve_tracking_uri(study_dir.parent, tracking_uri)
    store = StudyStore(study_dir.resolve())
    mirror_dir(store).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ablate.track.process", "--study", str(store.path)]
    # The child inherits the mask: an early SIGTERM waits until the child can handle it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with (mirror_dir(store) / "mirror.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_TRACKING_URI": uri, "OMP_NUM_THREADS": "1"},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return MirrorProcess(store=store, tracking_uri=uri, process=process)
