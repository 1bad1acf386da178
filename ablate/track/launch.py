"""The mirror seen from the study's executor: start it, stop it, and hear what it could not send.

How it fails: a mirror that does not end in time is killed. Nothing is lost by that: the cursor is atomic,
and the next ``ablate run`` or ``ablate dashboard`` sends what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.store import StudyStore
from ablate.track.cursor import MirrorReport, mirror_dir, pending

if TYPE_CHECKING:
    from pathlib import Path

STOP_SEC = 30.0
"""How long the last pass may take."""


@dataclass(frozen=True, kw_only=True)
class MirrorProcess:
    """A running mirror of one study."""

    store: StudyStore
    tracking_uri: str
    process: subprocess.Popen[bytes]

    def stop(self, timeout_s: float = STOP_SEC) -> MirrorReport:
        """Let the mirror send the rest and end; return what is left unsent."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return pending(self.store, self.tracking_uri)


def start_mirror(study_dir: Path, tracking_uri: str) -> MirrorProcess:
    """Start the mirror of a study in a process of its own; returns at once.

    The address goes by the environment, since everybody on the machine can read a command line, and the
    process has a session of its own, so that Ctrl-C in the terminal leaves it its last pass.
    """
    store = StudyStore(study_dir.resolve())
    mirror_dir(store).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ablate.track.process", "--study", str(store.path)]
    # The child inherits the mask: a SIGTERM that comes before it is up waits, instead of ending it unsent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with (mirror_dir(store) / "mirror.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, "OMP_NUM_THREADS": "1"},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return MirrorProcess(store=store, tracking_uri=tracking_uri, process=process)
