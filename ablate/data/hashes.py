"""Content hashes of files, cached so that planning again only calls ``stat``.

A cached hash is valid while a file's size, modification time and change time stay the same. The hash of a
file modified within the last two seconds is not cached, because a second change within the clock's resolution
would be invisible (git calls such entries racy). There is one cache file per corpus, in the user's
cache (``ablate.base.files``).

How it fails: a damaged or unwritable cache is ignored and only costs time.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

from ablate.base.files import cache_folder, parse_json, write_bytes_atomic
from ablate.data.sources import unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ablate.data.sources import SourceFile

_FORMAT = 1
_RACY_NS = 2_000_000_000


def content_hashes(files: Sequence[SourceFile], key: str) -> list[str]:
    """Return the SHA-256 of each file; ``key`` names the corpus and its cache file."""
    try:
        cache = cache_folder("hashes") / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    except RuntimeError:  # no home folder
        cache = None
    known = _read(cache)
    fresh: dict[str, list[int | str]] = {}
    result = []
    for file in files:
        stamp = [file.size, file.mtime_ns, file.ctime_ns]
        entry = known.get(file.path)
        if entry is not None and entry[:3] == stamp:
            digest = str(entry[3])
        else:
            began_ns = time.time_ns()
            digest = _hash(file.path)
            if began_ns - max(file.mtime_ns, file.ctime_ns) < _RACY_NS:
                result.append(digest)
                continue
        fresh[file.path] = [*stamp, digest]
        result.append(digest)
    if cache is not None and fresh != known:
        _write(cache, fresh)
    return result


def _hash(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _read(cache: Path | None) -> dict[str, list[int | str]]:
    if cache is None:
        return {}
    try:
        value = parse_json(cache.read_bytes())
        if value["format"] != _FORMAT:
            return {}
        entries: dict[str, list[int | str]] = value["files"]
        sound = all(len(entry) == 4 and len(str(entry[3])) == 64 for entry in entries.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return entries if sound else {}


def _write(cache: Path, entries: dict[str, list[int | str]]) -> None:
    text = json.dumps({"format": _FORMAT, "files": entries}, separators=(",", ":"))
    try:
        write_bytes_atomic(cache, text.encode())
    except OSError:
        return  # read-only home: the next plan hashes again
