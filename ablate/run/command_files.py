"""Files whose contents can change what a command's run gives: those of its id, and the code of its folder.

The id holds the files that the study names: ``files``, and words of the command. *Code* holds what a program in
``cwd`` can import or start besides: every source there, but not what git ignores, submodules and other worktrees,
hidden folders and installed packages. Configurations and data are no sources: a study names those that count.
Code is compared by content, so that a copy, a worktree and another commit of the same sources are the same code.

How it fails: ``UserError`` for a name that matches nothing, and for a file that cannot be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.base.files import hash_of
from ablate.run.log_text import files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ablate.run.command import Command

_SOURCE = re.compile(r"\.(py|pyx|sh|c|cc|cpp|cu|cuh|h|hpp|hip|rs|jl)$")
_NOT_COUNTED = re.compile(r"(^|/)(\.|__pycache__/|site-packages/|node_modules/)")


def result_files(command: Command) -> list[Path]:
    """List the files whose contents enter the id: ``files``, and each word that is a file in ``cwd``.

    The file that a word sets, as ``--config=a.yaml`` does, counts, too.

    Raises:
        UserError: a name in ``files`` matches nothing.
    """
    files = dict.fromkeys([*_word_files(command), *_listed(command.cwd, command.files)])
    return list(files)


def digest_of(command: Command) -> str:
    """Hash the names and contents of ``result_files``."""
    digest = hashlib.sha256()
    for path in result_files(command):
        content = _content(path)
        name = _name(path, command.cwd)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def code_of(cwd: str, files: Iterable[str]) -> dict[str, str]:
    """Map the name of each source in ``cwd``, and of each of ``files``, to the hash of its content."""
    return _hashes([*_sources(Path(cwd)), *_listed(cwd, files)], cwd)


def code_digest(code: Mapping[str, str]) -> str:
    """Hash what ``code_of`` returned: 12 digits in hex."""
    return hash_of(json.dumps(code, sort_keys=True).encode())[:12]


def changed_words(command: Command, other: Command) -> list[str]:
    """List the files that the words of both commands name, and whose contents differ."""
    hashes = _hashes(_word_files(command), command.cwd)
    others = _hashes(_word_files(other), other.cwd)
    return [name for name in hashes.keys() & others if hashes[name] != others[name]]


def _word_files(command: Command) -> Iterator[Path]:
    for word in command.words:
        for name in (word, word.rpartition("=")[2]):
            path = Path(command.cwd, name)
            if "{" not in word and not name.startswith("-") and path.is_file():
                yield path


def _listed(cwd: str, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        matches = [
            path for path in files_of(str(Path(cwd) / pattern)) if path.is_file()
        ]
        if not matches:
            raise UserError(
                f"trainer.files: no file '{pattern}' in {cwd}",
                hint="paths start at cwd",
            )
        yield from matches


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the sources that git does not ignore; all of them where it knows nothing of the folder."""
    names = ""
    # without git
    with contextlib.suppress(OSError):
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=folder, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
    paths = (
        [folder / name for name in names.split("\0")] if names else folder.rglob("*")
    )
    for path in paths:
        is_counted = not _NOT_COUNTED.search(_name(path, folder))
        if _SOURCE.search(path.name) and is_counted and path.is_file():
            yield path


def _hashes(paths: Iterable[Path], cwd: str) -> dict[str, str]:
    return {_name(path, cwd): hash_of(_content(path)) for path in paths}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", file=path) from None


def _name(path: Path, cwd: str | Path) -> str:
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
