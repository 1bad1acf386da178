"""Tokenise a corpus once, into ``<cache>/<digest>/``, for any number of callers.

The folder is written under a temporary name and renamed when it is complete, so that a reader finds a
complete folder or none. A file lock makes a second process wait instead of repeating the work. On a file
system without locks both work, and the first rename wins. A damaged folder is replaced.

An interrupted preparation starts again. What a killed one left in ``<cache>/.<digest>.<host>/`` goes when the
same corpus is prepared on that host, unless there are no locks: another process might be at work there.

``meta.json`` is written last: a folder without it is not prepared, and one whose files do not have its hashes
is damaged. Files are hashed when they are first opened on a machine, and again when their times change. A
folder is not used either if everybody can write in it, or if another user made it where everybody can write.
The user's own token files are used in place; ``meta.json`` then records their size and modification time,
and ``load`` rejects a file that has changed since.

How it fails: ``UserError`` for unreadable text (see ``documents``), too little text, a corpus that
changed while it was read, or an unwritable cache.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import uuid
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import UserError
from ablate.base.files import locked, read_record, refuse_open_folder, write_record
from ablate.data.identity import DataIdentity, identify
from ablate.data.sources import content_hashes, hash_file, stat_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from ablate.data.tokenise import OnProgress
    from ablate.run.config import DataConfig, TrainingConfig

_META = "meta.json"
_FORMAT = 2
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """The location and description of a corpus's tokens. Plain data that can be sent to a worker.

    ``train`` may be longer than ``train_tokens``: the end of a token file used in place may be held out.
    ``validation_bytes_per_token`` converts nats per token to bits per byte: bits/byte = nats / ln 2 / it. It
    counts end-of-text tokens as tokens, and is None if the source was already tokens.
    """

    folder: Path
    train: Path
    validation: Path
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    digest: str
    tokenizer: str
    validation_bytes_per_token: float | None


def prepare(
    data: DataConfig,
    cache_dir: Path,
    *,
    progress: OnProgress = lambda _fraction, _what: None,
    notice: Callable[[str], None] = lambda _: None,
) -> TokenFiles:
    """Return the corpus's token files; make them first if they are missing or damaged.

    ``progress`` receives the fraction done and the current stage several times a second, ``notice`` a
    sentence about damaged files. One thread per core tokenises text; $RAYON_NUM_THREADS changes that.

    Raises:
        UserError: the corpus cannot be used, or the cache cannot be written or is open to others.
    """
    corpus = identify(data)
    folder = cache_dir / corpus.digest[:_DIGEST_CHARACTERS]
    files = _ready(folder, corpus, notice)
    if files is None:
        refuse_open_folder(cache_dir)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            lock = cache_dir / f".{folder.name}.lock"
            with locked(
                lock, lambda: progress(0.0, "another process prepares these tokens")
            ) as is_alone:
                mine = socket.gethostname() if is_alone else uuid.uuid4().hex
                partial = folder.with_name(f".{folder.name}.{mine}")
                files = _ready(folder, corpus) or _make(
                    data, corpus, partial, folder, progress
                )
        except OSError as error:
            raise UserError(
                f"cannot write the token cache: {error.strerror or error}",
                file=folder,
                hint="check free space and rights, or choose another --storage",
            ) from error
    progress(1.0, "tokens are ready")
    return files


def load(folder: Path) -> TokenFiles:
    """Reopen tokens that ``prepare`` made.

    Raises:
        UserError: the folder is not prepared, or is damaged.
    """
    try:
        meta = read_record(folder / _META)
        if meta["format"] != _FORMAT:
            raise _damaged(folder, f"has format {meta['format']}, not {_FORMAT}")
        # Joining an absolute path gives that path.
        paths = {
            "folder": folder,
            "train": folder / meta["train"],
            "validation": folder / meta["validation"],
        }
        files = TokenFiles(
            **{field.name: (meta | paths)[field.name] for field in fields(TokenFiles)}
        )
        written = [files.train, files.validation]
        if meta["in_place"] is not None:
            status = files.train.stat()
            written = [files.validation]
            if [status.st_size, status.st_mtime_ns] != meta["in_place"]:
                raise _damaged(
                    folder, f"{files.train} changed since the tokens were prepared"
                )
        # Every user of the machine could put other tokens there. A group may share a storage, and a file
        # server may show other owners.
        for path in (folder, *written):
            if path.stat().st_mode & stat.S_IWOTH:
                raise _damaged(folder, f"everybody can write to {path}")
        is_open = folder.parent.stat().st_mode & stat.S_IWOTH
        if is_open and folder.stat().st_uid not in (0, os.geteuid()):
            raise _damaged(
                folder,
                f"another user made it, and everybody can write to {folder.parent}",
            )
        digests = content_hashes(
            [stat_file(str(path), path.name) for path in written], str(folder)
        )
        for path, digest in zip(written, digests, strict=True):
            if digest != meta["hashes"][path.name]:
                raise _damaged(folder, f"{path.name} was altered")
    except OSError as error:
        raise _damaged(folder, f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{_META} cannot be understood") from error
    return files


def open_tokens(files: TokenFiles) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any]]:
    """Map the (training, validation) tokens into memory, read-only."""
    import numpy as np

    dtype = np.dtype(files.dtype).newbyteorder("<")
    return (
        np.memmap(files.train, dtype=dtype, mode="r", shape=(files.train_tokens,)),
        np.memmap(
            files.validation, dtype=dtype, mode="r", shape=(files.validation_tokens,)
        ),
    )


def tokens_of_a_pass(files: TokenFiles, training: TrainingConfig) -> int:
    """Count the training tokens of one pass over the corpus, in complete sequences.

    Raises:
        UserError: the corpus has too little text for such a run.
    """
    from ablate.data.batches import num_train_windows, num_validation_windows

    num_validation_windows(
        files.validation_tokens, training.seq_len, training.eval_tokens
    )
    return num_train_windows(files.train_tokens, training.seq_len) * training.seq_len


def _ready(
    folder: Path, corpus: DataIdentity, notice: Callable[[str], None] = lambda _: None
) -> TokenFiles | None:
    """Load the folder's token files; None unless they are complete and belong to this corpus."""
    try:
        files = load(folder)
    except UserError as error:
        if (folder / _META).exists():
            notice(f"{folder}: {error.problems[0].what}; the tokens are prepared anew.")
        return None
    is_moved = files.train.parent != folder and str(files.train) != corpus.train[0].path
    if is_moved or files.digest != corpus.digest:
        return None
    return files


def _make(
    data: DataConfig,
    corpus: DataIdentity,
    partial: Path,
    folder: Path,
    progress: OnProgress,
) -> TokenFiles:
    """Make the folder, first under the name ``partial``."""
    from ablate.data import tokenise

    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        if data.source == "tokens":
            write = tokenise.prepare_tokens
        else:
            write = tokenise.prepare_text
        meta = write(data, corpus, partial, progress)
        if (
            not (corpus.hub and corpus.hub.commit)
            and identify(data).digest != corpus.digest
        ):
            raise UserError(
                "the corpus changed while it was read (run again when nothing writes to it)"
            )
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        hashes = {path.name: hash_file(str(path)) for path in sorted(partial.iterdir())}
        identity = {"digest": corpus.digest, "vocab_size": corpus.vocab_size}
        meta |= {
            "format": _FORMAT,
            "hashes": hashes,
            "validation": "validation.bin",
            **identity,
        }
        write_record(partial / _META, meta)
        if folder.exists() and _ready(folder, corpus) is None:  # damaged
            aside = partial.with_name(f"{partial.name}.damaged")
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            if _ready(folder, corpus) is None:
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return load(folder)


def _damaged(folder: Path, what: str) -> UserError:
    hint = "start the study again: tokens are then prepared anew"
    return UserError(f"no usable token files: {what}", file=folder, hint=hint)
