"""Results of parts of a preparation, kept so that an interrupted preparation can continue.

Each result is a file and a record with its size and hash, written after the file. Its name is a hash of
everything that the content depends on, so a complete result is correct, whichever attempt made it. Two
processes that make the same result write the same bytes, and each rename is atomic.

How it fails: a truncated or changed result counts as missing and is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import TYPE_CHECKING, Any

from ablate.base.files import read_json, write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

_TEMPORARY = ".writing."


def key_of(content: Any) -> str:
    """Return a name that depends on ``content`` (plain data) and on nothing else."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def keep(path: Path, write: Callable[[BinaryIO], dict[str, Any]]) -> dict[str, Any]:
    """Write a file and its record; ``write`` returns the record's fields other than size and hash."""
    temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w+b") as file:
            content = write(file)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    record = {**content, "bytes": size, "sha256": digest}
    write_json_atomic(_record_path(path), record)
    return record


def find(path: Path) -> dict[str, Any] | None:
    """Return the record of a complete result, or None."""
    record = record_of(path)
    if record is None:
        return None
    try:
        with path.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == record["sha256"]
    except OSError:
        return None
    return record if whole else None


def record_of(path: Path) -> dict[str, Any] | None:
    """Return the record of a result whose file may have moved, or None."""
    try:
        record: dict[str, Any] = read_json(_record_path(path))
        return record if {"bytes", "sha256"} <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of a killed process. No other process may be working in the folder."""
    for left in folder.glob(f"*{_TEMPORARY}*"):
        left.unlink(missing_ok=True)


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
