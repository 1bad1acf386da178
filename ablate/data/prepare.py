"""Tokenise a corpus once, into ``<cache>/<digest>/``, whoever asks and however often.

The folder is written under another name and renamed when it is complete, so that a reader finds a whole
one or none. A file lock keeps a second process waiting instead of doing the same work; where the file
system has no locks, both work and the first rename wins. What an interrupted preparation left behind is
removed by the next one on the same host, and a damaged folder is made anew.

Fails with ``UserError``: text that cannot be read (see ``documents``), too little of it, a corpus that
changed while it was read, a cache that cannot be written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ablate.data.identity import Corpus, resolve
from ablate.data.token_files import FORMAT, META, TokenFiles, load
from ablate.errors import Problem, UserError
from ablate.store.files import write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.config import DataConfig

    Progress = Callable[[float, str], None]

_DIGEST_CHARACTERS = 16
_POLL_SEC = 0.1


def prepare(data: DataConfig, cache_dir: Path, *, progress: Progress | None = None) -> TokenFiles:
    """Return the corpus's token files, making them if they are not there.

    ``progress`` hears the fraction done and what is being done, several times a second.

    Raises:
        UserError: the corpus cannot be used, or the cache cannot be written.
    """
    corpus = resolve(data)
    folder = cache_dir / corpus.identity.digest[:_DIGEST_CHARACTERS]
    report = progress or (lambda _fraction, _what: None)
    files = _ready(folder, corpus)
    if files is None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _alone(folder, lambda: report(0.0, "another process prepares these tokens")) as locked:
                if locked:
                    _remove_partial(folder)
                files = _ready(folder, corpus) or _make(data, corpus, folder, report)
        except OSError as error:
            hint = "check free space and rights, or choose another --storage"
            what = f"cannot write the token cache: {error.strerror or error}"
            raise UserError(Problem(file=str(folder), what=what, hint=hint)) from error
    report(1.0, "tokens are ready")
    return files


def _ready(folder: Path, corpus: Corpus) -> TokenFiles | None:
    """Return the folder's token files if they are whole and of this corpus."""
    try:
        files = load(folder)
    except UserError:
        return None
    in_place = files.train.parent != folder
    moved = in_place and str(files.train) != corpus.train[0].path
    return files if files.digest == corpus.identity.digest and not moved else None


def _make(data: DataConfig, corpus: Corpus, folder: Path, progress: Progress) -> TokenFiles:
    partial = folder.with_name(f"{_partial_prefix(folder)}{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        meta = _write_tokens(data, corpus, partial, progress)
        if not (corpus.hub and corpus.hub.commit) and resolve(data).identity != corpus.identity:
            raise UserError("the corpus changed while it was read (run again when nothing writes to it)")
        identity = {"digest": corpus.identity.digest, "vocab_size": corpus.identity.vocab_size}
        for file in partial.iterdir():
            _sync(file)
        write_json_atomic(partial / META, {"format": FORMAT, **identity, **meta})
        _publish(partial, folder, corpus)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return load(folder)


def _write_tokens(data: DataConfig, corpus: Corpus, partial: Path, progress: Progress) -> dict[str, Any]:
    if data.source == "tokens":
        from ablate.data.pretokenised import prepare_tokens

        total = max(1, corpus.identity.num_bytes)
        return prepare_tokens(
            data, corpus, partial, lambda done: progress(min(1.0, done / total), "checking tokens")
        )
    from ablate.data.tokenise import prepare_text

    return prepare_text(data, corpus, partial, progress)


def _publish(partial: Path, folder: Path, corpus: Corpus) -> None:
    """Rename to the final name; a whole folder that got there first stays, a damaged one goes."""
    if folder.exists() and _ready(folder, corpus) is None:
        aside = partial.with_name(f"{partial.name}.damaged")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if _ready(folder, corpus) is None:
            raise


@contextmanager
def _alone(folder: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the folder's lock; yields False where the file system has none."""
    with (folder.parent / f".{folder.name}.lock").open("ab") as file:
        locked = False
        while not locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_SEC)
            except OSError:  # a file system without locks
                break
        yield locked


def _partial_prefix(folder: Path) -> str:
    return f".{folder.name}.{socket.gethostname()}."


def _remove_partial(folder: Path) -> None:
    """Remove what died on this host: whoever holds the lock is the only one at work here."""
    for left in folder.parent.iterdir():
        if left.name.startswith(_partial_prefix(folder)):
            shutil.rmtree(left, ignore_errors=True)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
