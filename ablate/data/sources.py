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
import itertools
import os
import re
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError, likely
from ablate.base.files import cache_folder, read_record, write_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi",
    ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".sh",
)  # fmt: skip
JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
TOKEN_SUFFIXES = (".bin", ".tokens")
ANY_SUFFIX = ("",)
_SUFFIXES = {
    "text": TEXT_SUFFIXES,
    "jsonl": JSON_SUFFIXES,
    "tokens": TOKEN_SUFFIXES,
}

# Tests repeat each other and hold odd encodings; the other folders are not the library's own text.
_STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}
_STDLIB_GENERATED = ("_sysconfigdata", "config-", "sitecustomize.py")

PATHS_HINT = "relative paths start at the study file"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LONGEST_RANGE = 1_000_000
_RACY_NS = 2_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file and its ``stat`` data; ``name`` does not depend on the location of the corpus."""

    name: str
    path: str
    size: int
    mtime_ns: int
    ctime_ns: int


def corpus_files(source: str, paths: Sequence[str]) -> list[SourceFile]:
    """List the files of a corpus that is no data set of the hub, as ``find_files``."""
    if source == "stdlib":
        return stdlib_files()
    return find_files(paths, _SUFFIXES[source])


def stdlib_files() -> list[SourceFile]:
    """List the Python sources of the running interpreter's standard library.

    Files that a build or a distribution generates for one machine are left out, so that equal Python
    builds have equal corpora.
    """
    root = sysconfig.get_path("stdlib")
    sources: Iterable[SourceFile] = ()
    if os.path.isdir(root):  # noqa: PTH112
        sources = _walk(root, (".py",), skipped=_STDLIB_SKIPPED)
    files = [file for file in sources if not file.name.startswith(_STDLIB_GENERATED)]
    if not files:
        raise UserError(
            "this Python has no source files of its standard library",
            file=root,
            hint="use data.source: text with data.paths",
        )
    return files


def find_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[SourceFile]:
    """List the files of all paths, each once, sorted by name.

    ``suffixes`` select among the files of a folder; a file given by name or matched by a glob is always
    taken. ``ANY_SUFFIX`` takes every file of a folder.
    """
    files: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    for text in paths:
        try:
            for file in _expand(text, suffixes):
                files.setdefault(file.path, file)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return sorted(files.values(), key=lambda file: (file.name, file.path))


def _expand(text: str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    path = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  Path.resolve would follow links
    if os.path.isdir(path):  # noqa: PTH112
        files = list(_walk(path, suffixes))
        if not files:
            raise UserError(
                "the folder has no file of this source",
                file=text,
                hint=f"looked for {', '.join(suffixes) or 'any file'}; name the files, or a glob",
            )
        return files
    if os.path.lexists(path):
        return [stat_file(path, os.path.basename(path))]  # noqa: PTH119
    shards = _shards(text, path)
    varies = _RANGE.search if shards != [path] else glob.has_magic
    # The folder above the first part that varies: names are relative to it.
    base = Path(*itertools.takewhile(lambda part: not varies(part), Path(path).parts))
    files = []
    missing = []
    for shard in shards:
        before = len(files)
        for match in glob.iglob(shard, recursive=True):  # noqa: PTH207
            if os.path.isfile(match):  # noqa: PTH113
                files.append(stat_file(match, os.path.relpath(match, base)))
            elif match == shard:
                files += (
                    replace(file, name=os.path.relpath(file.path, base))
                    for file in _walk(shard, suffixes)
                )
        if len(files) == before:
            missing.append(os.path.relpath(shard, base))
    if not missing:
        return files
    hint = PATHS_HINT
    if len(shards) > 1:
        shown = ", ".join(missing[:8])
        if len(missing) > 8:
            shown += ", …"
        message = f"{len(missing)} of the {len(shards)} shards are missing: {shown}"
        hint = "fetch them, or name a range that is there"
    elif glob.has_magic(path):
        message = "no file matches"
    else:
        message = "no such file or folder"
        folder, name = os.path.split(path)
        siblings = os.listdir(folder) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
        hint = likely(name, siblings, hint)
    raise UserError(message, file=text, hint=hint)


def _shards(text: str, path: str) -> list[str]:
    """Expand all ranges of a path as a shell does."""
    match = _RANGE.search(path)
    if match is None:
        return [path]
    first = int(match[1])
    last = int(match[2])
    if not first <= last < first + _LONGEST_RANGE:
        raise UserError(
            f"{match[0]} is no range of shards",
            file=text,
            hint="the first number, then the last, as {00000..00255}",
        )
    width = len(match[1]) if match[1].startswith("0") else 1
    return [
        shard
        for number in range(first, last + 1)
        for shard in _shards(
            text, f"{path[: match.start()]}{number:0{width}}{path[match.end() :]}"
        )
    ]


def _walk(
    root: str, suffixes: tuple[str, ...], skipped: Collection[str] = ()
) -> Iterator[SourceFile]:
    """Yield the files under a folder with one of these suffixes, but no hidden ones."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"cannot read the folder: {error.strerror}",
            file=error.filename,
            hint="check its rights",
        )

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [
            name for name in folders if name not in skipped and not name.startswith(".")
        ]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                path = f"{folder}/{name}"
                yield stat_file(path, path[len(root) :].lstrip("/"))


def stat_file(path: str, name: str) -> SourceFile:
    """Read a file's ``stat`` data, or raise ``UserError``."""
    try:
        status = os.stat(path)  # noqa: PTH116  a Path for each of 700 files costs as much as the call
    except OSError as error:
        raise unreadable(path, error) from error
    return SourceFile(
        name=name,
        path=path,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def unreadable(path: str | Path, error: OSError) -> UserError:
    """Convert an ``OSError`` on one of the corpus's files to a ``UserError``."""
    return UserError(
        f"cannot read: {error.strerror or error}", file=path, hint="check the file"
    )


def text_of(row: dict[str, Any], text_field: str, path: str, number: int) -> str:
    """Read the text of a row, or raise ``UserError``, which gives ``path`` and ``number`` as its place."""
    text = row.get(text_field)
    if not isinstance(text, str):
        raise UserError(
            f"no text in field '{text_field}'",
            file=path,
            line=number,
            hint=f"fields here: {', '.join(row) or 'none'}; set data.text_field",
        )
    return text


def content_hashes(files: Sequence[SourceFile], key: str) -> list[str]:
    """Compute the SHA-256 of each file; ``key`` names the corpus and its cache file.

    Hashes are cached, so that planning again only calls ``stat``. A cached hash is valid while a file's size,
    modification time and change time stay the same. The hash of a file modified within the last two seconds
    is not cached, because a second change within the clock's resolution would be invisible (git calls such
    entries racy). There is one cache file per corpus, in the user's cache (``ablate.base.files``); a damaged
    or unwritable one is ignored and only costs time.
    """
    known: dict[str, list[Any]] = {}
    cache: Path | None = None
    # none, damaged, or no home folder
    with suppress(OSError, ValueError, KeyError, RuntimeError):
        cache = (
            cache_folder("hashes")
            / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        )
        known = read_record(cache)["files"]
    fresh: dict[str, list[Any]] = {}
    result = []
    for file in files:
        stamp = [file.size, file.mtime_ns, file.ctime_ns]
        began_ns = time.time_ns()
        *stamp_before, digest = known.get(file.path, [None])
        is_new = stamp_before != stamp
        if is_new:
            digest = hash_file(file.path)
        result.append(digest)
        if not is_new or began_ns - max(stamp[1:]) >= _RACY_NS:
            fresh[file.path] = [*stamp, digest]
    if cache is not None and fresh != known:
        with suppress(OSError):  # read-only home: the next plan hashes again
            write_record(cache, {"files": fresh})
    return result


def hash_file(path: str) -> str:
    """Compute the SHA-256 of a file, or raise ``UserError``."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
