"""Tokenise a corpus once, into ``<cache>/<digest>/``, whoever asks and however often.

The folder is written under another name and renamed when it is complete, so that a reader finds a whole
one or none. A file lock keeps a second process waiting instead of doing the same work; where the file
system has no locks, both work and the first rename wins. A damaged folder is made anew.

What an interrupted preparation of text has finished lies in ``<cache>/.<hash of the data section>.parts/``:
the next one with the same section goes on from there, even if a damaged file was replaced meanwhile. Without
locks it would not be known who is at work there, so then nothing is kept.

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
    """Return the corpus's token files, making them if they are not there.

    ``progress`` hears the fraction done and what is being done, several times a second. Text is tokenised by
    ``num_workers`` processes, by default as many as there are cores; the files are the same for any number.

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
    """Return the folder's token files if they are whole and of this corpus."""
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
    """Yield the folder of what earlier attempts finished; it goes when this one is through."""
    named = partial.with_name(f"{key_of(asdict(data))[:_DIGEST_CHARACTERS]}.parts")
    with _alone(named, lambda: progress(0.0, "another process prepares text of this data section")) as locked:
        folder = named.with_name(f".{named.name}") if locked else partial / "parts"
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder)
        try:
            yield folder
        except BaseException:
            with suppress(OSError):  # not empty: that is what the next attempt goes on from
                folder.rmdir()
            raise
        shutil.rmtree(folder)


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
