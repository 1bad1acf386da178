import json
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from ablate.base.errors import UserError
from ablate.data import hub, identify, open_tokens, prepare
from ablate.run.config import DataConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def local(tmp_path, write_json, texts):
    pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    folder = tmp_path / "my-data-set"
    write_json(folder / "train.jsonl", texts[:50], field="body")
    write_json(folder / "validation.jsonl", texts[45:], field="body")
    return DataConfig(source="hub", paths=[str(folder)], text_field="body")


@pytest.fixture
def saved(texts, tmp_path):
    """Return a function that saves the texts by ``datasets`` into a folder, and the data section for it."""
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    train = datasets.Dataset.from_dict({"id": list(range(50)), "body": texts[:50]})
    validation = datasets.Dataset.from_dict({"id": list(range(15)), "body": texts[45:]})

    def save(form):
        folder = tmp_path / form
        if form == "one":
            train.save_to_disk(folder)
        elif form == "splits":
            datasets.DatasetDict({"train": train, "validation": validation}).save_to_disk(folder)
        else:
            folder.mkdir()
            train.to_parquet(folder / "train-00000-of-00001.parquet")
            validation.to_parquet(folder / "validation-00000-of-00001.parquet")
        return DataConfig(source="hub", paths=[str(folder)], text_field="body")

    return save


def documents_of(files):
    return [bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1] for tokens in open_tokens(files)]


@pytest.mark.parametrize("form", ["one", "splits", "parquet"])
def test_what_datasets_wrote_is_read(saved, tmp_path, texts, form):
    train, validation = documents_of(prepare(saved(form), tmp_path / "cache"))
    assert sorted(train + validation) == sorted(texts[:50])
    assert train == [text for text in texts[:50] if text in train]


@pytest.mark.parametrize("form", ["splits", "parquet"])
def test_another_split_is_the_validation_text_and_left_out_of_training(saved, tmp_path, texts, form):
    data = replace(saved(form), validation_paths=["validation"])
    assert identify(data).digest != identify(replace(data, validation_paths=[])).digest
    assert documents_of(prepare(data, tmp_path / "cache")) == [texts[:45], texts[45:]]


def test_what_a_saved_data_set_does_not_have_is_named(saved, tmp_path):
    one = saved("one")
    wrong = {
        r"one: has no split 'test' \(splits here: train\)": replace(one, validation_paths=["test"]),
        r"one: what save_to_disk wrote has no configurations": replace(one, paths=[*one.paths, "en"]),
        r"one:1: no text in field 'text' \(fields here: id, body": replace(one, text_field="text"),
    }
    for message, data in wrong.items():
        with pytest.raises(UserError, match=message):
            prepare(data, tmp_path / "cache")


@pytest.mark.parametrize("form", ["one", "parquet", "jsonl"])
@pytest.mark.parametrize("max_bytes", [None, 30_000])
def test_a_stream_that_broke_goes_on_behind_the_last_whole_piece(
    saved, local, tmp_path, form, max_bytes, monkeypatch
):
    data = replace(local if form == "jsonl" else saved(form), max_bytes=max_bytes)
    whole = prepare(data, tmp_path / "whole")
    monkeypatch.setattr(hub, "_PIECE_BYTES", 4000)
    real, rows = hub.text_of, []

    def count(row, field, name, number):
        rows.append(number)
        if len(rows) == 23:
            raise ConnectionError("the network is gone")
        return real(row, field, name, number)

    monkeypatch.setattr(hub, "text_of", count)
    with pytest.raises(UserError, match="cannot be read: the network is gone"):
        prepare(data, tmp_path / "cache")
    again = len(rows)
    files = prepare(data, tmp_path / "cache")
    assert rows[again] == 21  # five pieces of four rows are whole
    assert len(rows) - again < 32
    for name in ("train.bin", "validation.bin"):
        assert (files.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_missing_field_and_a_missing_split_are_named(local, tmp_path):
    with pytest.raises(UserError, match=r"my-data-set:1: no text in field 'text' \(fields here: body, url"):
        prepare(DataConfig(source="hub", paths=local.paths), tmp_path / "cache")
    wrong = replace(local, validation_paths=["valid"])
    with pytest.raises(UserError, match=r"my-data-set' cannot be read: .*the split 'valid'"):
        prepare(wrong, tmp_path / "cache")


@pytest.fixture
def remote(monkeypatch):
    """Return the hub's side: what it answers, and what it was asked."""
    state = SimpleNamespace(commit=COMMIT, asked=[], error=None)

    def dataset_info(_self, name, *, revision=None, timeout=None):
        state.asked.append((name, revision))
        if state.error:
            raise state.error
        return SimpleNamespace(sha=state.commit)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    return state


def digest(*paths, **fields):
    return identify(DataConfig(source="hub", paths=list(paths), **{"max_bytes": 1000, **fields})).digest


def test_the_commit_stands_for_the_content(remote):
    first = digest("someone/texts")
    assert digest("someone/texts") == first
    remote.commit = COMMIT[::-1]
    assert digest("someone/texts") != first
    assert remote.asked == [("someone/texts", None)] * 3


def test_a_pinned_data_set_plans_offline(remote):
    unpinned = digest("someone/texts")
    remote.error = ConnectionError("offline")
    assert digest(f"someone/texts@{COMMIT}") == unpinned


def test_configuration_split_and_size_count(remote):
    variants = [
        digest("someone/texts"),
        digest("someone/others"),
        digest("someone/texts", "en"),
        digest("someone/texts", validation_paths=["validation"]),
        digest("someone/texts", max_bytes=2000),
        digest("someone/texts", text_field="body"),
    ]
    assert len(set(variants)) == len(variants)


def test_the_stream_is_of_the_commit_that_was_identified(remote, monkeypatch, tmp_path, texts):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter([{"text": text} for text in texts])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(source="hub", paths=["someone/texts", "en"], max_bytes=10_000)
    files = prepare(data, tmp_path / "cache")
    assert calls == [(("someone/texts", "en"), {"split": "train", "streaming": True, "revision": COMMIT})]
    assert 10_000 <= files.train_tokens + files.validation_tokens < 12_000


def test_errors(remote, monkeypatch):
    with pytest.raises(UserError, match=r"data\.max_bytes is missing, but data\.source: hub needs it"):
        identify(DataConfig(source="hub", paths=["someone/texts"]))
    with pytest.raises(
        UserError, match=r"hub takes one data set \(paths: \[name\] or \[name, configuration\]"
    ):
        identify(DataConfig(source="hub", paths=["a", "b", "c"], max_bytes=1))
    remote.error = ConnectionError("cannot resolve\nhuggingface.co")
    with pytest.raises(UserError) as error:
        digest("someone/texts")
    assert str(error.value) == (
        "hub data set 'someone/texts' cannot be read: cannot resolve (check the name and the connection; "
        "pinned as someone/texts@<40-digit commit> it plans offline)"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"needs the package 'datasets' \(pip install -e '\.\[hub\]'\)"):
        hub.find_data_set(DataConfig(source="hub", paths=["x"], max_bytes=1))


# Tokenisers


@pytest.fixture
def folder(tmp_path):
    """A tokeniser with a gap in its ids and an end token of its own name."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.add_special_tokens(["<|fin|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|fin|>"}}))
    return tmp_path


def test_a_folder_and_its_file_are_the_same_tokenizer(folder):
    by_folder = hub.find_tokenizer(str(folder))
    by_file = hub.find_tokenizer(str(folder / "tokenizer.json"))
    assert by_folder.identity() == by_file.identity()
    assert (by_folder.vocab_size, by_folder.end_of_text) == (4, "<|fin|>")


def test_usual_end_tokens_are_known_without_a_configuration(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: the tokenizer has no end-of-text token"):
        hub.find_tokenizer(str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert hub.find_tokenizer(str(folder)).end_of_text == "</s>"


def test_a_unigram_vocabulary_is_a_list(tmp_path):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert hub.find_tokenizer(str(tmp_path)).vocab_size == 3


def test_identity_follows_content_not_place(folder, tmp_path, write_texts):
    corpus = write_texts(tmp_path / "corpus")

    def digest(path):
        data = DataConfig(source="text", paths=[str(corpus)], tokenizer="hf", tokenizer_path=str(path))
        return identify(data).digest

    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    first = digest(folder)
    assert digest(other) == first
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|more|>"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert digest(other) != first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer \(expected the file"):
        hub.find_tokenizer(str(tmp_path))


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no such tokenizer file or folder"):
        hub.find_tokenizer(str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file \(only fast tokenizers"):
        hub.find_tokenizer(str(tmp_path))


@pytest.fixture
def tokenizer_hub(monkeypatch, folder):
    """Return what was asked of a hub that has the tokeniser of ``folder`` as someone/some-model."""
    asked = []

    def model_info(_self, name, *, timeout=None):
        asked.append(("info", name))
        if name != "someone/some-model":
            raise ConnectionError("no route\nto host")

    def download(name, file, *, local_files_only=False):
        asked.append((file, "local" if local_files_only else "remote"))
        if local_files_only and not (folder / "cached").exists():
            raise FileNotFoundError("not cached")
        if not (folder / file).exists():
            raise LookupError("404")
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_offline_a_name_says_what_to_do(tokenizer_hub):
    with pytest.raises(UserError) as error:
        hub.find_tokenizer("someone/elsewhere")
    assert str(error.value) == (
        "tokenizer 'someone/elsewhere' is neither a path nor to be had from the hub: no route "
        "(check the name and the connection, or give the path of a tokenizer.json)"
    )
    assert ("tokenizer.json", "remote") not in tokenizer_hub  # that would retry for half a minute


def test_a_name_is_downloaded_with_its_configuration(tokenizer_hub, folder):
    assert hub.find_tokenizer("someone/some-model").identity() == hub.find_tokenizer(str(folder)).identity()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="has no end-of-text token"):
        hub.find_tokenizer("someone/some-model")


def test_a_name_in_the_local_hub_cache_needs_no_network(tokenizer_hub, folder):
    (folder / "cached").touch()
    assert hub.find_tokenizer("someone/some-model").identity() == hub.find_tokenizer(str(folder)).identity()
    assert tokenizer_hub == [("tokenizer.json", "local"), ("tokenizer_config.json", "local")]
