import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from ablate.base.errors import UserError
from ablate.data import open_tokens, prepare, tokenise
from ablate.data.tokenise import END_OF_TEXT, encode_bytes, train_bpe
from ablate.run.config import DataConfig
from tests.data.conftest import documents_of


def sides(data, cache):
    """Return the documents of both sides, from the tokens of a bytes tokeniser."""
    files = prepare(data, cache)
    return *documents_of(files), json.loads((files.folder / "meta.json").read_text())


@pytest.fixture
def jsonl(tmp_path, write_json):
    """Return a data section of JSON lines with these documents."""

    def make(documents, **fields):
        path = write_json(tmp_path / "s.jsonl", documents)
        return DataConfig(source="jsonl", paths=[str(path)], **fields)

    return make


def test_copies_of_a_document_stay_on_one_side_and_near_copies_are_left_out(
    jsonl, tmp_path, texts
):
    signed = [f"Posted again by {n}\n{text}\nRegards" for n, text in enumerate(texts)]
    documents = [*texts, *[f"\n{text}  \n" for text in texts], *signed, "a\0b"]
    train, validation, meta = sides(jsonl(documents), tmp_path / "cache")
    assert not {text.strip() for text in train} & {text.strip() for text in validation}
    assert len({text.strip() for text in validation}) == len(validation) > 0
    assert "a\ufffdb" in train + validation  # a NUL in the text ends no document
    left_out = (meta["copies_left_out"], meta["near_copies_left_out"])
    assert min(left_out) > 0
    assert len(train) + len(validation) + sum(left_out) == len(documents)
    lines = {line for text in validation for line in text.split("\n") if len(line) > 32}
    assert not any(line in lines for text in train for line in text.split("\n"))


def test_validation_paths_are_kept_whole_and_left_out_of_training(
    jsonl, tmp_path, write_json, texts
):
    path = write_json(tmp_path / "valid.jsonl", texts[40:])
    data = jsonl(texts[:50], validation_paths=[str(path)])
    train, validation, meta = sides(data, tmp_path / "cache")
    assert (train, validation, meta["copies_left_out"]) == (texts[:40], texts[40:], 10)
    write_json(tmp_path / "s.jsonl", [f"A title\n{text}" for text in texts[40:]])
    with pytest.raises(
        UserError, match="all training text is nearly the same as valid"
    ):
        prepare(data, tmp_path / "cache")


def test_max_bytes_of_a_folder_is_a_mixture_and_of_whole_documents(
    tmp_path, corpus, texts
):
    data = DataConfig(source="text", paths=[str(corpus)], max_bytes=20_000)
    train, validation, _ = sides(data, tmp_path / "cache")
    taken = [texts.index(text) for text in train + validation]
    assert 20_000 <= sum(len(text) for text in train + validation) < 22_000
    assert max(taken) > len(taken) + 10


def test_the_embedded_default_has_text_enough_to_evaluate_on(tmp_path):
    train, validation, meta = sides(DataConfig(), tmp_path / "cache")
    assert not set(train) & set(validation)
    assert meta["validation_tokens"] > 65_536


# Tokenisers


def test_bpe_gives_the_text_back_and_text_cannot_spell_the_end_token(texts, tmp_path):
    documents = [text.encode() for text in (*texts, "Ünseen <|endoftext|> 終 🙂\n")]
    tokenizer = train_bpe(documents[:-1], 300)
    tokenizer.save(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(documents)
    ends = np.flatnonzero(ids == backend.token_to_id(END_OF_TEXT))
    pieces = np.split(ids, ends + 1)[:-1]
    texts_again = [backend.decode(piece[:-1].tolist()) for piece in pieces]
    assert [text.encode() for text in texts_again] == documents
    assert ids.max() < 300
    assert len(ids) < sum(map(len, documents)) / 1.5
    # too little text for the vocabulary
    assert 256 < train_bpe([b"aa aa"], 5000).vocab_size < 260


def test_bpe_learns_from_training_documents_alone_up_to_a_limit(
    jsonl, tmp_path, texts, monkeypatch
):
    learn = Mock(wraps=train_bpe)
    monkeypatch.setattr(tokenise, "train_bpe", learn)
    data = jsonl(texts)
    train, _, _ = sides(data, tmp_path / "cache")
    bpe = replace(data, tokenizer="bpe", vocab_size=300)
    prepare(bpe, tmp_path / "cache")
    assert [text.decode() for text in learn.call_args[0][0]] == train
    monkeypatch.setattr(tokenise, "BPE_SAMPLE_BYTES", 1)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 1)
    prepare(bpe, tmp_path / "another")
    assert [text.decode() for text in learn.call_args[0][0]] == train[:1]


def test_a_tokenizer_of_hugging_face_and_bytes_per_token(jsonl, tmp_path, texts):
    data = jsonl(texts, tokenizer="bpe", vocab_size=400)
    bpe = prepare(data, tmp_path / "cache")
    _, validation, _ = sides(jsonl(texts), tmp_path / "cache")
    num_bytes = bpe.validation_bytes_per_token * bpe.validation_tokens
    assert num_bytes == pytest.approx(sum(map(len, validation)))
    trained = Tokenizer.from_file(str(bpe.folder / "tokenizer.json"))
    trained.enable_truncation(10)
    trained.enable_padding(length=2000)
    path = str(tmp_path / "tokenizer.json")
    trained.save(path)
    same = replace(data, tokenizer="hf", vocab_size=None, tokenizer_path=path)
    hf = prepare(same, tmp_path / "cache")
    assert hf.folder != bpe.folder
    assert hf.vocab_size == trained.get_vocab_size()
    for name in ("train.bin", "validation.bin"):
        assert (hf.folder / name).read_bytes() == (bpe.folder / name).read_bytes()


def test_a_large_vocabulary_takes_four_bytes_a_token(jsonl, tmp_path, texts):
    written = []
    for size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        data = jsonl(texts, tokenizer="bpe", vocab_size=size)
        train, _ = open_tokens(prepare(data, tmp_path / "cache"))
        assert train.dtype == dtype
        written.append(train.tolist())
    assert written[0] == written[1]


# Reading again


@pytest.fixture
def shards(tmp_path, write_json, texts, monkeypatch):
    """Return a folder of five shards with copies and near copies, in small batches."""
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 4_000)
    near = [f"Posted again by {n}\n{text}" for n, text in enumerate(texts)]
    documents = [*texts, "", *texts[:20], *near, " \n"]
    for n in range(5):
        write_json(tmp_path / f"corpus/train.{n:05}-of-00005.json.gz", documents[n::5])
    validation = write_json(tmp_path / "corpus/validation.json.gz", texts[40:46])
    paths = [str(tmp_path / "corpus/train.*.json.gz")]
    return DataConfig(source="jsonl", paths=paths, validation_paths=[str(validation)])


def test_tokens_are_in_the_order_of_the_source_though_batches_are_made_at_once(
    shards, tmp_path, monkeypatch
):
    whole = prepare(shards, tmp_path / "whole")
    slow = threading.Event()

    def encode(texts):
        if not slow.is_set():
            slow.set()
            time.sleep(0.2)  # the first batch is ready last
        return encode_bytes(texts)

    monkeypatch.setattr(tokenise, "encode_bytes", encode)
    again = prepare(shards, tmp_path / "again")
    assert slow.is_set()
    assert again.train.read_bytes() == whole.train.read_bytes()


def test_a_killed_preparation_starts_again(shards, tmp_path):
    whole = prepare(shards, tmp_path / "whole")
    program = f"""
import os
from pathlib import Path
from ablate.run.config import DataConfig
from ablate.data import prepare, tokenise
tokenise._BATCH_BYTES = 4_000
cache = Path({str(tmp_path / "cache")!r})
def progress(done, what):
    if done > 0.5 and [*cache.glob(".*/train.bin")]:
        os.kill(os.getpid(), 9)
prepare(DataConfig(**{vars(shards)!r}), cache, progress=progress)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (killed,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert {path.name for path in killed.iterdir()} >= {"train.bin", "validation.bin"}
    files = prepare(shards, tmp_path / "cache")
    assert not killed.exists()
    for name in ("train.bin", "validation.bin"):
        assert (files.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_damaged_shard_is_one_line_unless_it_is_behind_the_limit(shards, tmp_path):
    bad = tmp_path / "corpus/train.00003-of-00005.json.gz"
    bad.write_bytes(bad.read_bytes()[:-100])
    said = r"train\.00003-of-00005\.json\.gz.*gzip data is damaged"
    with pytest.raises(UserError, match=said) as error:
        prepare(shards, tmp_path / "cache")
    assert len(error.value.problems) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    prepare(replace(shards, max_bytes=5_000), tmp_path / "cache")
