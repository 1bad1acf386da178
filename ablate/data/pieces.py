"""A file that grows piece by piece, so that a preparation that was interrupted goes on behind the last piece.

A journal beside the file has a record of each piece, with its size and hash. What is not as the journal says
is cut off when the file is opened again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ablate.base.files import append_line, parse_json

if TYPE_CHECKING:
    from pathlib import Path


class Pieces:
    """A growing file; ``records`` has what was said of each whole piece.

    ``key``: pieces that were written under another one do not count.
    """

    def __init__(self, path: Path, journal: Path, key: str) -> None:
        self.records: list[dict[str, Any]] = []
        self._path, self._journal, self._key = path, journal, key
        known = journal.read_bytes().splitlines() if journal.exists() else []
        journal.unlink(missing_ok=True)
        end = 0
        with path.open("a+b") as file, suppress(ValueError, KeyError, TypeError):
            for line in known:
                record = parse_json(line)
                file.seek(end)
                if record["key"] != key or record["sha256"] != _sha256(file.read(record["bytes"])):
                    break
                append_line(journal, record)
                self.records.append(record)
                end += record["bytes"]
        with path.open("r+b") as file:
            file.truncate(end)

    def append(self, piece: bytes, **said: Any) -> None:
        """Write one piece and its record."""
        with self._path.open("ab") as file:
            file.write(piece)
        record = {"key": self._key, "bytes": len(piece), "sha256": _sha256(piece), **said}
        append_line(self._journal, record)
        self.records.append(record)

    def total(self, name: str) -> int:
        """Return the sum of one value of all records."""
        return sum(record[name] for record in self.records)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
