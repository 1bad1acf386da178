"""Token files of the user: flat little-endian uint16 or uint32, without a header.

A single training file is used in place by memory map and never copied, because it may be hundreds of GB.
Several are joined in the cache. Without validation files the last part is held out, by the same shares
as text, and training ends before it. Every id is checked once against the vocabulary, because an id that is
too large would crash in the middle of a run (on a GPU by an illegal memory access).

How it fails: ``UserError`` for an id outside the vocabulary (with file and position), a NumPy ``.npy`` file
(its header would be read as tokens) or too few tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.data.identity import AT_LEAST_TOKENS, held_out_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ablate.data.identity import Corpus
    from ablate.data.sources import SourceFile
    from ablate.data.tokenise import OnProgress
    from ablate.run.config import DataConfig

_CHUNK_TOKENS = 1 << 22
_NPY_MAGIC = b"\x93NUMPY"


def prepare_tokens(data: DataConfig, corpus: Corpus, folder: Path, progress: OnProgress) -> dict[str, Any]:
    """Write the required token files and return their part of ``meta.json``."""
    parts = [_map(file, data.token_dtype) for file in corpus.train]
    limit = None if data.max_bytes is None else max(1, data.max_bytes // parts[0].itemsize)
    total = sum(map(len, parts)) if limit is None else min(limit, sum(map(len, parts)))
    held_out = 0 if corpus.validation else held_out_size(total, AT_LEAST_TOKENS)
    if total - held_out < 1 or (held_out < 1 and not corpus.validation):
        hint = "add tokens to data.paths, or name others in data.validation_paths"
        raise UserError(f"too few tokens for a validation set: {total}", file=corpus.train[0].path, hint=hint)
    done = 0

    def checked(files: tuple[SourceFile, ...], start: int, stop: int | None) -> Iterator[NDArray[Any]]:
        nonlocal done
        for chunk in _chunks(files, data.token_dtype, corpus.identity.vocab_size, start, stop):
            yield chunk
            done += chunk.nbytes
            progress(min(1.0, done / max(1, corpus.identity.num_bytes)), "checking tokens")

    in_place = len(corpus.train) == 1
    train_chunks = checked(corpus.train, 0, total - held_out)
    if in_place:
        train_path = corpus.train[0].path
        for _ in train_chunks:
            pass
    else:
        train_path = "train.bin"
        _write(folder / train_path, train_chunks)
    if corpus.validation:
        validation_chunks = checked(corpus.validation, 0, None)
    else:
        validation_chunks = checked(corpus.train, total - held_out, total)
    validation_tokens = _write(folder / "validation.bin", validation_chunks)
    if not validation_tokens:
        raise UserError("no tokens", file=corpus.validation[0].path, hint="check the file")
    return {
        "train": train_path,
        "validation": "validation.bin",
        "in_place": [corpus.train[0].size, corpus.train[0].mtime_ns] if in_place else None,
        "dtype": data.token_dtype,
        "train_tokens": total - held_out,
        "validation_tokens": validation_tokens,
        "tokenizer": f"tokens as given, {corpus.identity.vocab_size} ids",
        "validation_bytes_per_token": None,
    }


def _map(file: SourceFile, dtype: str) -> NDArray[Any]:
    if not file.size:
        return np.empty(0, dtype=dtype)
    return np.memmap(file.path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _chunks(
    files: tuple[SourceFile, ...], dtype: str, vocab_size: int, start: int, stop: int | None
) -> Iterator[NDArray[Any]]:
    """Yield the checked tokens ``start`` to ``stop`` of the concatenated files."""
    before = 0
    for file in files:
        tokens = _map(file, dtype)
        if tokens[:4].tobytes().startswith(_NPY_MAGIC):
            hint = "write the bare numbers with array.tofile"
            raise UserError("is a NumPy file with a header", file=file.path, hint=hint)
        low = min(max(start - before, 0), len(tokens))
        high = len(tokens) if stop is None else min(max(stop - before, 0), len(tokens))
        for at in range(low, high, _CHUNK_TOKENS):
            chunk = tokens[at : min(at + _CHUNK_TOKENS, high)]
            if int(chunk.max()) >= vocab_size:
                where = int(np.argmax(chunk >= vocab_size))
                what = f"token {at + where} has id {chunk[where]}, but data.vocab_size is {vocab_size}"
                raise UserError(what, file=file.path, hint="check vocab_size and token_dtype")
            yield chunk
        before += len(tokens)


def _write(path: Path, chunks: Iterator[NDArray[Any]]) -> int:
    count = 0
    with path.open("wb") as file:
        for chunk in chunks:
            chunk.tofile(file)
            count += len(chunk)
    return count
