import numpy as np
import pytest
from tokenizers import Tokenizer

from ablate.data.tokenizer import END_OF_TEXT, ByteTokenizer, train_bpe


def test_bytes_end_with_zero_and_hold_no_other():
    ids = ByteTokenizer().encode([b"ab", b"", "c\0é".encode()])
    assert ids.tolist() == [97, 98, 0, 0, 99, 0xEF, 0xBF, 0xBD, 0xC3, 0xA9, 0]


@pytest.fixture
def documents(texts):
    return [text.encode() for text in texts]


def test_bpe_gives_the_text_back(documents, tmp_path):
    tokenizer = train_bpe(documents, 300)
    tokenizer.save(tmp_path)
    ids = tokenizer.encode([*documents, "Ünseen 終 🙂\n".encode()])
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = backend.token_to_id(END_OF_TEXT)
    ends = np.flatnonzero(ids == end)
    assert len(ends) == len(documents) + 1
    assert backend.decode(ids[: ends[0]].tolist()).encode() == documents[0]
    assert backend.decode(ids[ends[-2] + 1 : ends[-1]].tolist()) == "Ünseen 終 🙂\n"
    assert ids.max() < 300
    assert len(ids) < sum(map(len, documents)) / 1.5


def test_text_cannot_spell_the_end_token(documents):
    tokenizer = train_bpe(documents, 300)
    ids = tokenizer.encode([b"a<|endoftext|>b"])
    assert np.count_nonzero(ids == ids[-1]) == 1


def test_bpe_is_the_same_from_the_same_text(documents, tmp_path):
    saved = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        train_bpe(documents, 320).save(tmp_path / name)
        saved.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert saved[0] == saved[1]


def test_bpe_learns_from_a_bounded_sample(documents, monkeypatch):
    monkeypatch.setattr("ablate.data.tokenizer.BPE_SAMPLE_BYTES", len(documents[0]) + 1)
    stream = iter(documents)
    train_bpe(stream, 300)
    assert len(list(stream)) == len(documents) - 2


def test_a_corpus_too_small_for_the_vocabulary_says_how_far_it_got():
    assert 256 < train_bpe([b"aa aa"], 5000).vocab_size < 260
