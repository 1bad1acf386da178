"""The metrics file of one attempt: rows appended to one open file, after a kept prefix.

A new attempt copies the rows that it keeps into its own file and renames that over the old one. A worker that
was given up for dead and wakes up therefore writes into a file that nobody reads.

How it fails: a row that does not fit on the disk is removed completely (``OSError``), so that no later row
follows a partial one.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends rows; knows how many bytes it has written and their hash."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Replace the file by a new one that starts with its first ``keep_bytes``."""
        kept = b""
        if keep_bytes:
            with path.open("rb") as file:
                kept = file.read(keep_bytes)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(handle, kept)
            os.fsync(handle)
            temporary.replace(path)
        except BaseException:
            os.close(handle)
            temporary.unlink(missing_ok=True)
            raise
        self._handle = handle
        self.name = path.name
        self._hash = hashlib.blake2b(kept, digest_size=16)
        self.bytes = len(kept)

    def append(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers."""
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self._handle, line)
            if written < len(line):  # a disk that is almost full takes only a part
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self.bytes)
            os.lseek(self._handle, self.bytes, os.SEEK_SET)
            raise
        self._hash.update(line)
        self.bytes += len(line)

    def sync(self) -> tuple[int, str]:
        """Sync the rows to disk; return their size in bytes and their hash."""
        os.fsync(self._handle)
        return self.bytes, self._hash.hexdigest()

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
