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
    """Return the part of ``total`` to hold out, in the same unit."""
    return int(max(HELD_OUT * total, min(at_least, HELD_OUT_AT_MOST * total)))


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
