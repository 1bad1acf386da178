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

SEQ_LEN = 8
NUM_TOKENS = 8 * 37 + 5  # 37 windows, 4 tokens over


def starts(step, seed=0, batch_size=6):
    return sequence_starts(seed, step, batch_size, SEQ_LEN, NUM_TOKENS)


def epochs(seed=0, batch_size=6, count=37 * 6 * 3):
    stream = np.concatenate([starts(step, seed, batch_size) for step in range(count // batch_size)])
    return stream[: 37 * 3].reshape(3, 37)


@pytest.mark.parametrize("batch_size", [1, 6, 37, 100])
def test_every_window_once_per_epoch_across_batches(batch_size):
    for epoch in epochs(batch_size=batch_size):
        assert sorted(epoch.tolist()) == [n * SEQ_LEN for n in range(37)]


def test_epochs_and_seeds_differ_and_the_batch_size_does_not_count():
    assert epochs(batch_size=6).tolist() == epochs(batch_size=5).tolist()
    orders = [tuple(epoch) for seed in range(5) for epoch in epochs(seed)]
    assert len(set(orders)) == len(orders)


def test_a_step_is_a_pure_function_of_seed_and_step():
    expected = [starts(step).tolist() for step in range(30)]
    for step in (29, 3, 17, 6, 7):
        _epoch_order.cache_clear()
        assert starts(step).tolist() == expected[step]


def test_the_order_is_the_same_for_ever():
    """Literal values: a change here breaks the resumption and the comparability of runs."""
    assert sequence_starts(0, 0, 6, 8, 301).tolist() == [128, 168, 192, 56, 216, 32]
    assert sequence_starts(7, 6, 6, 8, 301).tolist() == [288, 136, 288, 168, 232, 160]


def test_the_last_target_exists():
    assert num_train_windows(8 * 37, SEQ_LEN) == 36
    assert num_train_windows(8 * 37 + 1, SEQ_LEN) == 37
    tokens = np.arange(8 * 37 + 1, dtype=np.uint16)
    every = sequence_starts(0, 0, 37, SEQ_LEN, len(tokens))
    rows = batch(tokens, every, SEQ_LEN)
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == [list(range(at, at + 9)) for at in range(0, 296, 8)]


def test_validation_windows_are_spread_over_the_whole_text():
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(validation_batches(tokens, SEQ_LEN, 100, 5))
    assert [len(rows) for rows in batches] == [5, 5, 3]
    rows = np.concatenate(batches)
    assert (rows[:, 1:] == rows[:, :-1] + 1).all()
    starts = rows[:, 0]
    assert starts[0] == 0
    assert (starts % SEQ_LEN == 0).all()
    assert set(np.diff(starts)) <= {9 * SEQ_LEN, 10 * SEQ_LEN}  # 124 windows over 13
    assert num_validation_windows(1000, SEQ_LEN, 104) == 13


def test_the_first_validation_windows_follow_one_another():
    tokens = np.arange(1000, dtype=np.uint16)
    rows = np.concatenate(list(validation_batches(tokens, SEQ_LEN, 100, 5, which="first")))
    assert rows.shape == (13, SEQ_LEN + 1)
    assert rows[:, :-1].ravel().tolist() == list(range(104))


def test_asking_for_all_validation_text_gives_every_window_once():
    tokens = np.arange(81, dtype=np.uint16)
    rows = np.concatenate(list(validation_batches(tokens, SEQ_LEN, 80, 4)))
    assert rows[:, :-1].ravel().tolist() == list(range(80))


def test_too_little_text_is_named():
    with pytest.raises(UserError, match=r"the training text has 8 tokens, less than one sequence of 8 \+ 1"):
        sequence_starts(0, 0, 1, 8, 8)
    with pytest.raises(UserError) as error:
        next(validation_batches(np.zeros(50, dtype=np.uint16), 8, 100, 4))
    assert str(error.value) == (
        "the validation text has 50 tokens, but training.eval_tokens asks for 13 sequences of 8 + 1 "
        "(lower training.eval_tokens to 48 or less, or name more data.validation_paths)"
    )
    with pytest.raises(UserError, match=r"\(lower training.seq_len or add text\)"):
        num_validation_windows(5, 8, 8)
