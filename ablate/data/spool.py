"""Documents on disk, each with a content hash: the validation text of a preparation.

It is needed in another order than the source's, and twice: as tokens, and line by line to find near copies.
So it is written to one file of plain UTF-8, with a hash and a length per document in memory (16 bytes
per document). The hash ignores surrounding white space; documents of white space only are dropped.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def encoded(documents: Iterable[str], max_bytes: int | None) -> Iterator[bytes]:
    """Yield documents as UTF-8 until they total ``max_bytes``; the last one is kept whole."""
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
    """A hash and a length for each document."""

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
    """A file of documents: ``fill`` it once, then read any document by its index."""

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
        if not len(indices):
            return
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for index in indices:
                yield view[starts[index] : ends[index]]
