"""Files that survive a crash: a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write a file through a temporary one in the same folder, fsync and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN, no Infinity) atomically."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    write_bytes_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; raises ``FileNotFoundError`` or ``json.JSONDecodeError``."""
    return json.loads(path.read_text(encoding="utf-8"))


def append_line(path: Path, value: Any) -> None:
    """Append one JSON object as one line, in one write, so that a crash can only cut the last line."""
    line = json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())
