import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from ablate.base.errors import UserError
from ablate.data import open_tokens, prepare
from ablate.data.tokenizer import train_bpe
from ablate.data.workers import Workers
from ablate.run.config import DataConfig


def sides(data, cache):
    """Return the documents of both sides, from the tokens of a bytes tokeniser."""
    files = prepare(data, cache)
    meta = json.loads((files.folder / "meta.json").read_text())
    return *(
        [text.decode() for text in bytes(tokens.astype(np.uint8)).split(b"\0")[:-1]]
        for tokens in open_tokens(files)
    ), meta


def test_sides_are_disjoint_and_whole(tmp_path, write_texts, texts):
    data = DataConfig(source="text", paths=[str(write_texts(tmp_path / "corpus"))])
    train, validation, meta = sides(data, tmp_path / "cache")
    assert sorted(train + validation) == sorted(texts)
    assert meta["train_documents"] == len(train) == 60 - len(validation)
    assert meta["copies_left_out"] == 0
    assert meta["train_bytes"] + meta["validation_bytes"] == sum(len(text.encode()) for text in texts)


def test_copies_of_a_document_stay_on_one_side(tmp_path, write_json, texts):
    copies = [*texts, *[f"\n{text}  \n" for text in texts], *texts]
    data = DataConfig(source="jsonl", paths=[str(write_json(tmp_path / "s.jsonl", copies))])
    train, validation, meta = sides(data, tmp_path / "cache")
    assert not {text.strip() for text in train} & {text.strip() for text in validation}
    assert len({text.strip() for text in validation}) == len(validation) > 0
    assert len(train) == 3 * (60 - len(validation))
    assert meta["copies_left_out"] == 2 * len(validation)


def test_validation_paths_are_kept_whole_and_left_out_of_training(tmp_path, write_json, texts):
    train_path = write_json(tmp_path / "train.jsonl", texts[:50])
    validation_path = write_json(tmp_path / "valid.jsonl", texts[40:])
    data = DataConfig(source="jsonl", paths=[str(train_path)], validation_paths=[str(validation_path)])
    train, validation, meta = sides(data, tmp_path / "cache")
    assert validation == texts[40:]
    assert train == texts[:40]
    assert meta["copies_left_out"] == 10


def test_a_near_copy_of_a_validation_document_is_left_out(tmp_path, write_json, texts):
    signed = [f"Posted again by {n}\n{text}\nRegards" for n, text in enumerate(texts)]
    data = DataConfig(source="jsonl", paths=[str(write_json(tmp_path / "s.jsonl", [*texts, *signed]))])
    train, validation, meta = sides(data, tmp_path / "cache")
    assert meta["near_copies_left_out"] > 0
    lines = {line for text in validation for line in text.split("\n") if len(line) > 32}
    assert not any(line in lines for text in train for line in text.split("\n"))


def test_validation_text_that_is_a_part_of_the_training_file(tmp_path):
    lines = [f"Line {n}: " + "some words " * 7 for n in range(20_000)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    (tmp_path / "end.txt").write_text("\n".join(lines[19_000:]))
    (tmp_path / "near.txt").write_text("\n".join(["A title", *lines[19_000:19_500]]))
    data = DataConfig(
        source="text", paths=[str(tmp_path / "all.txt")], validation_paths=[str(tmp_path / "end.txt")]
    )
    train, _, meta = sides(data, tmp_path / "cache")
    assert meta["near_copies_left_out"] > 3
    held_in = {line for text in train for line in text.split("\n")} & set(lines[19_000:])
    assert len(held_in) < 100  # less than one piece of a file, at the border
    with pytest.raises(UserError, match="all training text is nearly the same as validation text"):
        prepare(replace(data, paths=[str(tmp_path / "near.txt")]), tmp_path / "cache")


def test_a_long_text_file_is_split_into_documents(tmp_path):
    paragraphs = [f"Paragraph {n}: " + "some words " * 30 for n in range(2000)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    data = DataConfig(source="text", paths=[str(tmp_path / "book.txt")])
    train, validation, _ = sides(data, tmp_path / "cache")
    found = [[p for p in "\n\n".join(texts).split("\n\n") if p.strip()] for texts in (train, validation)]
    assert not set(found[0]) & set(found[1])
    assert sorted(p.strip() for side in found for p in side) == sorted(p.strip() for p in paragraphs)
    assert 0.09 < sum(map(len, validation)) / sum(map(len, train + validation)) < 0.15


def test_max_bytes_of_a_folder_is_a_mixture_and_of_whole_documents(tmp_path, write_texts, texts):
    data = DataConfig(source="text", paths=[str(write_texts(tmp_path / "corpus"))], max_bytes=20_000)
    train, validation, _ = sides(data, tmp_path / "cache")
    taken = [texts.index(text) for text in train + validation]
    assert 20_000 <= sum(len(text) for text in train + validation) < 22_000
    assert max(taken) > len(taken) + 10


def test_nul_in_text_does_not_end_a_document(tmp_path, write_json, texts):
    data = DataConfig(source="jsonl", paths=[str(write_json(tmp_path / "s.jsonl", [*texts, "a\0b"]))])
    train, validation, _ = sides(data, tmp_path / "cache")
    assert "a\ufffdb" in train + validation


def test_bpe_learns_from_training_documents_only(tmp_path, write_json, texts):
    train_path = write_json(tmp_path / "train.jsonl", texts)
    validation_path = write_json(tmp_path / "valid.jsonl", ["zqzqzq " * 500])
    data = DataConfig(
        source="jsonl",
        paths=[str(train_path)],
        validation_paths=[str(validation_path)],
        tokenizer="bpe",
        vocab_size=400,
    )
    files = prepare(data, tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    assert len(tokenizer.encode("zqzqzq").ids) == 6
    assert len(tokenizer.encode("window once and").ids) < 8


def test_bpe_never_sees_held_out_documents(tmp_path, write_json, texts, monkeypatch):
    seen = []

    def spy(documents, vocab_size):
        seen.extend(documents)
        return train_bpe(seen, vocab_size)

    monkeypatch.setattr("ablate.data.parts.train_bpe", spy)
    monkeypatch.setattr("ablate.data.tokenise.Workers", lambda _number: Workers(0))  # here, to be heard
    data = DataConfig(source="jsonl", paths=[str(write_json(tmp_path / "s.jsonl", texts))])
    train, validation, _ = sides(data, tmp_path / "cache")
    prepare(replace(data, tokenizer="bpe", vocab_size=300), tmp_path / "cache")
    assert [text.decode() for text in seen] == train
    assert validation


def test_bpe_round_trip_and_bytes_per_token(tmp_path, write_json, texts):
    data = DataConfig(
        source="jsonl", paths=[str(write_json(tmp_path / "s.jsonl", texts))], tokenizer="bpe", vocab_size=400
    )
    files = prepare(data, tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    decoded = []
    for tokens in open_tokens(files):
        ids = np.split(tokens.astype(int), np.flatnonzero(tokens == end) + 1)[:-1]
        decoded.append([tokenizer.decode(document[:-1].tolist()) for document in ids])
    assert sorted(decoded[0] + decoded[1]) == sorted(texts)
    validation_bytes = sum(len(text) for text in decoded[1])
    assert files.validation_bytes_per_token == pytest.approx(validation_bytes / files.validation_tokens)
    assert files.validation_bytes_per_token > 2


def test_a_hugging_face_tokenizer(tmp_path, write_json, texts):
    shard = str(write_json(tmp_path / "s.jsonl", texts))
    bpe = prepare(
        DataConfig(source="jsonl", paths=[shard], tokenizer="bpe", vocab_size=400), tmp_path / "cache"
    )
    trained = Tokenizer.from_file(str(bpe.folder / "tokenizer.json"))
    trained.enable_truncation(10)
    trained.enable_padding(length=2000)
    trained.save(str(tmp_path / "tokenizer.json"))
    data = DataConfig(
        source="jsonl", paths=[shard], tokenizer="hf", tokenizer_path=str(tmp_path / "tokenizer.json")
    )
    hf = prepare(data, tmp_path / "cache")
    assert hf.folder != bpe.folder
    assert hf.vocab_size == trained.get_vocab_size()
    assert hf.train.read_bytes() == bpe.train.read_bytes()
    assert hf.validation.read_bytes() == bpe.validation.read_bytes()


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path, write_json, texts):
    shard = str(write_json(tmp_path / "s.jsonl", texts))
    small = DataConfig(source="jsonl", paths=[shard], tokenizer="bpe", vocab_size=65_536)
    large = replace(small, vocab_size=65_537)
    (two, _), (four, _) = (open_tokens(prepare(data, tmp_path / "cache")) for data in (small, large))
    assert (two.dtype, four.dtype) == (np.uint16, np.uint32)
    assert two.tolist() == four.tolist()


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("only one document")
    with pytest.raises(UserError, match="too little text for a validation set: 1 distinct documents"):
        prepare(DataConfig(source="text", paths=[str(tmp_path / "a.txt")]), tmp_path / "cache")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="too little text for a validation set: 0 distinct documents"):
        prepare(DataConfig(source="text", paths=[str(tmp_path / "a.txt")]), tmp_path / "cache")


def test_real_shards_as_c4_publishes_them(shared_data, tmp_path):
    data = DataConfig(
        source="jsonl",
        paths=[str(shared_data / "text" / "reviews-train.*.json.gz")],
        validation_paths=[str(shared_data / "text" / "reviews-validation.*.json.gz")],
    )
    train, validation, meta = sides(data, tmp_path / "cache")
    assert len(validation) == 100
    assert len(train) + meta["copies_left_out"] + meta["near_copies_left_out"] == 1900
    assert meta["near_copies_left_out"] == 2
    assert not set(train) & set(validation)
    windows = {text[at : at + 64] for text in train for at in range(0, len(text) - 64, 64)}
    assert len(windows) > 100_000
    # A reviewer's footer of four lines stands in both; a passage does not.
    assert max(sum(text[at : at + 64] in windows for at in range(len(text) - 64)) for text in validation) < 64


def test_real_text_in_one_file(shared_data, tmp_path):
    data = DataConfig(source="text", paths=[str(shared_data / "text" / "speeches.txt")])
    train, validation, _ = sides(data, tmp_path / "cache")
    assert len(train) > 100
    assert not set(train) & set(validation)
    size = (shared_data / "text" / "speeches.txt").stat().st_size
    assert abs(sum(len(text.encode()) for text in train + validation) - size) < 200
    assert 0.09 < sum(map(len, validation)) / size < 0.12


def test_the_embedded_default(tmp_path):
    data = DataConfig(max_bytes=3_000_000)
    train, validation, _ = sides(data, tmp_path / "cache")
    assert not set(train) & set(validation)
    assert sum(map(len, validation)) > 250_000
