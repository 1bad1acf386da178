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

from ablate.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def leave_out(hashes: NDArray[np.uint64], validation_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the indices of training documents that are not validation documents too."""
    kept = np.flatnonzero(~np.isin(hashes, validation_hashes))
    if not len(kept) or not len(validation_hashes):
        empty = (
            "training text that is not validation text too" if len(validation_hashes) else "validation text"
        )
        hint = "check data.paths and data.validation_paths"
        raise UserError(Problem(what=f"there is no {empty}", hint=hint))
    return kept


def near_copies(train: Iterable[bytes], validation: Iterable[bytes]) -> NDArray[np.bool_]:
    """Return for each training document whether it is a near copy of validation text."""
    seen = {line for text in validation for line in _long_lines(text)}

    def share(text: bytes) -> float:
        lines = set(_long_lines(text))
        return sum(map(len, lines & seen)) / (sum(map(len, lines)) or 1)

    return np.array([share(text) >= NEAR_COPY for text in train], dtype=np.bool_)


def _long_lines(text: bytes) -> Iterator[bytes]:
    stripped = (line.strip() for line in text.split(b"\n"))
    return (line for line in stripped if len(line) >= LONG_LINE_BYTES)
