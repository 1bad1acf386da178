"""Files: writes that survive a crash, JSON from any source, the default folders, and who may write.

A reader of a file written here sees the old or the new content, never a mixture.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO

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
    write_bytes_atomic(path, _json_text(value))


def _json_text(value: Any) -> bytes:
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"


def read_json(path: Path) -> Any:
    """Read a JSON file; raises ``FileNotFoundError`` or ``ValueError``."""
    return parse_json(path.read_text(encoding="utf-8"))


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write an object of strict JSON atomically, with a hash by which ``read_record`` notices damage."""
    write_bytes_atomic(path, record_text(value))


def record_text(value: dict[str, Any]) -> bytes:
    """Return an object as strict JSON, with a hash as last key; it is computed with zeros in its place."""
    content = _json_text(value | {"hash": _NO_HASH})
    start, end = _split_at_hash(content)
    return start + hash_of(content).encode() + end


def read_record(path: Path) -> dict[str, Any]:
    """Read a file that ``write_record`` wrote, without the hash.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the content is not what was written.
    """
    content = path.read_bytes()
    start, end = _split_at_hash(content)
    written = content[len(start) : -len(end)]
    if hash_of(start + _NO_HASH.encode() + end).encode() != written:
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
        sources = {}
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".json"):
                sources[f"{part}/{path.relative_to(folder)}"] = path
        for name in sorted(sources):
            content = sources[name].read_bytes()
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
    with open_unlinked(path, "ab") as file:
        file.write(line.encode())


def open_unlinked(
    path: Path, mode: Literal["a", "ab", "w"], permissions: int = 0o666
) -> IO[Any]:
    """Open a file to write; a link, which somebody else may have put there, is an ``OSError``."""
    return open(
        path,
        mode,
        opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, permissions),
        encoding=None if mode == "ab" else "utf-8",
    )


def open_private(path: Path, mode: Literal["a", "w"]) -> IO[str]:
    """Open a text file that only this user can read, in a folder that only this user can open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    return open_unlinked(path, mode, 0o600)


def default_storage() -> Path:
    """Return the folder that holds studies: $ABLATE_STORAGE, else ./ablate-runs."""
    return Path(os.environ.get("ABLATE_STORAGE", "ablate-runs"))


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of recomputable data, in $ABLATE_CACHE or in the user's cache."""
    folder = os.environ.get("ABLATE_CACHE")
    if folder:
        return Path(folder) / kind
    return users_cache_folder(kind)


def users_cache_folder(kind: str) -> Path:
    """Return the folder for one kind of data in the user's cache, even if $ABLATE_CACHE is set."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "ablate"
        / kind
    )


def changed_by_others(path: Path, *, group_may: bool = False) -> str | None:
    """Say in a clause how somebody other than this user and root can change a path; None if nobody can.

    ``group_may``: a group of this user's may share the path, if its folder is group-writable and setgid.
    """
    status = path.stat()
    folder = path if path.is_dir() else path.parent
    is_shared = group_may and _is_shared(folder.stat())
    others = stat.S_IWGRP | stat.S_IWOTH
    if is_shared or (group_may and _is_private_group(status)):
        others = stat.S_IWOTH
    is_own = status.st_uid in (0, os.geteuid()) or status.st_uid == _owner_of_new_files(
        folder
    )
    if not is_own and not is_shared:
        return f"{path} belongs to another user"
    if status.st_mode & others:
        return f"others can write to {path}"
    return _replaceable(path)


def _is_shared(folder: os.stat_result) -> bool:
    sharing = stat.S_ISGID | stat.S_IWGRP
    return folder.st_mode & sharing == sharing and folder.st_gid in (
        os.getegid(),
        *os.getgroups(),
    )


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group is its owner's alone, as many systems make one of his number for each user."""
    return status.st_gid == status.st_uid


def _owner_of_new_files(folder: Path) -> int:
    """Return the owner that a file server shows for what this user makes in a folder."""
    import tempfile  # hardly anybody needs it

    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return os.geteuid()


def _replaceable(path: Path) -> str | None:
    for parent in (*path.absolute().parents, *path.resolve().parents):
        mode = parent.stat().st_mode if parent.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace what is in {parent}"
    return None


def refuse_open_folder(folder: Path, *, with_links: bool = True) -> None:
    """Refuse to write into a folder that others can change, except a group that shares it on purpose.

    ``with_links``: accept links in it that lead out.

    Raises:
        UserError: somebody else could lead what is written there to another place.
    """
    is_there = folder.exists()
    if is_there:
        fault = changed_by_others(folder, group_may=True)
    else:
        fault = _replaceable(folder)
    if fault is not None:
        fix = f"chmod 700 {folder}, or 2770 for a group that shares it, or " * is_there
        raise UserError(f"{fault} ({fix}choose another folder)")
    if not with_links:
        inside = str(folder.resolve())
        for link in _links_in(inside):
            if not Path(link).resolve().is_relative_to(inside):
                raise UserError(
                    f"{link} is a link that leads out of {folder} (remove it)"
                )


def _links_in(folder: str) -> Iterator[str]:
    # closed to this user, or gone
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir():
                yield from _links_in(entry.path)


def restrict_umask(folder: Path | None = None) -> None:
    """Set the umask of this process and its children: others cannot write new files.

    ``folder``: of these files; its group can write them only if it shares the folder on purpose.
    """
    group_may = folder is None or (folder.exists() and _is_shared(folder.stat()))
    os.umask(os.umask(0o077) | (0o002 if group_may else 0o022))


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock on a file; yields False if the file system has no locks.

    The lock ends with the process at the latest. ``waiting`` is called several times a second while another
    process holds it.
    """
    with open_unlinked(path, "ab") as file:
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
