import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data.batches import (
    _epoch_order,
    batch,
    num_train_windows,
    num_validation_windows,
    sequence_starts,
    validation_batches,
)

WINDOWS = 37
NUM_TOKENS = 8 * WINDOWS + 5  # 4 tokens over


def starts(step, seed=0, batch_size=6):
    return sequence_starts(seed, step, batch_size, 8, NUM_TOKENS).tolist()


def test_every_window_once_per_epoch_whatever_the_batch_size_and_each_epoch_in_its_order():
    def epochs(seed, batch_size):
        steps = range(333 // batch_size + 1)
        stream = np.ravel([starts(step, seed, batch_size) for step in steps])
        return stream[: WINDOWS * 3].reshape(3, WINDOWS).tolist()

    orders = [tuple(epoch) for seed in range(5) for epoch in epochs(seed, 6)]
    assert all(sorted(epoch) == [n * 8 for n in range(WINDOWS)] for epoch in orders)
    assert len(set(orders)) == 15
    assert all([*map(tuple, epochs(0, size))] == orders[:3] for size in (1, 37, 100))


def test_a_step_is_a_pure_function_of_seed_and_step():
    expected = [starts(step) for step in range(30)]
    for step in (29, 3, 17, 6, 7):
        _epoch_order.cache_clear()
        assert starts(step) == expected[step]
    # Literal values: a change here breaks the resumption and the comparability of runs.
    assert starts(0) == [128, 168, 192, 56, 216, 32]
    assert starts(6, seed=7) == [288, 136, 288, 168, 232, 160]


def test_the_last_target_exists():
    assert [num_train_windows(8 * 37 + more, 8) for more in (0, 1)] == [36, 37]
    tokens = np.arange(8 * 37 + 1, dtype=np.uint16)
    rows = batch(tokens, sequence_starts(0, 0, 37, 8, len(tokens)), 8)
    assert rows.dtype == np.int64
    order = rows[:, 0].argsort()
    assert (rows[order] == np.arange(0, 296, 8)[:, None] + np.arange(9)).all()


def test_validation_windows_are_spread_over_the_whole_text_or_the_first():
    def rows(count, eval_tokens, **which):
        batches = list(validation_batches(np.arange(count), 8, eval_tokens, 5, **which))
        assert {len(windows) for windows in batches[:-1]} == {5}
        return np.concatenate(batches)

    spread = rows(1000, 100)
    assert spread.shape == (num_validation_windows(1000, 8, 104), 9) == (13, 9)
    assert (spread[:, 1:] == spread[:, :-1] + 1).all()
    assert spread[0, 0] == 0
    assert (spread[:, 0] % 8 == 0).all()
    assert set(np.diff(spread[:, 0])) <= {9 * 8, 10 * 8}  # 124 windows over 13
    assert rows(1000, 100, which="first")[:, :-1].ravel().tolist() == list(range(104))
    assert rows(81, 80)[:, :-1].ravel().tolist() == list(range(80))


def test_too_little_text_is_named():
    said = r"the training text has 8 tokens, less than one sequence of 8 \+ 1"
    with pytest.raises(UserError, match=said):
        sequence_starts(0, 0, 1, 8, 8)
    assert num_validation_windows(50, 8, 48) == 6
    with pytest.raises(UserError, match="to 48 or less"):
        num_validation_windows(50, 8, 49)
