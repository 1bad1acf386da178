"""The files of a corpus, with names that do not depend on their location, and the hashes of their content.

This module turns paths into files. It searches folders recursively and expands globs and ranges of shards
(``{00768..01023}``). Each file gets a name relative to the folder, glob, range or parent that it was found
under, so two copies of a corpus in two places list the same names. Finding files only calls ``stat``, so that
planning stays fast; unreadable content is found later.

How it fails: ``UserError`` for a missing path (with the nearest existing name), a folder or glob
without a match, an incomplete range (with the missing numbers), and a folder without read
permission.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError
from ablate.base.files import cache_folder, parse_json, write_bytes_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi",
    ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".sh",
)  # fmt: skip
JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
TOKEN_SUFFIXES = (".bin", ".tokens")

# Tests repeat each other and hold odd encodings; the other folders are not the library's own text.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LONGEST_RANGE = 1_000_000
_FORMAT = 1
_RACY_NS = 2_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file and its ``stat`` data; ``name`` does not depend on the location of the corpus."""

    name: str
    path: str
    size: int
    mtime_ns: int
    ctime_ns: int


def stdlib_files() -> list[SourceFile]:
    """Return the Python sources of the running interpreter's standard library.

    Files that a build or a distribution generates for one machine are left out, so that equal Python
    builds have equal corpora.
    """
    root = sysconfig.get_path("stdlib")

    def wanted(name: str) -> bool:
        top = name.split("/", 1)[0]
        generated = top.startswith(("_sysconfigdata", "config-")) or top == "sitecustomize.py"
        return name.endswith(".py") and not generated

    files = list(_walk(root, wanted, skipped=_STDLIB_SKIPPED)) if os.path.isdir(root) else []  # noqa: PTH112
    if not files:
        raise UserError(
            "this Python has no source files of its standard library",
            file=root,
            hint="use data.source: text with data.paths",
        )
    return files


def find_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[SourceFile]:
    """Return the files of all paths, each once, sorted by name.

    ``suffixes`` select among the files of a folder; a file given by name or matched by a glob is always
    taken. An empty tuple takes every file of a folder.
    """
    found: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    for text in paths:
        try:
            for file in _expand(text, suffixes):
                found.setdefault(file.path, file)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return sorted(found.values(), key=lambda file: (file.name, file.path))


def _expand(text: str, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    path = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  Path.resolve would follow links
    if os.path.isdir(path):  # noqa: PTH112
        files = list(_walk(path, lambda name: name.lower().endswith(suffixes) if suffixes else True))
        if not files:
            kinds = f"; looked for {', '.join(suffixes)}" if suffixes else ""
            hint = f"name the files, or a glob such as '{text.rstrip('/')}/*'{kinds}"
            raise UserError("the folder has no file of this source", file=text, hint=hint)
        yield from files
    elif os.path.lexists(path):
        yield stat_file(path, os.path.basename(path))  # noqa: PTH119
    elif _RANGE.search(path):
        yield from _expand_range(text, path, suffixes)
    elif glob.has_magic(path):
        matches = [match for match in glob.iglob(path, recursive=True) if os.path.isfile(match)]  # noqa: PTH113, PTH207
        if not matches:
            raise UserError("no file matches", file=text, hint="relative paths start at the study file")
        base = _fixed_part(path, glob.has_magic)
        for match in matches:
            yield stat_file(match, os.path.relpath(match, base))
    else:
        raise UserError("no such file or folder", file=text, hint=_nearest(Path(path)))


def _fixed_part(path: str, varies: Callable[[str], object]) -> Path:
    """Return the folder above the first varying part of a pattern."""
    parts = Path(path).parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if varies(part))])


def _expand_range(text: str, path: str, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    """Expand the first range of a path as a shell does; each number must exist."""
    found = _RANGE.search(path)
    assert found is not None
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + _LONGEST_RANGE:
        what, hint = f"{found[0]} is no range of shards", "the first number, then the last, as {00000..00255}"
        raise UserError(what, file=text, hint=hint)
    width = len(found[1]) if found[1].startswith("0") else 1
    base = _fixed_part(path, _RANGE.search)
    files: list[SourceFile] = []
    missing: list[int] = []
    for number in range(first, last + 1):
        member = f"{path[: found.start()]}{number:0{width}}{path[found.end() :]}"
        try:
            members = list(_expand(member, suffixes))
        except UserError:
            if _RANGE.search(member) or os.path.lexists(member):  # the original error says more
                raise
            missing.append(number)
        else:
            files += (replace(file, name=os.path.relpath(file.path, base)) for file in members)
    if missing:
        shown = ", ".join(_runs([f"{number:0{width}}" for number in missing]))
        what = f"{len(missing)} of the {last - first + 1} shards are missing: {shown}"
        raise UserError(what, file=text, hint="fetch them, or name a range that is there")
    yield from files


def _runs(numbers: Sequence[str]) -> Iterator[str]:
    """Shorten ascending numbers: 3, 5–9."""
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or int(numbers[index + 1]) != int(number) + 1:
            yield number if start == index else f"{numbers[start]}–{number}"
            start = index + 1


def _walk(
    root: str, wanted: Callable[[str], bool], skipped: set[str] | frozenset[str] = frozenset()
) -> Iterator[SourceFile]:
    def refuse(error: OSError) -> None:
        raise UserError(
            f"cannot read the folder: {error.strerror}", file=error.filename, hint="check its rights"
        )

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        prefix = os.path.relpath(folder, root)
        for name in names:
            relative = name if prefix == "." else f"{prefix}/{name}"
            if not name.startswith(".") and wanted(relative):
                yield stat_file(f"{folder}/{name}", relative)


def stat_file(path: str, name: str) -> SourceFile:
    """Return a file as ``os.stat`` sees it; raises ``UserError``."""
    try:
        status = os.stat(path)  # noqa: PTH116  a Path for each of 700 files costs as much as the call
    except OSError as error:
        raise unreadable(path, error) from error
    return SourceFile(
        name=name, path=path, size=status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns
    )


def unreadable(path: str | Path, error: OSError) -> UserError:
    """Convert an ``OSError`` on one of the corpus's files to a ``UserError``."""
    hint = "check the file's rights" if isinstance(error, PermissionError) else "check the file"
    return UserError(f"cannot read: {error.strerror or error}", file=path, hint=hint)


def _nearest(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        siblings = []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {close[0]}?" if close else "relative paths start at the study file"


def content_hashes(files: Sequence[SourceFile], key: str) -> list[str]:
    """Return the SHA-256 of each file; ``key`` names the corpus and its cache file.

    Hashes are cached, so that planning again only calls ``stat``. A cached hash is valid while a file's size,
    modification time and change time stay the same. The hash of a file modified within the last two seconds
    is not cached, because a second change within the clock's resolution would be invisible (git calls such
    entries racy). There is one cache file per corpus, in the user's cache (``ablate.base.files``); a damaged
    or unwritable one is ignored and only costs time.
    """
    try:
        cache = cache_folder("hashes") / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    except RuntimeError:  # no home folder
        cache = None
    known = _read_hashes(cache)
    fresh: dict[str, list[int | str]] = {}
    result = []
    for file in files:
        stamp = [file.size, file.mtime_ns, file.ctime_ns]
        entry, began_ns = known.get(file.path), time.time_ns()
        is_known = entry is not None and entry[:3] == stamp
        digest = str(entry[3]) if entry is not None and is_known else hash_file(file.path)
        result.append(digest)
        if is_known or began_ns - max(stamp[1:]) >= _RACY_NS:
            fresh[file.path] = [*stamp, digest]
    if cache is not None and fresh != known:
        text = json.dumps({"format": _FORMAT, "files": fresh}, separators=(",", ":"))
        with suppress(OSError):  # read-only home: the next plan hashes again
            write_bytes_atomic(cache, text.encode())
    return result


def hash_file(path: str) -> str:
    """Return the SHA-256 of a file; raises ``UserError``."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _read_hashes(cache: Path | None) -> dict[str, list[int | str]]:
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
