"""The rows of a run (``metrics.jsonl`` and its like): one writer, and one reader for all who read them.

A new attempt copies the rows that it keeps into its own file and renames that over the old one. So a worker
that was given up for dead and wakes up writes into a file that nobody reads.

How it fails: a row that does not fit on the disk is removed completely (``OSError``), so that no later row
follows a partial one. A last line that a crash cut is not read; a damaged line is an error in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ablate.base.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOST_TOKENS = 1 << 62
_LARGEST = 1e300


def new_lines(
    path: Path, offset: int = 0, most_bytes: int = -1
) -> tuple[list[bytes], int]:
    """Read the complete lines of a file from ``offset`` on; return them and the offset after them.

    ``most_bytes``: about how much to read, at least one line; -1: all. A missing file has no lines.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(most_bytes)
        if len(content) == most_bytes and not content.endswith(b"\n"):
            content += file.readline()
    return lines_of(content), offset + content.rfind(b"\n") + 1


def lines_of(content: bytes) -> list[bytes]:
    """Split content into lines without their line ends; an incomplete last line is left out."""
    return content.split(b"\n")[:-1]


def parse_rows(lines: Sequence[bytes]) -> list[Any]:
    """Parse lines of JSON; a damaged line gives a ``ValueError`` in its place.

    All lines are parsed at once, which is faster, and one by one only if that fails.
    """
    try:
        rows = parse_json(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines):
            return list(rows)
    except ValueError:
        pass
    return list(map(_row, lines))


def _row(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def number_in(row: dict[str, Any], name: str) -> float | None:
    """Return the number ``name`` of a row, None if it is missing, not a number or not finite."""
    value: Any = row.get(name)
    # The bound comes first: an integer of JSON may be larger than any float.
    if type(value) in (int, float) and -_LARGEST < value < _LARGEST:
        return float(value)
    return None


def rows_of(lines: Sequence[bytes], kind: str) -> list[dict[str, Any]]:
    """Parse the rows of a kind, in the order written; damaged ones, or without tokens, are left out."""
    marker = f'"{kind}"'.encode()
    rows = []
    for row in parse_rows([line for line in lines if marker in line]):
        if not isinstance(row, dict) or row.get("kind") != kind:
            continue
        if type(row.get("tokens")) is int and 0 <= row["tokens"] < _MOST_TOKENS:
            rows.append(row)
    return rows


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends rows; knows how many bytes it has written and their hash."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Replace the file by a new one that starts with its first ``keep_bytes``."""
        rows = b""
        if keep_bytes:
            with path.open("rb") as file:
                rows = file.read(keep_bytes)
        self.name = path.name
        self.bytes = 0
        self._hash = hashlib.blake2b(digest_size=16)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        self._file = temporary.open("xb", buffering=0)
        try:
            self._write(rows)
            self.sync()
            temporary.replace(path)
        except BaseException:
            self._file.close()
            temporary.unlink(missing_ok=True)
            raise

    def append(self, row: dict[str, Any]) -> None:
        """Append one row.

        Raises:
            ValueError: a number is not finite.
            OSError: the row does not fit on the disk; nothing of it stays in the file.
        """
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        try:
            self._write(line)
        except OSError:
            self._file.seek(self.bytes)
            self._file.truncate()
            raise

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # a disk that is almost full takes only a part
            rest = rest[os.write(self._file.fileno(), rest) :]
        self._hash.update(content)
        self.bytes += len(content)

    def sync(self) -> tuple[int, str]:
        """Sync the rows to disk; return their size in bytes and their hash."""
        os.fsync(self._file.fileno())
        return self.bytes, self._hash.hexdigest()

    def __exit__(self, *_: object) -> None:
        self._file.close()
