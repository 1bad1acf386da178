"""Files: writes that survive a crash, JSON from any source, the default folders, and who may write.

A reader of a file written here sees the old or the new content, never a mixture.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_NO_HASH = "0" * 32


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
    """Read a JSON file; raises ``FileNotFoundError`` or ``ValueError``."""
    return parse_json(path.read_text(encoding="utf-8"))


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write an object of strict JSON atomically, with a hash by which ``read_record`` notices damage."""
    write_bytes_atomic(path, record_text(value))


def record_text(value: dict[str, Any]) -> bytes:
    """Return an object as strict JSON, with a hash as last key; it is computed with zeros in its place."""
    text = json.dumps(value | {"hash": _NO_HASH}, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    start, end = _split_at_hash(text.encode())
    return start + hash_of(text.encode()).encode() + end


def read_record(path: Path) -> dict[str, Any]:
    """Read a file that ``write_record`` wrote, without the hash.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the content is not what was written.
    """
    content = path.read_bytes()
    start, end = _split_at_hash(content)
    if hash_of(start + _NO_HASH.encode() + end) != content[len(start) : -len(end)].decode("ascii", "replace"):
        raise ValueError("altered or cut, or written by another version")
    record: dict[str, Any] = parse_json(content)
    del record["hash"]
    return record


def _split_at_hash(content: bytes) -> tuple[bytes, bytes]:
    end = len(b'"\n}\n')
    return content[: -end - len(_NO_HASH)], content[-end:]


def hash_of(content: bytes) -> str:
    """Return the BLAKE2b hash of 128 bits, in hex, by which the run store recognises its files."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_of_sources(package: Path, parts: Iterable[str]) -> str:
    """Hash the Python, C++ and JSON files in these folders of a package: 12 digits of SHA-256 in hex."""
    digest = hashlib.sha256()
    for part in parts:
        folder = package / part
        sources = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".json")]
        for name, path in sorted((f"{part}/{path.relative_to(folder)}", path) for path in sources):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ``ValueError`` if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def append_line(path: Path, value: Any) -> None:
    """Append a JSON object as one line in one write: a crash can truncate only the last line."""
    line = json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())


def default_storage() -> Path:
    """Return the folder that holds studies: $ABLATE_STORAGE, else ./ablate-runs."""
    return Path(os.environ.get("ABLATE_STORAGE", "ablate-runs"))


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of recomputable data, in $ABLATE_CACHE or in the user's cache."""
    own = os.environ.get("ABLATE_CACHE")
    return Path(own) / kind if own else users_cache_folder(kind)


def users_cache_folder(kind: str) -> Path:
    """Return the folder for one kind of data in the user's cache, even if $ABLATE_CACHE is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ablate" / kind


def changed_by_others(path: Path) -> str | None:
    """Say in a clause how somebody other than this user and root can change a path; None if nobody can."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path}"
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace what is in {folder}"
    return None


def restrict_umask() -> None:
    """Set the umask of this process and its children: others (not owner or group) cannot write new files."""
    os.umask(os.umask(0o077) | 0o002)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock on a file; yields False if the file system has no locks.

    The lock ends with the process at the latest. ``waiting`` is called several times a second while another
    process holds it.
    """
    with path.open("ab") as file:
        has_lock = False
        while not has_lock:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                waiting()
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield has_lock
