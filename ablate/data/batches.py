"""The order of data: which sequence is in which step, as a pure function of the seed and the step.

Nothing is kept between steps, so a resumed run continues exactly, and arms with the same seed see the same
sequences. The training tokens are cut into windows of ``seq_len`` with one more token for the last target.
Each epoch takes every window once, in an order that comes from Philox keyed by a hash of the seed, the
name of this stream and the epoch. The order sorts raw generator output, whose bits numpy promises to
keep, rather than ``Generator.permutation``, which it does not.

Fails with ``UserError`` when there are fewer tokens than one sequence, or than the evaluation asks for.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ablate.base.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def num_train_windows(num_train_tokens: int, seq_len: int) -> int:
    """Return how many sequences an epoch has.

    Raises:
        UserError: not even one.
    """
    windows = (num_train_tokens - 1) // seq_len
    if windows < 1:
        what = f"the training text has {num_train_tokens} tokens, less than one sequence of {seq_len} + 1"
        raise UserError(Problem(what=what, hint="lower training.seq_len or add text"))
    return windows


def num_validation_windows(num_validation_tokens: int, seq_len: int, eval_tokens: int) -> int:
    """Return how many sequences an evaluation has: enough for ``eval_tokens`` predicted tokens.

    Raises:
        UserError: the validation text is shorter than that.
    """
    windows = -(-eval_tokens // seq_len)
    there = max(0, (num_validation_tokens - 1) // seq_len)
    if windows > there:
        what = (
            f"the validation text has {num_validation_tokens} tokens, but training.eval_tokens asks for "
            f"{windows} sequences of {seq_len} + 1"
        )
        hint = f"lower training.eval_tokens to {there * seq_len} or less, or name more data.validation_paths"
        raise UserError(Problem(what=what, hint=hint if there else "lower training.seq_len or add text"))
    return windows


def sequence_starts(
    seed: int, step: int, batch_size: int, seq_len: int, num_train_tokens: int
) -> NDArray[np.int64]:
    """Return the first token of each sequence of a step (steps count from 0).

    A micro-batch is a slice of the result. A batch may reach into the next epoch.
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


def batch(tokens: NDArray[Any], starts: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return ``[sequences, seq_len + 1]`` ids: inputs are all but the last, targets all but the first."""
    columns = np.arange(seq_len + 1, dtype=np.int64)
    return np.asarray(tokens[starts[:, None] + columns], dtype=np.int64)


def validation_batches(
    tokens: NDArray[Any],
    seq_len: int,
    eval_tokens: int,
    batch_size: int,
    *,
    which: Literal["spread", "first"] = "spread",
) -> Iterator[NDArray[np.int64]]:
    """Yield the same windows for every run, in order: spread evenly over the validation tokens, or the first.

    Spread, because the first ones may all lie in one document, whose loss says little of the others; the
    first, to evaluate on what others evaluated on. The last batch may be smaller; every token counts alike
    only if the caller weights by tokens.
    """
    windows = num_validation_windows(len(tokens), seq_len, eval_tokens)
    there = windows if which == "first" else (len(tokens) - 1) // seq_len
    starts = np.arange(windows, dtype=np.int64) * there // windows * seq_len
    for first in range(0, windows, batch_size):
        yield batch(tokens, starts[first : first + batch_size], seq_len)
