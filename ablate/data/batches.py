"""The order of data: the sequences of each step, as a pure function of the seed and the step.

No state is kept between steps, so a resumed run continues exactly, and arms with the same seed see the same
sequences. The training tokens are cut into windows of ``seq_len`` with one more token for the last target.
Each epoch takes every window once, in an order from Philox, keyed by a hash of the seed, the name of this
stream and the epoch. The order sorts raw generator output, because numpy guarantees its bits, but not those
of ``Generator.permutation``.

How it fails: ``UserError`` if there are fewer tokens than one sequence or than the evaluation needs.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def num_train_windows(num_train_tokens: int, seq_len: int) -> int:
    """Count the sequences of one epoch.

    Raises:
        UserError: the text is shorter than one sequence.
    """
    windows = (num_train_tokens - 1) // seq_len
    if windows < 1:
        raise UserError(
            f"the training text has {num_train_tokens} tokens, less than one sequence of {seq_len} + 1",
            hint="lower training.seq_len or add text",
        )
    return windows


def num_validation_windows(
    num_validation_tokens: int, seq_len: int, eval_tokens: int
) -> int:
    """Count the sequences of one evaluation, enough for ``eval_tokens`` predicted tokens.

    Raises:
        UserError: the validation text is too short.
    """
    windows = -(-eval_tokens // seq_len)
    there = max(0, (num_validation_tokens - 1) // seq_len)
    if windows > there:
        hint = "lower training.seq_len or add text"
        if there:
            hint = f"lower training.eval_tokens to {there * seq_len} or less, or name more data.validation_paths"
        raise UserError(
            f"the validation text has {num_validation_tokens} tokens, but training.eval_tokens asks for "
            f"{windows} sequences of {seq_len} + 1",
            hint=hint,
        )
    return windows


def sequence_starts(
    seed: int, step: int, batch_size: int, seq_len: int, num_train_tokens: int
) -> NDArray[np.int64]:
    """Choose the sequences of a step (counted from 0) by the index of their first tokens [batch_size].

    A micro-batch is a slice of the result. A batch may continue into the next epoch.
    """
    windows = num_train_windows(num_train_tokens, seq_len)
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, places = np.divmod(positions, windows)
    order = np.empty(batch_size, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        inside = epochs == epoch
        order[inside] = _epoch_order(seed, epoch, windows)[places[inside]]
    return order * seq_len


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    key = hashlib.sha256(f"data order/{seed}/{epoch}".encode()).digest()
    words = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(windows)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False  # the memory is shared between calls
    return order


def batch(
    tokens: NDArray[Any], starts: NDArray[np.int64], seq_len: int
) -> NDArray[np.int64]:
    """Read ids ``[sequences, seq_len + 1]``: inputs are all but the last, targets all but the first."""
    columns = np.arange(seq_len + 1, dtype=np.int64)
    return np.asarray(tokens[starts[:, None] + columns], dtype=np.int64)


def validation_batches(
    tokens: NDArray[Any],
    seq_len: int,
    eval_tokens: int,
    batch_size: int,
    which: Literal["spread", "first"] = "spread",
) -> Iterator[NDArray[np.int64]]:
    """Yield the same windows for every run, in order: spread evenly over the validation tokens, or the first.

    With ``spread`` the windows are not all in one document, whose loss may be untypical; ``first`` allows
    comparison with evaluations that used the first windows. The last batch may be smaller, so the caller must
    weight by tokens.
    """
    windows = num_validation_windows(len(tokens), seq_len, eval_tokens)
    there = windows if which == "first" else (len(tokens) - 1) // seq_len
    starts = np.arange(windows, dtype=np.int64) * there // windows * seq_len
    for first in range(0, windows, batch_size):
        yield batch(tokens, starts[first : first + batch_size], seq_len)
