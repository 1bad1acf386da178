"""A part of the training text, and the jobs of workers: list its documents, pick some, make tokens.

A part is a file, or consecutive small files. Every job rereads its part from the source: that takes about a
thirtieth of the tokenising time, and a second copy of a large corpus would not fit on many disks. A job's
result depends only on the content of the part and its other arguments, not on the process, and is kept
under a name made from them (see ``kept``).

How it fails: ``UserError`` for unreadable text (see ``documents``) or a file that changed meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import Problem, UserError
from ablate.data.documents import json_documents, text_documents
from ablate.data.kept import find, keep, key_of
from ablate.data.sources import SourceFile, unreadable
from ablate.data.split import is_among, near_copies
from ablate.data.spool import DocumentTable, encoded
from ablate.data.tokenizer import ByteTokenizer, Tokenizer, open_json, train_bpe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

    from ablate.data.workers import Report

# Smaller files share a part. A core tokenises one in some seconds, which is the work that a kill can lose.
PART_BYTES = 16 << 20

_BATCH_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive files of the training text. ``text_field`` is None for plain text.

    ``key`` is a hash of their content and of the way it is read.
    """

    files: tuple[SourceFile, ...]
    text_field: str | None
    key: str

    @property
    def num_bytes(self) -> int:
        """Stored size in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, kw_only=True)
class PartTable:
    """The first documents of a part. The file holds the hashes of all listed documents, then lengths."""

    path: Path
    num_documents: int
    num_bytes: int

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the hash and the length in bytes of each document."""
        hashes, lengths = np.fromfile(self.path, dtype="<u8").reshape(2, -1)[:, : self.num_documents]
        return hashes.astype(np.uint64), lengths.astype(np.int64)

    def cut(self, num_bytes: int) -> PartTable:
        """Return the shortest prefix with this many bytes of text; the part must have enough."""
        ends = np.cumsum(self.read()[1])
        last = int(np.searchsorted(ends, num_bytes))
        return PartTable(path=self.path, num_documents=last + 1, num_bytes=int(ends[last]))


@dataclass(frozen=True, kw_only=True)
class ValidationSide:
    """Files of sorted hashes of the validation text: those of documents, and those of long lines."""

    documents: Path
    lines: Path
    key: str


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The conversion of text to tokens; ``tokenizer`` is a ``tokenizer.json``, or None for bytes."""

    tokenizer: Path | None
    end_of_text: str
    dtype: str
    key: str


def cut_into_parts(
    files: Sequence[tuple[SourceFile, str]], text_field: str | None, rules_version: int
) -> list[Part]:
    """Group files, each given with its content hash, into parts."""
    parts: list[Part] = []
    group: list[tuple[SourceFile, str]] = []
    for number, entry in enumerate(files, start=1):
        group.append(entry)
        if number == len(files) or sum(file.size for file, _ in group) >= PART_BYTES:
            key = key_of([rules_version, text_field, [content_hash for _, content_hash in group]])
            parts.append(Part(files=tuple(file for file, _ in group), text_field=text_field, key=key))
            group = []
    return parts


def read_part(part: Part, max_bytes: int | None, folder: Path, report: Report) -> PartTable:
    """List the documents of a part, up to ``max_bytes`` of text; ``report`` receives stored bytes."""
    path = folder / f"{key_of([part.key, max_bytes])}.documents"

    def write(file: BinaryIO) -> dict[str, Any]:
        table = DocumentTable()
        for text in encoded(_documents(part, report), max_bytes):
            table.add(text)
        _check_unchanged(part)
        file.write(table.hashes.astype("<u8").tobytes() + table.lengths.astype("<u8").tobytes())
        return {"documents": len(table.lengths), "text_bytes": table.num_bytes}

    record = find(path) or keep(path, write)
    report(part.num_bytes)
    return PartTable(path=path, num_documents=record["documents"], num_bytes=record["text_bytes"])


def pick_documents(part: Part, table: PartTable, wanted: Path, report: Report) -> list[tuple[int, bytes]]:
    """Return (hash, text) of the documents whose hash is in a file of sorted hashes."""
    hashes = table.read()[0]
    picked = is_among(hashes, _mapped(wanted))
    texts = _texts(part, len(hashes), report)
    return [(int(key), text) for key, text, take in zip(hashes, texts, picked, strict=True) if take]


def learn_bpe(
    listed: Sequence[tuple[Part, PartTable]],
    side: ValidationSide,
    vocab_size: int,
    folder: Path,
    report: Report,
) -> int:
    """Learn a BPE from training documents, write its ``tokenizer.json`` and return its vocabulary size.

    ``report`` receives bytes of text.
    """

    def sample() -> Iterator[bytes]:
        before = 0
        for part, table in listed:
            for batch in _training_batches(part, table, side):
                yield from batch.texts
                report(before + batch.num_bytes_read)
            before += table.num_bytes

    tokenizer = train_bpe(sample(), vocab_size)
    tokenizer.save(folder)
    return tokenizer.vocab_size


def encode_part(
    number: int,
    part: Part,
    table: PartTable,
    side: ValidationSide,
    encoding: Encoding,
    folder: Path,
    report: Report,
) -> dict[str, int | str]:
    """Write the tokens of a part's training documents, and return the record; units are bytes of text."""
    path = tokens_path(number, part, table, side, encoding, folder)

    def write(file: BinaryIO) -> dict[str, Any]:
        tokenizer = open_tokenizer(encoding)
        counts = {"tokens": 0, "documents": 0, "text_bytes": 0, "near_copies": 0}
        for batch in _training_batches(part, table, side):
            if batch.texts:
                ids = encode(tokenizer, batch.texts, encoding.dtype)
                file.write(ids.tobytes())
                counts["tokens"] += len(ids)
            counts["documents"] += len(batch.texts)
            counts["text_bytes"] += sum(map(len, batch.texts))
            counts["near_copies"] += batch.num_near_copies
            report(batch.num_bytes_read)
        return counts

    record = find(path) or keep(path, write)
    report(table.num_bytes)
    return record


def tokens_path(
    number: int, part: Part, table: PartTable, side: ValidationSide, encoding: Encoding, folder: Path
) -> Path:
    """Return the path of ``encode_part``'s tokens. The number distinguishes equal parts."""
    return folder / f"{key_of([number, part.key, table.num_documents, side.key, encoding.key])}.tokens"


@lru_cache(maxsize=1)
def open_tokenizer(encoding: Encoding) -> Tokenizer:
    """Open a tokeniser once per process."""
    if encoding.tokenizer is None:
        return ByteTokenizer()
    return open_json(encoding.tokenizer, encoding.end_of_text)


def encode(tokenizer: Tokenizer, texts: Sequence[bytes], dtype: str) -> NDArray[Any]:
    """Return the tokens of texts, little-endian."""
    return tokenizer.encode(texts).astype(np.dtype(dtype).newbyteorder("<"))


def batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield texts in lists of about 256 KiB: enough for a tokeniser's threads, with frequent progress."""
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


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Training documents, and the amounts read and left out since the previous batch."""

    texts: list[bytes]
    num_bytes_read: int
    num_near_copies: int


def _training_batches(part: Part, table: PartTable, side: ValidationSide) -> Iterator[_Batch]:
    """Yield the documents of a part that are neither validation documents nor near copies of one."""
    hashes = table.read()[0]
    outside = iter(~is_among(hashes, _mapped(side.documents)))
    lines = _mapped(side.lines)
    read = 0
    for texts in batches(_texts(part, len(hashes), lambda _position: None)):
        read += sum(map(len, texts))
        candidates = [text for text, keep in zip(texts, islice(outside, len(texts)), strict=True) if keep]
        near = near_copies(candidates, lines)
        kept = [text for text, is_near in zip(candidates, near, strict=True) if not is_near]
        yield _Batch(texts=kept, num_bytes_read=read, num_near_copies=int(near.sum()))


def _texts(part: Part, count: int, report: Report) -> Iterator[bytes]:
    """Yield the first ``count`` documents of a part that was listed before."""
    found = 0
    for text in islice(encoded(_documents(part, report), None), count):
        yield text
        found += 1
    _check_unchanged(part)
    if found < count:
        raise _changed(part.files[-1])


def _documents(part: Part, report: Report) -> Iterator[str]:
    before = 0
    for file in part.files:

        def read(position: int, before: int = before) -> None:
            report(before + position)

        if part.text_field is not None:
            yield from json_documents(file, part.text_field, read)
        else:
            yield from text_documents(file, read)
        before += file.size


def _check_unchanged(part: Part) -> None:
    """Reject files that changed since they were hashed, because results made from them would be kept."""
    for file in part.files:
        try:
            status = os.stat(file.path)  # noqa: PTH116  as in sources
        except OSError as error:
            raise unreadable(file.path, error) from error
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise _changed(file)


def _changed(file: SourceFile) -> UserError:
    hint = "run again when nothing writes to it"
    return UserError(Problem(file=file.path, what="the corpus changed while it was read", hint=hint))


@lru_cache(maxsize=2)
def _mapped(path: Path) -> NDArray[np.uint64]:
    """Map a file of hashes once per process; workers share its pages."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint64)
    return np.memmap(path, dtype="<u8", mode="r")
