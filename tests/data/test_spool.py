import numpy as np

from ablate.data.spool import Spool, encoded


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
