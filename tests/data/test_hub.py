"""Data sets, tokenisers and models of Hugging Face: from a folder, from the hub, from its local cache."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from tokenizers import Tokenizer, models

from ablate.base.errors import UserError
from ablate.data import identify, prepare
from ablate.data.hub import config_folder, find_tokenizer, hf_digest
from ablate.run.config import DataConfig, ModelConfig
from tests.data.conftest import documents_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def saved(texts, tmp_path, write_json):
    """Return a function that writes the texts into a folder in some form; it returns the data section."""
    datasets = pytest.importorskip("datasets")
    parts = {"train": texts[:50], "validation": texts[45:]}

    def save(form):
        folder = tmp_path / form
        sets = datasets.DatasetDict()
        for name, part in parts.items():
            sets[name] = datasets.Dataset.from_dict({"body": part})
            if form == "jsonl":
                write_json(folder / f"{name}.jsonl", part, field="body")
        if form != "jsonl":
            (sets["train"] if form == "one" else sets).save_to_disk(folder)
        return DataConfig(source="hub", paths=[str(folder)], text_field="body")

    return save


@pytest.mark.parametrize("form", ["one", "splits", "jsonl"])
def test_what_datasets_wrote_is_read(saved, tmp_path, texts, form):
    data = saved(form)
    train, validation = documents_of(prepare(data, tmp_path / "cache"))
    assert sorted(train + validation) == sorted(texts[:50])
    assert train == [text for text in texts[:50] if text in train]
    if form != "one":
        split = replace(data, validation_paths=["validation"])
        both = documents_of(prepare(split, tmp_path / "cache"))
        assert both == [texts[:45], texts[45:]]


@pytest.mark.parametrize(
    ("form", "field", "value", "said"),
    [
        ("one", "validation_paths", ["test"], r"one: has no split 'test' \(splits here: train\)"),
        ("one", "paths", None, "one: what save_to_disk wrote has no configurations"),
        ("one", "text_field", "text", r"one:1: no text in field 'text' \(fields here: body"),
        ("jsonl", "validation_paths", ["valid"], "jsonl' cannot be read: .*the split 'valid'"),
    ],
)  # fmt: skip
def test_what_a_data_set_does_not_have_is_named(
    saved, tmp_path, form, field, value, said
):
    data = saved(form)
    if field == "paths":
        value = [*data.paths, "en"]
    with pytest.raises(UserError, match=said):
        prepare(replace(data, **{field: value}), tmp_path / "cache")


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
    return identify(
        DataConfig(source="hub", paths=list(paths), **{"max_bytes": 1000, **fields})
    ).digest


def test_the_commit_stands_for_the_content_and_pinned_it_plans_offline(remote):
    first = digest("someone/texts")
    digests = {
        first,
        digest("someone/others"),
        digest("someone/texts", "en"),
        digest("someone/texts", validation_paths=["validation"]),
        digest("someone/texts", text_field="body"),
    }
    remote.commit = COMMIT[::-1]
    assert len({*digests, digest("someone/texts")}) == 6
    assert remote.asked[-1] == ("someone/texts", None)
    remote.error = ConnectionError("cannot resolve\nhuggingface.co")
    assert digest(f"someone/texts@{COMMIT}") == first
    with pytest.raises(UserError) as error:
        digest("someone/texts")
    assert str(error.value) == (
        "hub data set 'someone/texts' cannot be read: cannot resolve (check the name and the connection; "
        "pinned as someone/texts@<40-digit commit> it plans offline)"
    )


def test_the_stream_is_of_the_commit_that_was_identified(
    remote, monkeypatch, tmp_path, texts
):
    datasets = pytest.importorskip("datasets")
    load = Mock(return_value=({"text": text} for text in texts))
    monkeypatch.setattr(datasets, "load_dataset", load)
    data = DataConfig(source="hub", paths=["someone/texts", "en"], max_bytes=10_000)
    files = prepare(data, tmp_path / "cache")
    load.assert_called_once_with(
        "someone/texts", "en", split="train", streaming=True, revision=COMMIT
    )
    assert 10_000 <= files.train_tokens + files.validation_tokens < 12_000


@pytest.mark.usefixtures("remote")
def test_a_data_set_that_cannot_be_meant_is_refused(monkeypatch):
    with pytest.raises(
        UserError, match=r"data\.max_bytes is missing, but data\.source"
    ):
        digest("someone/texts", max_bytes=None)
    with pytest.raises(UserError, match=r"hub takes one data set \(paths: \[name\] or"):
        digest("a", "b", "c")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"needs the package 'datasets' \(pip install"):
        digest("x")


# Tokenisers


@pytest.fixture
def folder(tmp_path):
    """A tokeniser with a gap in its ids and an end token of its own name."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.add_special_tokens(["<|fin|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|fin|>"}})
    )
    return tmp_path


def test_a_tokenizer_is_its_content_and_its_end_token(folder, tmp_path):
    first = find_tokenizer(str(folder))
    assert (first.vocab_size, first.end_of_text) == (4, "<|fin|>")
    assert find_tokenizer(str(folder / "tokenizer.json")).identity() == first.identity()
    other = folder.rename(tmp_path.with_name("other"))
    assert find_tokenizer(str(other)).identity() == first.identity()
    (other / "tokenizer_config.json").unlink()
    with pytest.raises(
        UserError, match=r"json: the tokenizer has no end-of-text token"
    ):
        find_tokenizer(str(other))
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(other / "tokenizer.json"))
    again = find_tokenizer(str(other))
    assert again.end_of_text == "</s>"
    assert again.content_hash != first.content_hash


def test_a_unigram_vocabulary_is_a_list(tmp_path):
    pieces = [("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert find_tokenizer(str(tmp_path)).vocab_size == 3


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": 3}}']
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    for name, said in (
        ("nothing.json", "tokenizer: no such file or folder"),
        ("", r"no such file \(only fast"),
    ):
        with pytest.raises(UserError, match=said):
            find_tokenizer(str(tmp_path / name))
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"is not a tokenizer \(expected the file"):
        find_tokenizer(str(tmp_path))


def test_a_tokenizer_of_the_hub_is_taken_from_its_cache_first(monkeypatch, folder):
    asked = []

    def download(_name, *, local_files_only, **_):
        asked.append(local_files_only)
        if asked == [True]:
            raise ConnectionError("not cached")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):
        assert find_tokenizer("someone/some-model") == find_tokenizer(str(folder))
    assert asked == [True, False, True]


# Models


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def model_digest(folder, **options):
    return hf_digest(ModelConfig(hf=str(folder), **options))


def test_a_models_digest_is_of_its_configuration_and_of_a_checkpoints_weights(
    model, tmp_path
):
    digests = [model_digest(model)]
    model = model.rename(tmp_path / "moved")
    for weights in (b"weights", b"other weights"):
        (model / "model.safetensors").write_bytes(weights)
        assert model_digest(model) == digests[0]  # random weights
        digests.append(model_digest(model, pretrained=True))
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert len({*digests, model_digest(model)}) == 4


def test_a_cached_model_needs_no_network(model, tmp_path, monkeypatch):
    commit = "a" * 40
    cached = tmp_path / "hub" / "models--some--model"
    for part in ("snapshots", "refs"):
        (cached / part).mkdir(parents=True)
    snapshot = model.rename(cached / "snapshots" / commit)
    (cached / "refs" / "main").write_text(commit)
    cache = str(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", cache)
    for name in ("some/model", f"some/model@{commit}"):
        assert config_folder(name) == snapshot


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("{tmp}", False, "no config.json in"),
        ("{tmp}/model", True, r"no \*.safetensors in"),
        (
            "not/cached",
            False,
            "^model.hf 'not/cached' is neither a path nor cached, nor",
        ),
    ],
)
@pytest.mark.usefixtures("model")
def test_a_model_that_is_not_there_is_one_line(
    tmp_path, monkeypatch, name, weights, said
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said) as caught:
        config_folder(name.format(tmp=tmp_path), weights=weights)
    assert "\n" not in str(caught.value)
