"""File writes that survive a crash: a reader sees the old content or the new content, never a mixture."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any

from ablate.base.json_text import parse_json

if TYPE_CHECKING:
    from pathlib import Path


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, fsync it and rename it; the umask sets the file's mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN, no Infinity) atomically."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    write_bytes_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; raises ``FileNotFoundError`` or ``json.JSONDecodeError``."""
    return parse_json(path.read_text(encoding="utf-8"))


def append_line(path: Path, value: Any) -> None:
    """Append a JSON object as one line in one write: a crash can truncate only the last line."""
    line = json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())
