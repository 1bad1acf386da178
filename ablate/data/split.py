"""Which documents are training text and which are validation text: never both.

A document's side depends on the hash of its content, so copies of a document are always on the same side.
Documents are ordered by that hash, and the first of them are held out until they reach 1.5 % of the text,
or 384 KiB where that is more, but not above 10 %. (384 KiB give the default ``eval_tokens`` of 65,536 with
any usual tokeniser.) Validation text holds each document once.

With validation text of its own, that text stays whole, and its documents are left out of training.

Either way near copies are left out of training too: a review posted twice with another signature, a
generated table with a few other entries. A training document is one if at least half of its long lines, by
bytes, stand in validation documents. Real corpora show a gap there: documents share under a tenth (a
licence, a quotation) or over a half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ablate.base.errors import Problem, UserError
from ablate.data.spool import hash_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

HELD_OUT = 0.015
HELD_OUT_AT_MOST = 0.1
HELD_OUT_AT_LEAST_BYTES = 384 * 1024

NEAR_COPY = 0.5
LONG_LINE_BYTES = 32


def held_out_size(total: int, at_least: int = HELD_OUT_AT_LEAST_BYTES) -> int:
    """Return how much of ``total`` to hold out."""
    return int(max(HELD_OUT * total, min(at_least, HELD_OUT_AT_MOST * total)))


def hold_out(
    hashes: NDArray[np.uint64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of (training, validation) documents.

    Training documents keep their order and their copies; validation documents come in the order of their
    hashes, which is a mixture of the source, so that its beginning is as good a sample as the whole.
    """
    distinct, first = np.unique(hashes, return_index=True)
    if len(distinct) < 2:
        raise UserError(
            Problem(
                what=f"too little text for a validation set: {len(distinct)} distinct documents",
                hint="add text to data.paths, or name other text in data.validation_paths",
            )
        )
    sizes = np.cumsum(lengths[first])
    wanted = held_out_size(int(lengths.sum()))
    count = min(int(np.searchsorted(sizes, wanted)) + 1, len(distinct) - 1)
    return np.flatnonzero(hashes > distinct[count - 1]), first[:count]


def line_hashes(texts: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the hashes of all long lines, each once, sorted: what ``near_copies`` compares with.

    Hashes and not lines, because validation text may be large, and every worker needs them.
    """
    return np.unique(
        np.concatenate([np.empty(0, np.uint64), *(hash_all(_long_lines(text)) for text in texts)])
    )


def near_copies(texts: Sequence[bytes], seen: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each training document whether it is a near copy of validation text.

    ``seen`` is what ``line_hashes`` returned for that text.
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
    """Return which hashes occur in the sorted ones, which may be a memory map."""
    if not len(sorted_hashes):
        return np.zeros(len(hashes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
    return np.asarray(sorted_hashes[places] == hashes)


def _long_lines(text: bytes) -> Iterator[bytes]:
    stripped = (line.strip() for line in text.split(b"\n"))
    return (line for line in stripped if len(line) >= LONG_LINE_BYTES)
