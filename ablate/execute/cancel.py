"""A request to stop a study: a file that every executor on the storage sees, on any machine."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "cancel"


def request(study_dir: Path) -> None:
    """Ask every process that runs the study now to stop."""
    write_bytes_atomic(study_dir / _NAME, uuid.uuid4().hex.encode())


class Cancellation:
    """Checks for requests to stop that are newer than this object; older ones were for others."""

    def __init__(self, study_dir: Path) -> None:
        self._path = study_dir / _NAME
        self._before = self._read()

    def raise_if_requested(self) -> None:
        """Raise ``KeyboardInterrupt``, as Ctrl-C would, if there is a new request."""
        if self._read() not in (None, self._before):
            raise KeyboardInterrupt

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None
