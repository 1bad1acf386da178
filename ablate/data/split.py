"""The split of documents into training text and validation text, without overlap.

A document's side depends on its content hash, so copies of a document are always on the same side.
Documents are sorted by that hash, and the first ones are held out until they reach 1.5 % of the text,
or 384 KiB if that is more, but at most 10 %. (384 KiB suffice for the default ``eval_tokens`` of 65,536 with
any usual tokeniser.) Validation text holds each document once.

Validation text given by the user stays complete, and its documents are left out of training.

In both cases near copies are left out of training too, such as a review posted twice with another signature,
or a generated table with a few other entries. A training document is a near copy if at least half of its long
lines, by bytes, occur in validation documents. Real corpora show a gap: documents share under a tenth (a
licence, a quotation) or over a half.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from contextlib import nullcontext
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from ablate.base.errors import UserError
from ablate.data.identity import held_out_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

NEAR_COPY = 0.5
LONG_LINE_BYTES = 32


def encoded(documents: Iterable[str], max_bytes: int | None) -> Iterator[bytes]:
    """Yield documents as UTF-8 until they total ``max_bytes``; the last one is kept whole.

    Documents of white space only are dropped.
    """
    num_bytes = 0
    for document in documents:
        text = document.encode("utf-8", "replace")  # JSON can hold lone surrogates
        if not text.strip():
            continue
        yield text
        num_bytes += len(text)
        if max_bytes is not None and num_bytes >= max_bytes:
            return


def hash_all(texts: Iterable[bytes]) -> Hashes:
    """Return a hash of each text that, unlike Python's own, is the same in every process."""
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


class Documents:
    """``hashes`` [documents] without surrounding white space, ``lengths`` [documents] in bytes.

    With a path also the texts, in that file: validation text is needed in another order than the source's,
    and twice, as tokens and line by line. In memory are 16 bytes for each document.
    """

    def __init__(self, texts: Iterable[bytes], path: Path | None = None) -> None:
        digests, lengths = bytearray(), array("q")
        with path.open("wb") if path else nullcontext() as file:
            for text in texts:
                digests += hashlib.blake2b(text.strip(), digest_size=8).digest()
                lengths.append(len(text))
                if file:
                    file.write(text)
        self.hashes: Hashes = np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64)
        self.lengths: NDArray[np.int64] = np.array(lengths, dtype=np.int64)
        self._path = path

    def texts(self, indices: Iterable[int]) -> Iterator[bytes]:
        """Yield documents in the order of ``indices``."""
        ends = np.cumsum(self.lengths).tolist()
        assert self._path is not None
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for index in indices:
                yield view[ends[index] - self.lengths[index] : ends[index]]


def hold_out(hashes: Hashes, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the validation documents, sorted by hash: the beginning is a fair sample, too."""
    distinct, first = np.unique(hashes, return_index=True)
    if len(distinct) < 2:
        raise UserError(
            f"too little text for a validation set: {len(distinct)} distinct documents",
            hint="add text to data.paths, or name other text in data.validation_paths",
        )
    wanted = held_out_size(int(lengths.sum()))
    count = int(np.searchsorted(np.cumsum(lengths[first]), wanted)) + 1
    return first[: min(count, len(distinct) - 1)]


class ValidationSide:
    """What training text must not have: sorted hashes of the validation documents and of their long lines."""

    def __init__(self, validation: Documents) -> None:
        self.documents: Hashes = np.unique(validation.hashes)
        lines = (hash_all(_long_lines(text)) for text in validation.texts(range(len(validation.lengths))))
        self.lines: Hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *lines]))

    def leave_out(self, texts: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Return those texts that are training documents, and the number of near copies left out."""
        known = _is_among(hash_all(text.strip() for text in texts), self.documents)
        others = list(compress(texts, ~known))
        near = self.near_copies(others)
        return list(compress(others, ~near)), int(near.sum())

    def near_copies(self, texts: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return for each text whether half of its long lines, by bytes, are validation text's."""
        lines = [(number, line) for number, text in enumerate(texts) for line in set(_long_lines(text))]
        owners = np.array([number for number, _ in lines], dtype=np.int64)
        lengths = np.array([len(line) for _, line in lines], dtype=np.float64)
        shared = _is_among(hash_all(line for _, line in lines), self.lines)
        total_bytes, shared_bytes = (
            np.bincount(owners, weights, minlength=len(texts)) for weights in (lengths, lengths * shared)
        )
        return shared_bytes >= NEAR_COPY * np.maximum(total_bytes, 1)


def _is_among(hashes: Hashes, sorted_hashes: Hashes) -> NDArray[np.bool_]:
    if not len(sorted_hashes):
        return np.zeros(len(hashes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
    return np.asarray(sorted_hashes[places] == hashes)


def _long_lines(text: bytes) -> Iterator[bytes]:
    stripped = (line.strip() for line in text.split(b"\n"))
    return (line for line in stripped if len(line) >= LONG_LINE_BYTES)
