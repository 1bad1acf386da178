"""The metrics file of one attempt: rows appended through one open file, from a known prefix on.

A new attempt copies the rows that it keeps into a file of its own and renames that over the old one. So a
worker that was given up for dead and wakes up again writes into a file that nobody reads.

How it fails: a row that does not fit on the disk is taken back whole (``OSError``), so that a later one
cannot follow half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import TYPE_CHECKING, Any, Self

from ablate.base.json_text import parse_json

if TYPE_CHECKING:
    from pathlib import Path


def bytes_before_step(path: Path, step: int) -> int:
    """Return how many bytes of a file of rows come before the first row of ``step`` or later.

    Rows of diagnostics carry the steps that were done before them, in order. What is damaged ends them.
    """
    kept = 0
    try:
        with path.open("rb") as file:
            for line in file:
                row = parse_json(line) if line.endswith(b"\n") else None
                if not isinstance(row, dict) or not isinstance(row.get("step"), int) or row["step"] >= step:
                    break
                kept += len(line)
    except (FileNotFoundError, ValueError):
        pass
    return kept


class MetricsWriter:
    """Appends rows and knows how many bytes it has written, and their hash."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Keep the first ``keep_bytes`` of the file, and start a new one there."""
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
        self._hash = hashlib.blake2b(kept, digest_size=16)
        self.bytes = len(kept)

    def append(self, row: dict[str, Any]) -> None:
        """Append one row; finite numbers only."""
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self._handle, line)
            if written < len(line):  # a disk that is filling up takes a part
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self.bytes)
            os.lseek(self._handle, self.bytes, os.SEEK_SET)
            raise
        self._hash.update(line)
        self.bytes += len(line)

    def sync(self) -> tuple[int, str]:
        """Have the rows on disk; return how many bytes there are, and their hash."""
        os.fsync(self._handle)
        return self.bytes, self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
