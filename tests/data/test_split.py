import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.data.split import Documents, ValidationSide, encoded, hold_out

hash_lists = st.lists(st.integers(0, 50).map(lambda n: n * 2**57 + n), min_size=1, max_size=300)


@given(hash_lists, st.integers(1, 100_000))
def test_the_first_documents_by_hash_are_held_out(values, length):
    hashes = np.array(values, dtype=np.uint64)
    lengths = np.full(len(values), length)
    if len(set(values)) < 2:
        with pytest.raises(UserError, match="too little text for a validation set: 1 distinct"):
            hold_out(hashes, lengths)
        return
    validation = hold_out(hashes, lengths)
    held_out = hashes[validation].tolist()
    assert held_out == sorted(set(values))[: len(held_out)]  # by hash, each once
    assert 0 < len(held_out) < len(set(values))
    assert validation.tolist() == [values.index(value) for value in held_out]


@pytest.mark.parametrize(
    ("num_documents", "share"), [(1000, 0.1), (10_000, 384 * 1024 / 1e7), (100_000, 0.015)]
)
def test_the_held_out_share(num_documents, share):
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, num_documents).astype(np.uint64)
    validation = hold_out(hashes, np.full(num_documents, 1000))
    assert len(validation) / num_documents == pytest.approx(share, abs=1.5 / num_documents)


def test_near_copies_share_half_of_their_long_lines(tmp_path):
    lines = [f"line {n:02} ".encode() * 8 for n in range(20)]
    validation = [b"\n".join(lines[:10])]
    train = [
        b"\n".join(lines[:10]) + b"\nnew end",
        b"\n".join(lines[5:15]),
        b"\n".join(lines[6:16]),
        b"  \n".join(lines[10:]),
        b"short\nlines",
        b"",
    ]
    side = ValidationSide(Documents(validation, tmp_path / "validation"))
    assert side.leave_out([*validation, b" " + validation[0], *train]) == (train[2:], 2)
    assert side.leave_out([]) == ([], 0)
    short = ValidationSide(Documents([b"short"], tmp_path / "short"))
    assert short.leave_out([b"short", *train]) == (train, 0)


def test_documents_come_back_whole_up_to_a_limit(tmp_path):
    left = iter(["one\n", " \n", "", "tw\ud800", "one", "five", "six"])  # JSON can hold lone surrogates
    found = Documents(encoded(left, 14), tmp_path / "s")
    assert list(found.texts([2, 0, 1])) == [b"one", b"one\n", b"tw?"]
    assert found.lengths.tolist() == [4, 3, 3, 4]
    assert list(left) == ["six"]
    assert found.hashes[0] == found.hashes[2] != found.hashes[1]
