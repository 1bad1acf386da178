import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data import identify
from ablate.run.config import DataConfig


def digest(path, **fields):
    return identify(
        DataConfig(**{"source": "text", "paths": [str(path)], **fields})
    ).digest


@pytest.fixture
def token_files(tmp_path):
    for name in ("a.bin", "b.bin"):
        np.arange(99, dtype="<u2").tofile(tmp_path / name)
    return DataConfig(source="tokens", paths=[str(tmp_path / "a.bin")], vocab_size=100)


def test_planning_imports_nothing_heavy(token_files, corpus):
    program = f"""
import sys
from ablate.run.config import DataConfig
from ablate.data import identify
identify(DataConfig())
identify(DataConfig(source="text", paths=[{str(corpus)!r}], tokenizer="bpe", vocab_size=512))
identify(DataConfig(source="tokens", paths={token_files.paths!r}, vocab_size=512))
heavy = {{"torch", "numpy", "tokenizers", "datasets", "huggingface_hub", "pandas"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_neither_place_nor_order_of_the_corpus_counts(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "elsewhere" / "copy")
    first = digest(corpus)
    assert first == digest(tmp_path / "elsewhere" / "copy")
    monkeypatch.chdir(corpus.parent)
    assert first == digest("", paths=["corpus/01*", "corpus/0[02-5]*"])
    two = [corpus / "000.txt", tmp_path / "elsewhere" / "000.txt"]
    digests = []
    for texts in (("one", "other"), ("other", "one")):  # of two files of one name
        for path, text in zip(two, texts, strict=True):
            path.write_text(text)
        digests.append(digest("", paths=[*map(str, two)]))
    assert digests[0] == digests[1]


def test_content_names_and_every_relevant_field_count(
    corpus, tmp_path, write_json, texts, monkeypatch
):
    shard = str(write_json(tmp_path / "s.json", texts))
    digests = [
        digest(corpus),
        digest(corpus, max_bytes=10_000),
        digest(corpus, max_bytes=20_000),
        digest(corpus, validation_paths=[shard]),
        digest(corpus, tokenizer="bpe", vocab_size=300),
        digest(corpus, tokenizer="bpe", vocab_size=301),
        digest(shard),
        digest(shard, source="jsonl"),
        digest(shard, source="jsonl", text_field="url"),
    ]
    for change in (
        lambda: (corpus / "030.txt").write_text(texts[30].swapcase()),
        lambda: (corpus / "new.txt").write_text("x"),
        lambda: (corpus / "new.txt").rename(corpus / "newer.txt"),
        (corpus / "000.txt").unlink,
        lambda: monkeypatch.setattr("ablate.data.identity.RULES_VERSION", 2),
    ):
        change()
        digests.append(digest(corpus))
    assert len(set(digests)) == 14


def test_sizes(corpus):
    data = DataConfig(source="text", paths=[str(corpus)])
    sizes = [path.stat().st_size for path in corpus.iterdir()]
    assert identify(data).num_bytes == sum(sizes)
    bounded = identify(replace(data, max_bytes=1000, tokenizer="bpe", vocab_size=300))
    assert (bounded.num_bytes, bounded.vocab_size) == (1000, 300)


def test_a_tokenizer_of_another_size_is_refused(corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0, "<|endoftext|>": 1}}}'
    )
    with pytest.raises(UserError, match="the tokenizer has 2 tokens, but"):
        digest(corpus, tokenizer="hf", tokenizer_path=str(tmp_path), vocab_size=3)


def test_contradicting_fields_are_refused_all_at_once():
    with pytest.raises(UserError) as error:
        identify(DataConfig(paths=["x"], vocab_size=300, tokenizer_path="y"))
    assert str(error.value).splitlines() == [
        "data: source stdlib takes no paths",
        "data: tokenizer bytes has a vocabulary of its own (vocab_size is for bpe, hf, and source tokens)",
        "data: tokenizer bytes takes no tokenizer_path",
    ]


def test_token_files_of_another_type_or_on_both_sides_are_refused(
    token_files, tmp_path
):
    identify(token_files)
    said = r"a\.bin: 198 bytes are no whole number of uint32 tokens \(set data"
    with pytest.raises(UserError, match=said):
        identify(replace(token_files, token_dtype="uint32"))
    said = r"b\.bin: has the same content as the training file .*a\.bin"
    with pytest.raises(UserError, match=said):
        identify(replace(token_files, validation_paths=[str(tmp_path / "b.bin")]))
