import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data import identify
from ablate.run.config import DataConfig


@pytest.fixture
def corpus(tmp_path, write_texts):
    return write_texts(tmp_path / "corpus")


def digest(**fields):
    return identify(DataConfig(**fields)).digest


def test_planning_imports_nothing_heavy(tmp_path, write_texts):
    np.arange(100, dtype="<u2").tofile(tmp_path / "t.bin")
    write_texts(tmp_path / "corpus")
    program = f"""
import sys
from ablate.run.config import DataConfig
from ablate.data import identify
identify(DataConfig())
identify(DataConfig(source="text", paths=[{str(tmp_path / "corpus")!r}], tokenizer="bpe", vocab_size=512))
identify(DataConfig(source="tokens", paths=[{str(tmp_path / "t.bin")!r}], vocab_size=512))
heavy = {{"torch", "numpy", "tokenizers", "datasets", "huggingface_hub", "pandas"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_neither_place_nor_order_of_the_corpus_counts(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "elsewhere" / "copy")
    one = digest(source="text", paths=[str(corpus)])
    assert one == digest(source="text", paths=[str(tmp_path / "elsewhere" / "copy")])
    monkeypatch.chdir(corpus.parent)
    assert one == digest(source="text", paths=["corpus/01*", "corpus/0[02-5]*"])


def test_a_changed_a_new_a_lost_and_a_renamed_file_count(corpus):
    digests = [digest(source="text", paths=[str(corpus)])]
    path = corpus / "030.txt"
    path.write_bytes(path.read_bytes().swapcase())
    digests.append(digest(source="text", paths=[str(corpus)]))
    (corpus / "new.txt").write_text("x")
    digests.append(digest(source="text", paths=[str(corpus)]))
    (corpus / "new.txt").rename(corpus / "newer.txt")
    digests.append(digest(source="text", paths=[str(corpus)]))
    (corpus / "newer.txt").unlink()
    (corpus / "000.txt").unlink()
    digests.append(digest(source="text", paths=[str(corpus)]))
    assert len(set(digests)) == 5


def test_every_relevant_field_counts(tmp_path, corpus, write_json, texts):
    shard = str(write_json(tmp_path / "s.json", texts))
    text = DataConfig(source="text", paths=[str(corpus)])
    json = DataConfig(source="jsonl", paths=[shard])
    variants = [
        text,
        replace(text, max_bytes=10_000),
        replace(text, max_bytes=20_000),
        replace(text, validation_paths=[shard]),
        replace(text, tokenizer="bpe", vocab_size=300),
        replace(text, tokenizer="bpe", vocab_size=301),
        replace(text, paths=[shard]),
        json,
        replace(json, text_field="url"),
    ]
    assert len({identify(data).digest for data in variants}) == len(variants)


def test_the_rules_version_counts(corpus, monkeypatch):
    before = digest(source="text", paths=[str(corpus)])
    monkeypatch.setattr("ablate.data.identity.RULES_VERSION", 2)
    assert digest(source="text", paths=[str(corpus)]) != before


def test_sizes(corpus):
    total = sum(path.stat().st_size for path in corpus.iterdir())
    assert identify(DataConfig(source="text", paths=[str(corpus)])).num_bytes == total
    bounded = DataConfig(source="text", paths=[str(corpus)], max_bytes=1000, tokenizer="bpe", vocab_size=300)
    assert identify(bounded).num_bytes == 1000
    assert identify(bounded).vocab_size == 300


def test_contradicting_fields_are_refused_all_at_once():
    with pytest.raises(UserError) as error:
        identify(DataConfig(paths=["x"], vocab_size=300, tokenizer_path="y"))
    assert str(error.value).splitlines() == [
        "data: source stdlib takes no paths",
        "data: tokenizer bytes has a vocabulary of its own (vocab_size is for bpe, hf, and source tokens)",
        "data: tokenizer bytes takes no tokenizer_path",
    ]


def test_a_token_file_of_another_type_is_refused(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"123456")
    data = DataConfig(source="tokens", paths=[str(tmp_path / "t.bin")], vocab_size=9, token_dtype="uint32")
    with pytest.raises(UserError, match=r"t\.bin: 6 bytes are no whole number of uint32 tokens \(set data"):
        identify(data)
    identify(replace(data, token_dtype="uint16"))


def test_the_same_token_file_on_both_sides_is_refused(tmp_path):
    for name in ("a.bin", "b.bin"):
        np.arange(100, dtype="<u2").tofile(tmp_path / name)
    data = DataConfig(
        source="tokens",
        paths=[str(tmp_path / "a.bin")],
        validation_paths=[str(tmp_path / "b.bin")],
        vocab_size=100,
    )
    with pytest.raises(UserError, match=r"b\.bin: has the same content as the training file .*a\.bin"):
        identify(data)
