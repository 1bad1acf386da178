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
from typing import TYPE_CHECKING

import numpy as np

from ablate.base.errors import UserError
from ablate.data.held_out import held_out_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

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


def hash_all(texts: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return a hash of each text that, unlike Python's own, is the same in every process."""
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


class DocumentTable:
    """A hash and a length for each document; the hash ignores surrounding white space."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._lengths = array("q")
        self.num_bytes = 0

    def add(self, text: bytes) -> None:
        """Add a document."""
        self._hashes += hashlib.blake2b(text.strip(), digest_size=8).digest()
        self._lengths.append(len(text))
        self.num_bytes += len(text)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """One content hash per document, in the order of the source."""
        return np.frombuffer(bytes(self._hashes), dtype=">u8").astype(np.uint64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each document."""
        return np.array(self._lengths, dtype=np.int64)


class Spool(DocumentTable):
    """A file of documents: ``fill`` it once, then read any document by its index.

    Validation text is needed in another order than the source's, and twice: as tokens, and line by line to
    find near copies. In memory are 16 bytes per document.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def fill(self, texts: Iterable[bytes]) -> None:
        """Write documents."""
        with self.path.open("wb") as file:
            for text in texts:
                file.write(text)
                self.add(text)

    def texts(self, indices: NDArray[np.int64]) -> Iterator[bytes]:
        """Yield documents in the order of ``indices``."""
        if not len(indices):  # an empty file cannot be mapped
            return
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for index in indices:
                yield view[starts[index] : ends[index]]


def hold_out(
    hashes: NDArray[np.uint64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of (training, validation) documents.

    Training documents keep their order and their copies. Validation documents are sorted by hash, which
    mixes the source, so that the beginning is as good a sample as the whole.
    """
    distinct, first = np.unique(hashes, return_index=True)
    if len(distinct) < 2:
        raise UserError(
            f"too little text for a validation set: {len(distinct)} distinct documents",
            hint="add text to data.paths, or name other text in data.validation_paths",
        )
    sizes = np.cumsum(lengths[first])
    wanted = held_out_size(int(lengths.sum()))
    count = min(int(np.searchsorted(sizes, wanted)) + 1, len(distinct) - 1)
    return np.flatnonzero(hashes > distinct[count - 1]), first[:count]


def line_hashes(texts: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the sorted unique hashes of all long lines, for ``near_copies``.

    Hashes instead of lines, because validation text may be large and every worker needs them.
    """
    return np.unique(
        np.concatenate([np.empty(0, np.uint64), *(hash_all(_long_lines(text)) for text in texts)])
    )


def near_copies(texts: Sequence[bytes], seen: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each training document whether it is a near copy of validation text.

    ``seen`` is the result of ``line_hashes`` for the validation text.
    """
    lines = [(number, line) for number, text in enumerate(texts) for line in set(_long_lines(text))]
    owners = np.array([number for number, _ in lines], dtype=np.int64)
    lengths = np.array([len(line) for _, line in lines], dtype=np.float64)
    shared = is_among(hash_all(line for _, line in lines), seen)
    total_bytes, shared_bytes = (
        np.bincount(owners, weights, minlength=len(texts)) for weights in (lengths, lengths * shared)
    )
    return shared_bytes >= NEAR_COPY * np.maximum(total_bytes, 1)


def is_among(hashes: NDArray[np.uint64], sorted_hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each hash whether it occurs in the sorted hashes, which may be a memory map."""
    if not len(sorted_hashes):
        return np.zeros(len(hashes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
    return np.asarray(sorted_hashes[places] == hashes)


def _long_lines(text: bytes) -> Iterator[bytes]:
    stripped = (line.strip() for line in text.split(b"\n"))
    return (line for line in stripped if len(line) >= LONG_LINE_BYTES)
