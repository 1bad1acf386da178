"""Tokenise a corpus once, into ``<cache>/<digest>/``, for any number of callers.

The folder is written under a temporary name and renamed when it is complete, so that a reader finds a
complete folder or none. A file lock makes a second process wait instead of repeating the work. On a file
system without locks both work, and the first rename wins. A damaged folder is replaced.

An interrupted preparation of text leaves finished parts in ``<cache>/.<hash of the data section>.parts/``.
The next one with the same section continues from there, even if a damaged file was replaced meanwhile.
Without locks, other processes at work would be unknown, so nothing is kept.

How it fails: ``UserError`` for unreadable text (see ``documents``), too little text, a corpus that
changed while it was read, or an unwritable cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.base.files import write_json_atomic
from ablate.data.identity import Corpus, resolve
from ablate.data.kept import key_of, remove_unfinished
from ablate.data.token_files import FORMAT, META, TokenFiles, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.data.tokenise import OnProgress
    from ablate.run.config import DataConfig, TrainingConfig

_DIGEST_CHARACTERS = 16
_POLL_SEC = 0.1


def prepare(
    data: DataConfig, cache_dir: Path, *, progress: OnProgress | None = None, num_workers: int | None = None
) -> TokenFiles:
    """Return the corpus's token files; make them first if they are missing.

    ``progress`` receives the fraction done and the current stage several times a second. ``num_workers``
    processes tokenise text, by default one per core; the files are the same for any number.

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
                files = _ready(folder, corpus) or _make(data, corpus, folder, num_workers, report)
        except OSError as error:
            hint = "check free space and rights, or choose another --storage"
            what = f"cannot write the token cache: {error.strerror or error}"
            raise UserError(Problem(file=str(folder), what=what, hint=hint)) from error
    report(1.0, "tokens are ready")
    return files


def tokens_of_a_pass(files: TokenFiles, training: TrainingConfig) -> int:
    """Return the number of training tokens that one pass over the corpus has.

    Raises:
        UserError: the corpus has too little text for such a run.
    """
    from ablate.data.batches import num_train_windows, num_validation_windows

    num_validation_windows(files.validation_tokens, training.seq_len, training.eval_tokens)
    return num_train_windows(files.train_tokens, training.seq_len) * training.seq_len


def _ready(folder: Path, corpus: Corpus) -> TokenFiles | None:
    """Return the folder's token files if they are complete and belong to this corpus."""
    try:
        files = load(folder)
    except UserError:
        return None
    in_place = files.train.parent != folder
    moved = in_place and str(files.train) != corpus.train[0].path
    return files if files.digest == corpus.identity.digest and not moved else None


def _make(
    data: DataConfig, corpus: Corpus, folder: Path, num_workers: int | None, progress: OnProgress
) -> TokenFiles:
    partial = folder.with_name(f"{_partial_prefix(folder)}{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        meta = _write_tokens(data, corpus, partial, num_workers, progress)
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


def _write_tokens(
    data: DataConfig, corpus: Corpus, partial: Path, num_workers: int | None, progress: OnProgress
) -> dict[str, Any]:
    if data.source == "tokens":
        from ablate.data.pretokenised import prepare_tokens

        total = max(1, corpus.identity.num_bytes)
        return prepare_tokens(
            data, corpus, partial, lambda done: progress(min(1.0, done / total), "checking tokens")
        )
    from ablate.data.tokenise import prepare_text

    with _kept_parts(data, partial, progress) as kept:
        return prepare_text(data, corpus, partial, kept, num_workers, progress)


@contextmanager
def _kept_parts(data: DataConfig, partial: Path, progress: OnProgress) -> Iterator[Path]:
    """Yield the folder of earlier attempts' results; remove it when this attempt succeeds."""
    named = partial.with_name(f"{key_of(asdict(data))[:_DIGEST_CHARACTERS]}.parts")
    with _alone(named, lambda: progress(0.0, "another process prepares text of this data section")) as locked:
        folder = named.with_name(f".{named.name}") if locked else partial / "parts"
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder)
        try:
            yield folder
        except BaseException:
            with suppress(OSError):  # not empty: the next attempt continues from it
                folder.rmdir()
            raise
        shutil.rmtree(folder)


def _publish(partial: Path, folder: Path, corpus: Corpus) -> None:
    """Rename to the final name; keep a complete folder that is already there, replace a damaged one."""
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
    """Hold the folder's lock; yields False if the file system has no locks."""
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
    """Remove leftovers of dead processes on this host; only the lock's holder works here."""
    for left in folder.parent.iterdir():
        if left.name.startswith(_partial_prefix(folder)):
            shutil.rmtree(left, ignore_errors=True)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
