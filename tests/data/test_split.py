import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.data.split import Spool, encoded, hold_out, is_among, line_hashes, near_copies

hash_lists = st.lists(st.integers(0, 50).map(lambda n: n * 2**57 + n), min_size=1, max_size=300)


@given(hash_lists, st.integers(1, 100_000))
def test_no_document_is_on_both_sides_and_none_is_lost(values, length):
    hashes = np.array(values, dtype=np.uint64)
    lengths = np.full(len(values), length)
    if len(set(values)) < 2:
        with pytest.raises(UserError, match="too little text for a validation set: 1 distinct"):
            hold_out(hashes, lengths)
        return
    train, validation = hold_out(hashes, lengths)
    on_train, on_validation = set(hashes[train].tolist()), set(hashes[validation].tolist())
    assert on_train
    assert on_validation
    assert not on_train & on_validation
    assert on_train | on_validation == set(values)
    assert len(on_validation) == len(validation)
    assert train.tolist() == [n for n, value in enumerate(values) if value in on_train]


@pytest.mark.parametrize(
    ("num_documents", "share"), [(1000, 0.1), (10_000, 384 * 1024 / 1e7), (100_000, 0.015)]
)
def test_the_held_out_share(num_documents, share):
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, num_documents).astype(np.uint64)
    _, validation = hold_out(hashes, np.full(num_documents, 1000))
    assert len(validation) / num_documents == pytest.approx(share, abs=1.5 / num_documents)


def test_a_document_keeps_its_side_whatever_its_neighbours_order():
    hashes = np.random.default_rng(0).integers(0, 2**63, 500).astype(np.uint64)
    lengths = np.arange(500) + 100
    order = np.random.default_rng(1).permutation(500)
    one = hashes[hold_out(hashes, lengths)[1]]
    other = hashes[order][hold_out(hashes[order], lengths[order])[1]]
    assert one.tolist() == other.tolist()


@given(hash_lists, hash_lists)
def test_which_hashes_are_among_others(values, others):
    hashes, known = (np.array(part, dtype=np.uint64) for part in (values, others))
    assert is_among(hashes, np.unique(known)).tolist() == np.isin(hashes, known).tolist()
    assert not is_among(hashes, known[:0]).any()


def test_near_copies_share_half_of_their_long_lines():
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
    assert near_copies(train, line_hashes(validation)).tolist() == [True, True, False, False, False, False]
    assert near_copies([], line_hashes(validation)).tolist() == []


def test_documents_come_back_and_white_space_does_not(tmp_path):
    spool = Spool(tmp_path / "s")
    spool.fill(encoded(["one\n", " \n", "", "twö", "one"], None))
    assert list(spool.texts(np.array([2, 0, 1]))) == [b"one", b"one\n", "twö".encode()]
    assert spool.lengths.tolist() == [4, 4, 3]
    assert spool.hashes[0] == spool.hashes[2] != spool.hashes[1]


def test_lone_surrogates_of_json_can_be_written(tmp_path):
    spool = Spool(tmp_path / "s")
    spool.fill(encoded(["a\ud800b"], None))
    assert list(spool.texts(np.array([0]))) == [b"a?b"]


def test_reading_stops_after_enough_bytes_with_whole_documents(tmp_path):
    spool = Spool(tmp_path / "s")
    documents = iter(["12345"] * 5)
    spool.fill(encoded(documents, 11))
    assert spool.num_bytes == 15
    assert len(list(documents)) == 2


def test_an_empty_spool_has_no_texts(tmp_path):
    spool = Spool(tmp_path / "s")
    spool.fill([])
    assert list(spool.texts(np.array([], dtype=np.int64))) == []
