"""A part of the training text, and the jobs of workers: list its documents, pick some, make tokens.

A part is a file, or consecutive small files. Every job rereads its part from the source: that takes about a
thirtieth of the tokenising time, and a second copy of a large corpus would not fit on many disks. A job's
result depends only on the content of the part and its other arguments, not on the process, and is kept
under a name made from them (see ``kept``).

How it fails: ``UserError`` for unreadable text (see ``documents``) or a file that changed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.data.cache import find, keep, key_of
from ablate.data.documents import file_documents
from ablate.data.sources import SourceFile, stat_file
from ablate.data.split import DocumentTable, encoded, is_among, near_copies
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
class Listed:
    """The first documents of a part. The file holds the hashes of all listed documents, then lengths."""

    part: Part
    path: Path
    num_documents: int
    num_bytes: int

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the hash and the length in bytes of each document."""
        hashes, lengths = np.fromfile(self.path, dtype="<u8").reshape(2, -1)[:, : self.num_documents]
        return hashes.astype(np.uint64), lengths.astype(np.int64)

    def cut(self, num_bytes: int) -> Listed:
        """Return the shortest prefix with this many bytes of text; the part must have enough."""
        ends = np.cumsum(self.read()[1])
        last = int(np.searchsorted(ends, num_bytes))
        return replace(self, num_documents=last + 1, num_bytes=int(ends[last]))


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

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Return the tokens of texts, little-endian."""
        return _opened(self).encode(texts).astype(np.dtype(self.dtype).newbyteorder("<"))


def cut_into_parts(
    files: Sequence[tuple[SourceFile, str]], text_field: str | None, rules_version: int
) -> list[Part]:
    """Group files, each given with its content hash, into parts."""
    groups: list[list[tuple[SourceFile, str]]] = [[]]
    for entry in files:
        if sum(file.size for file, _ in groups[-1]) >= PART_BYTES:
            groups.append([])
        groups[-1].append(entry)
    return [
        Part(
            files=tuple(file for file, _ in group),
            text_field=text_field,
            key=key_of([rules_version, text_field, [content_hash for _, content_hash in group]]),
        )
        for group in groups
        if group
    ]


def read_part(part: Part, max_bytes: int | None, folder: Path, report: Report) -> Listed:
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
    return Listed(part=part, path=path, num_documents=record["documents"], num_bytes=record["text_bytes"])


def pick_documents(listed: Listed, wanted: Path, report: Report) -> list[tuple[int, bytes]]:
    """Return (hash, text) of the documents whose hash is in a file of sorted hashes."""
    hashes = listed.read()[0]
    picked = is_among(hashes, _mapped(wanted))
    return [
        (int(key), text)
        for key, text, take in zip(hashes, _texts(listed, report), picked, strict=True)
        if take
    ]


def learn_bpe(
    parts: Sequence[Listed], side: ValidationSide, vocab_size: int, folder: Path, report: Report
) -> int:
    """Learn a BPE from training documents, write its ``tokenizer.json`` and return its vocabulary size.

    ``report`` receives bytes of text.
    """

    def sample() -> Iterator[bytes]:
        before = 0
        for listed in parts:
            for texts, read, _ in _training_batches(listed, side):
                yield from texts
                report(before + read)
            before += listed.num_bytes

    tokenizer = train_bpe(sample(), vocab_size)
    tokenizer.save(folder)
    return tokenizer.vocab_size


def tokens_path(number: int, listed: Listed, side: ValidationSide, encoding: Encoding, folder: Path) -> Path:
    """Return the path of ``encode_part``'s tokens. The number distinguishes equal parts."""
    key = key_of([number, listed.part.key, listed.num_documents, side.key, encoding.key])
    return folder / f"{key}.tokens"


def encode_part(
    path: Path, listed: Listed, side: ValidationSide, encoding: Encoding, report: Report
) -> dict[str, int | str]:
    """Write the tokens of a part's training documents, and return the record; units are bytes of text."""

    def write(file: BinaryIO) -> dict[str, Any]:
        counts = {"tokens": 0, "documents": 0, "text_bytes": 0, "near_copies": 0}
        for texts, read, near in _training_batches(listed, side):
            if texts:
                ids = encoding.encode(texts)
                file.write(ids.tobytes())
                counts["tokens"] += len(ids)
            counts["documents"] += len(texts)
            counts["text_bytes"] += sum(map(len, texts))
            counts["near_copies"] += near
            report(read)
        return counts

    record = find(path) or keep(path, write)
    report(listed.num_bytes)
    return record


@lru_cache(maxsize=1)
def _opened(encoding: Encoding) -> Tokenizer:
    """Open a tokeniser once per process."""
    if encoding.tokenizer is None:
        return ByteTokenizer()
    return open_json(encoding.tokenizer, encoding.end_of_text)


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


def _training_batches(listed: Listed, side: ValidationSide) -> Iterator[tuple[list[bytes], int, int]]:
    """Yield a part's documents that are neither validation documents nor near copies of one.

    In batches: (texts, bytes of text read so far, near copies left out of this batch).
    """
    outside = iter(~is_among(listed.read()[0], _mapped(side.documents)))
    read = 0
    for texts in batches(_texts(listed, lambda _position: None)):
        read += sum(map(len, texts))
        candidates = [text for text, keep in zip(texts, islice(outside, len(texts)), strict=True) if keep]
        near = near_copies(candidates, _mapped(side.lines))
        yield list(compress(candidates, ~near)), read, int(near.sum())


def _texts(listed: Listed, report: Report) -> Iterator[bytes]:
    """Yield the documents of a part that was listed before."""
    part, found = listed.part, 0
    for text in islice(encoded(_documents(part, report), None), listed.num_documents):
        yield text
        found += 1
    _check_unchanged(part)
    if found < listed.num_documents:
        raise _changed(part.files[-1])


def _documents(part: Part, report: Report) -> Iterator[str]:
    before = 0
    for file in part.files:

        def read(position: int, before: int = before) -> None:
            report(before + position)

        yield from file_documents(file, part.text_field, read)
        before += file.size


def _check_unchanged(part: Part) -> None:
    """Reject files that changed since they were hashed, because results made from them would be kept."""
    for file in part.files:
        now = stat_file(file.path, file.name)
        if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
            raise _changed(file)


def _changed(file: SourceFile) -> UserError:
    hint = "run again when nothing writes to it"
    return UserError("the corpus changed while it was read", file=file.path, hint=hint)


@lru_cache(maxsize=2)
def _mapped(path: Path) -> NDArray[np.uint64]:
    """Map a file of hashes once per process; workers share its pages."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint64)
    return np.memmap(path, dtype="<u8", mode="r")
