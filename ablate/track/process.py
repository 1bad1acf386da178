"""The mirror as a process: ``python -m ablate.track.process --study DIR``.

MLFLOW_TRACKING_URI holds the address. A pass runs every two seconds, at low priority. SIGTERM, or the end of
the parent process, asks for a last pass. The process ends in any case when that pass has sent nothing for
half a minute, or has taken ten minutes.

How it fails: while MLflow is away, the pauses between passes grow up to half a minute, and each problem is
one line of ``<study>/mirror/mirror.log``. All output passes through ``redact``.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from ablate.store import StudyStore
from ablate.track.launch import LAST_PASS_SEC, STOP_SEC, MirrorProgress
from ablate.track.mirror import Mirror
from ablate.track.uri import redact, resolve_tracking_uri

_POLL_SEC = 2.0
_MAX_POLL_SEC = 30.0
_NICENESS = 10

_log = logging.getLogger("ablate.track")


def main() -> None:
    """Mirror a study until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m ablate.track.process", description=main.__doc__)
    parser.add_argument("--study", type=Path, required=True, help="the study's folder")
    parser.add_argument("--tracking-uri", help="default: $MLFLOW_TRACKING_URI, else sqlite beside the study")
    parser.add_argument("--parent", type=int, help="end when this process is no longer the parent")
    arguments = parser.parse_args()

    uri = resolve_tracking_uri(arguments.study.parent, arguments.tracking_uri)
    store = StudyStore(arguments.study)
    stopping = _watch(arguments.parent, MirrorProgress(store, uri))
    os.nice(_NICENESS)
    sys.stdout, sys.stderr = _Redacted(sys.stdout), _Redacted(sys.stderr)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    _log.setLevel(logging.INFO)
    _log.info("mirroring %s to %s", arguments.study, uri)
    mirror_until(stopping, Mirror(store, uri))


def mirror_until(stopping: threading.Event, mirror: Mirror) -> None:
    """Make passes until ``stopping`` is set, and one more."""
    delay_sec = _POLL_SEC
    last_problem: str | None = None
    while True:
        is_last = stopping.is_set()
        report = mirror.sync_once()
        if report.problem != last_problem:
            _log.info("all is sent again" if report.problem is None else f"will try again: {report.problem}")
            last_problem = report.problem
        if is_last:
            if not report.complete:
                _log.warning("ended with %d unsent: %s", len(report.unsent), " ".join(report.unsent))
            return
        delay_sec = _POLL_SEC if report.problem is None else min(2 * delay_sec, _MAX_POLL_SEC)
        stopping.wait(delay_sec)


def _watch(parent: int | None, progress: MirrorProgress) -> threading.Event:
    """Return an event that SIGTERM or the parent's end sets; a last pass that hangs ends the process.

    A separate thread takes the signal. The main thread may hang in a request, and setting an event inside a
    signal handler can deadlock with the thread that waits for it.
    """
    stopping = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigtimedwait({signal.SIGTERM}, 0.5) is None:
            if parent is not None and os.getppid() != parent:
                break
        stopping.set()
        give_up = time.monotonic() + LAST_PASS_SEC
        progress.idle_sec()
        while progress.idle_sec() < STOP_SEC and time.monotonic() < give_up:
            time.sleep(0.5)
        os._exit(1)  # nothing is lost: the cursor is written atomically

    threading.Thread(target=watch, daemon=True).start()
    return stopping


class _Redacted(io.TextIOBase):
    """A text stream without secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        self._stream.write(redact(text))
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


if __name__ == "__main__":
    main()
