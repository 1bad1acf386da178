"""The mirror as a process, started and stopped by the study's executor: ``python -m ablate.track.process``.

A pass runs every two seconds, at low priority. SIGTERM, or the end of the parent process, asks for a last
pass. If that sends nothing for half a minute, or takes ten minutes, the process ends itself.

How it fails: while MLflow is away, the pauses between passes grow up to half a minute, and the problem is one
line a minute in ``<study>/mirror/logs-UID/mirror.log``, without secrets. A mirror that does not end in time
is killed. Nothing is lost: the cursor is atomic, and the next ``ablate run`` or ``ablate dashboard`` sends
the rest.
"""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ablate.base.clock import running_clock
from ablate.base.command_hints import redact
from ablate.base.files import open_private
from ablate.store import StudyStore
from ablate.track.cursor import MirrorReport, cursor_path, pending, private_dir
from ablate.track.mirror import Mirror
from ablate.track.sink import resolve_tracking_uri

STOP_SEC = 30.0
"""The longest time without progress in the last pass."""
LAST_PASS_SEC = 600.0
"""The longest time of the last pass: sending thousands of short runs takes longer than executing them."""
_LOOK_SEC = 0.2
_POLL_SEC = 2.0
_MAX_POLL_SEC = 30.0
_TELL_EVERY_SEC = 60.0
_NICENESS = 10

_log = logging.getLogger("ablate.track")


@dataclass(frozen=True, kw_only=True)
class MirrorProcess:
    """A running mirror of one study."""

    store: StudyStore
    tracking_uri: str
    process: subprocess.Popen[bytes]

    def stop(self, longest_sec: float = LAST_PASS_SEC + STOP_SEC) -> MirrorReport:
        """Let the mirror send the rest and end; kill it after ``longest_sec``. Return what is left unsent."""
        self.process.terminate()
        clock = running_clock()
        while self.process.poll() is None and clock() < longest_sec:
            time.sleep(_LOOK_SEC)
        self.process.kill()
        self.process.wait()
        return pending(self.store, self.tracking_uri)


def start_mirror(study_dir: Path, tracking_uri: str | None = None) -> MirrorProcess:
    """Start the mirror of a study in its own process; returns at once.

    ``tracking_uri``: MLflow's address; default: see ``resolve_tracking_uri``.

    The environment carries the address, because every user of the machine can read a command line. The
    process has its own session, so that Ctrl-C in the terminal does not stop its last pass.

    Raises:
        UserError: an address or a folder that cannot be used.
    """
    uri = resolve_tracking_uri(study_dir.parent, tracking_uri)
    store = StudyStore(study_dir.resolve())
    store.refuse_unsafe()
    command = [
        sys.executable,
        "-m",
        "ablate.track.process",
        str(store.path),
        str(os.getpid()),
    ]
    # The child inherits the mask: an early SIGTERM waits until the child can handle it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with open_private(private_dir(store) / "mirror.log", "a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_TRACKING_URI": uri, "OMP_NUM_THREADS": "1"},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return MirrorProcess(store=store, tracking_uri=uri, process=process)


def main() -> None:
    """Mirror the study in folder ``argv[1]`` until SIGTERM, or until the parent process ``argv[2]`` ends."""
    study = Path(sys.argv[1])
    store = StudyStore(study)
    uri = resolve_tracking_uri(study.parent)
    stopping = _watch(int(sys.argv[2]), cursor_path(store, uri))
    os.nice(_NICENESS)
    sys.stdout = sys.stderr = _Redacted(sys.stderr.buffer, line_buffering=True)
    os.environ["MLFLOW_LOGGING_LEVEL"] = (
        "CRITICAL"  # each fault is a problem of a pass, told below
    )
    logging.getLogger("sqlalchemy").setLevel(logging.CRITICAL)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    _log.setLevel(logging.INFO)
    _log.info("mirroring %s to %s", study, uri)
    mirror = Mirror(store, uri)
    delay_sec = _POLL_SEC
    problem_logged_sec = -math.inf
    is_last = False
    while not is_last:
        is_last = stopping.is_set()
        report = mirror.sync_once()
        if report.problem is None and problem_logged_sec > -math.inf:
            _log.info("all is sent again")
            problem_logged_sec = -math.inf
        elif (
            report.problem is not None
            and time.monotonic() - problem_logged_sec >= _TELL_EVERY_SEC
        ):
            _log.info("will try again: %s", report.problem)
            problem_logged_sec = time.monotonic()
        if is_last and not report.complete:
            _log.warning(
                "ended with %d unsent: %s", len(report.unsent), " ".join(report.unsent)
            )
        if report.problem is None:
            delay_sec = _POLL_SEC
        else:
            delay_sec = min(2 * delay_sec, _MAX_POLL_SEC)
        stopping.wait(0.0 if is_last else delay_sec)


def _watch(parent: int, cursor: Path) -> threading.Event:
    """Return an event that SIGTERM or the parent's end sets; end the process if the last pass hangs.

    A separate thread looks for the signal, which stays blocked. The main thread may hang in a request, and
    setting an event inside a signal handler can deadlock with the thread that waits for it.
    """
    stopping = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        # Not sigtimedwait: if the process is stopped for longer, that returns what is no signal.
        while signal.SIGTERM not in signal.sigpending() and os.getppid() == parent:
            time.sleep(_LOOK_SEC)
        stopping.set()
        clock = running_clock()
        progress_sec = 0.0
        known_ns = None
        while (now_sec := clock()) < min(progress_sec + STOP_SEC, LAST_PASS_SEC):
            if (
                cursor.exists()
                and (written_ns := cursor.stat().st_mtime_ns) != known_ns
            ):
                known_ns = written_ns
                progress_sec = now_sec
            time.sleep(_LOOK_SEC)
        os._exit(1)  # nothing is lost: the cursor is written atomically

    threading.Thread(target=watch, daemon=True).start()
    return stopping


class _Redacted(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        return super().write(redact(text))


if __name__ == "__main__":
    main()
