"""Files whose contents can change what a command's run gives: those of its id, and the code of its folder.

The id holds the files that the study names: ``files``, and words of the command. *Code* holds what a program in
``cwd`` can import or start besides: every source there, but not what git ignores, submodules and other worktrees,
hidden folders and installed packages. Configurations and data are no sources: a study names those that count.
Code is compared by content, so that a copy, a worktree and another commit of the same sources are the same code.

How it fails: ``UserError`` for a name that matches nothing, and for a file that cannot be read.
"""

from __future__ import annotations

import contextlib
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
    return [*dict.fromkeys([*_word_files(command), *_listed(command)])]


def digest_of(command: Command) -> str:
    """Hash the names and contents of ``result_files``."""
    return code_digest(_hashes(command, result_files(command)))


def code_of(command: Command) -> dict[str, str]:
    """Map the name of each source in ``cwd``, and of each of ``files``, to the hash of its content."""
    return _hashes(command, [*_sources(Path(command.cwd)), *_listed(command)])


def code_digest(hashes: Mapping[str, str]) -> str:
    """Hash names and hashes of contents: 12 digits in hex."""
    return hash_of(json.dumps(hashes, sort_keys=True).encode())[:12]


def changed_words(command: Command, other: Command) -> list[str]:
    """List the files that the words of both commands name, and whose contents differ."""
    hashes = _hashes(command, _word_files(command))
    others = _hashes(other, _word_files(other))
    return [name for name in hashes.keys() & others if hashes[name] != others[name]]


def _word_files(command: Command) -> Iterator[Path]:
    for word in command.words:
        for name in (word, word.rpartition("=")[2]):
            path = Path(command.cwd, name)
            if "{" not in word and not name.startswith("-") and path.is_file():
                yield path


def _listed(command: Command) -> Iterator[Path]:
    for pattern in command.files:
        files = [*filter(Path.is_file, files_of(str(Path(command.cwd, pattern))))]
        if not files:
            raise UserError(
                f"trainer.files: no file '{pattern}' in {command.cwd}",
                hint="paths start at cwd",
            )
        yield from files


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the sources that git does not ignore; all of them where it knows nothing of the folder."""
    names = ""
    # without git
    with contextlib.suppress(OSError):
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=folder, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
    paths: Iterable[Path] = folder.rglob("*")
    if names:
        paths = map(folder.joinpath, names.split("\0"))
    for path in paths:
        if (
            _SOURCE.search(path.name)
            and not _NOT_COUNTED.search(str(path.relative_to(folder)))
            and path.is_file()
        ):
            yield path


def _hashes(command: Command, paths: Iterable[Path]) -> dict[str, str]:
    hashes = {}
    for path in paths:
        is_inside = path.is_relative_to(command.cwd)
        name = str(path.relative_to(command.cwd) if is_inside else path)
        try:
            hashes[name] = hash_of(path.read_bytes())
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror}", file=path) from None
    return hashes
