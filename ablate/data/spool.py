"""Documents on disk between reading and tokenising, each with a hash of its content.

The split and the BPE need the whole corpus before the first token can be written. So the source is read
once, into one file of plain UTF-8, with a hash and a length per document in memory (16 bytes each). The
hash leaves surrounding white space out; documents of nothing else are dropped.
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


class Spool:
    """A file of documents: ``fill`` once, then read any of them by their index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._hashes = array("Q")
        self._lengths = array("Q")

    def fill(self, documents: Iterable[str], max_bytes: int | None) -> None:
        """Write documents until there are ``max_bytes`` of them; the last one is kept whole."""
        with self.path.open("wb") as file:
            for document in documents:
                text = document.encode("utf-8", "replace")  # JSON can hold lone surrogates
                core = text.strip()
                if not core:
                    continue
                file.write(text)
                digest = hashlib.blake2b(core, digest_size=8).digest()
                self._hashes.append(int.from_bytes(digest, "big"))
                self._lengths.append(len(text))
                self.num_bytes += len(text)
                if max_bytes is not None and self.num_bytes >= max_bytes:
                    break

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """One content hash per document, in the order of the source."""
        return np.array(self._hashes, dtype=np.uint64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each document."""
        return np.array(self._lengths, dtype=np.int64)

    def texts(self, indices: NDArray[np.int64]) -> Iterator[bytes]:
        """Yield documents in the order of ``indices``."""
        if not len(indices):
            return
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for index in indices:
                yield view[starts[index] : ends[index]]
