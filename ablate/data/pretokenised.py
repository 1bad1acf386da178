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
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ablate.data.identity import Corpus
    from ablate.data.sources import SourceFile
    from ablate.data.tokenise import OnProgress
    from ablate.run.config import DataConfig

_CHUNK_TOKENS = 1 << 22
_ALL = 1 << 62
_NPY_MAGIC = b"\x93NUMPY"


def prepare_tokens(data: DataConfig, corpus: Corpus, folder: Path, progress: OnProgress) -> dict[str, Any]:
    """Write the required token files and return their part of ``meta.json``."""
    dtype = np.dtype(data.token_dtype).newbyteorder("<")
    total = sum(file.size for file in corpus.train) // dtype.itemsize
    if data.max_bytes is not None:
        total = min(total, max(1, data.max_bytes // dtype.itemsize))
    held_out = 0 if corpus.validation else held_out_size(total, AT_LEAST_TOKENS)
    if total - held_out < 1 or (held_out < 1 and not corpus.validation):
        hint = "add tokens to data.paths, or name others in data.validation_paths"
        raise UserError(f"too few tokens for a validation set: {total}", file=corpus.train[0].path, hint=hint)
    done = 0

    def checked(files: Sequence[SourceFile], start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Yield the tokens ``start`` to ``stop`` of the concatenated files."""
        nonlocal done
        before = 0
        for file in files:
            tokens = np.memmap(file.path, dtype, "r") if file.size else np.empty(0, dtype)
            if tokens[:4].tobytes().startswith(_NPY_MAGIC):
                hint = "write the bare numbers with array.tofile"
                raise UserError("is a NumPy file with a header", file=file.path, hint=hint)
            low, high = (min(max(at - before, 0), len(tokens)) for at in (start, stop))
            for at in range(low, high, _CHUNK_TOKENS):
                chunk = tokens[at : min(at + _CHUNK_TOKENS, high)]
                if int(chunk.max()) >= corpus.identity.vocab_size:
                    where = int(np.argmax(chunk >= corpus.identity.vocab_size))
                    what = f"token {at + where} has id {chunk[where]}, but data.vocab_size is "
                    what += str(corpus.identity.vocab_size)
                    raise UserError(what, file=file.path, hint="check vocab_size and token_dtype")
                yield chunk
                done += chunk.nbytes
                progress(min(1.0, done / max(1, corpus.identity.num_bytes)), "checking tokens")
            before += len(tokens)

    def write(name: str, chunks: Iterator[NDArray[Any]]) -> int:
        count = 0
        with (folder / name).open("wb") as file:
            for chunk in chunks:
                chunk.tofile(file)
                count += len(chunk)
        return count

    train = checked(corpus.train, 0, total - held_out)
    in_place = len(corpus.train) == 1
    train_tokens = sum(map(len, train)) if in_place else write("train.bin", train)
    validation = checked(corpus.train, total - held_out, total)
    if corpus.validation:
        validation = checked(corpus.validation, 0, _ALL)
    validation_tokens = write("validation.bin", validation)
    if not validation_tokens:
        raise UserError("no tokens", file=corpus.validation[0].path, hint="check the file")
    return {
        "train": corpus.train[0].path if in_place else "train.bin",
        "validation": "validation.bin",
        "in_place": [corpus.train[0].size, corpus.train[0].mtime_ns] if in_place else None,
        "dtype": data.token_dtype,
        "train_tokens": train_tokens,
        "validation_tokens": validation_tokens,
        "tokenizer": f"tokens as given, {corpus.identity.vocab_size} ids",
        "validation_bytes_per_token": None,
    }
