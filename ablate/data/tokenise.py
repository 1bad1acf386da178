"""The way from files of text to the two token files: read, split, learn the tokeniser, encode.

Kept apart from ``prepare``, which is about the folder's life. The tokeniser learns from training documents
only: merges learnt on validation text would flatter the validation loss.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.data import hub
from ablate.data.documents import json_documents, text_documents
from ablate.data.split import hold_out, leave_out, near_copies
from ablate.data.spool import Spool
from ablate.data.tokenizer import BPE_SAMPLE_BYTES, ByteTokenizer, Tokenizer, open_hf, train_bpe
from ablate.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ablate.config import DataConfig
    from ablate.data.identity import Corpus
    from ablate.data.prepare import Progress
    from ablate.data.sources import SourceFile
    from ablate.data.token_files import TokenType

_BATCH_BYTES = 1 << 20

# Shares of the progress bar.
_READ, _COMPARED, _LEARNT = 0.2, 0.3, 0.5


def prepare_text(data: DataConfig, corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write ``train.bin`` and ``validation.bin`` and return their part of ``meta.json``."""
    text, validation_text = Spool(folder / "text.spool"), Spool(folder / "validation.spool")
    total = max(1, corpus.identity.num_bytes)
    text.fill(_read(data, corpus, _stage(progress, 0.0, _READ, "reading text", total)), data.max_bytes)
    if data.validation_paths:
        documents = _read_validation(data, corpus, lambda _done: progress(_READ, "reading validation text"))
        validation_text.fill(documents, data.max_bytes)
        train = leave_out(text.hashes, validation_text.hashes)
        validation = np.arange(len(validation_text.hashes))
    else:
        train, validation = hold_out(text.hashes, text.lengths)
        validation_text = text
    compared = _stage(progress, _READ, _COMPARED, "comparing both sides", text.num_bytes)
    near = near_copies(_counted(text.texts(train), compared), validation_text.texts(validation))
    own_sides = len(train) + (len(validation) if validation_text is text else 0)
    copies = len(text.hashes) - own_sides
    train = train[~near]
    if not len(train):
        hint = "check data.paths and data.validation_paths"
        raise UserError(Problem(what="all training text is nearly the same as validation text", hint=hint))
    tokenizer = _tokenizer(data, corpus, text, train, progress)
    tokenizer.save(folder)
    dtype: TokenType = "uint16" if corpus.identity.vocab_size <= 1 << 16 else "uint32"
    num_train_bytes = int(text.lengths[train].sum())
    num_validation_bytes = int(validation_text.lengths[validation].sum())
    encoded = _stage(progress, _LEARNT, 1.0, "tokenising", num_train_bytes + num_validation_bytes)
    validation_tokens = _encode(
        tokenizer, validation_text.texts(validation), folder / "validation.bin", dtype, encoded
    )
    train_tokens = _encode(
        tokenizer, text.texts(train), folder / "train.bin", dtype, lambda n: encoded(num_validation_bytes + n)
    )
    meta = {
        "train": "train.bin",
        "validation": "validation.bin",
        "in_place": None,
        "dtype": dtype,
        "train_tokens": train_tokens,
        "validation_tokens": validation_tokens,
        "tokenizer": tokenizer.description,
        "validation_bytes_per_token": num_validation_bytes / validation_tokens,
        "train_bytes": num_train_bytes,
        "validation_bytes": num_validation_bytes,
        "train_documents": len(train),
        "validation_documents": len(validation),
        "copies_left_out": copies,
        "near_copies_left_out": int(near.sum()),
    }
    for spool in (folder / "text.spool", folder / "validation.spool"):
        spool.unlink(missing_ok=True)
    return meta


def _read(data: DataConfig, corpus: Corpus, report: Callable[[int], None]) -> Iterator[str]:
    if corpus.hub:
        done = 0
        for document in hub.documents(corpus.hub, hub.TRAIN_SPLIT, data.text_field):
            yield document
            done += len(document)
            report(done)
    else:
        yield from _documents(data, corpus.train, report)


def _read_validation(data: DataConfig, corpus: Corpus, report: Callable[[int], None]) -> Iterator[str]:
    if corpus.hub:
        split = corpus.hub.validation_split
        assert split is not None
        for document in hub.documents(corpus.hub, split, data.text_field):
            yield document
            report(0)
    else:
        yield from _documents(data, corpus.validation, report)


def _documents(data: DataConfig, files: Sequence[SourceFile], report: Callable[[int], None]) -> Iterator[str]:
    if data.source != "jsonl":
        # By a hash of the name, so that with max_bytes a folder gives a mixture and not its first letters.
        files = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    before = 0
    for file in files:

        def read(position: int, before: int = before) -> None:
            report(before + position)

        if data.source == "jsonl":
            yield from json_documents(file, data.text_field, read)
        else:
            yield from text_documents(file, read)
        before += file.size


def _tokenizer(
    data: DataConfig, corpus: Corpus, text: Spool, train: NDArray[np.int64], progress: Progress
) -> Tokenizer:
    if corpus.hf:
        return open_hf(corpus.hf)
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    what = "learning the BPE"
    report = _stage(progress, _COMPARED, _LEARNT, what, min(text.num_bytes, BPE_SAMPLE_BYTES))
    return train_bpe(_counted(text.texts(train), report), corpus.identity.vocab_size)


def _counted(texts: Iterable[bytes], report: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    for text in texts:
        yield text
        done += len(text)
        report(done)


def _encode(
    tokenizer: Tokenizer, texts: Iterable[bytes], path: Path, dtype: str, report: Callable[[int], None]
) -> int:
    """Write the tokens of all texts and return how many they are."""
    count = done = 0
    little_endian = np.dtype(dtype).newbyteorder("<")
    with path.open("wb") as file:
        for batch in _batches(texts):
            ids = tokenizer.encode(batch).astype(little_endian)
            ids.tofile(file)
            count += len(ids)
            done += sum(map(len, batch))
            report(done)
    return count


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _stage(progress: Progress, low: float, high: float, what: str, total: int) -> Callable[[int], None]:
    """Return a callback that turns units done of one stage into the fraction of the whole."""

    def report(done: int) -> None:
        progress(low + (high - low) * min(1.0, done / max(1, total)), what)

    return report
