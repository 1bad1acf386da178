import json

import huggingface_hub
import pytest
from tokenizers import Tokenizer, models

from ablate.base.errors import UserError
from ablate.data import hf_tokenizer, identify
from ablate.run.config import DataConfig


@pytest.fixture
def folder(tmp_path):
    """A tokeniser with a gap in its ids and an end token of its own name."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.add_special_tokens(["<|fin|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|fin|>"}}))
    return tmp_path


def test_a_folder_and_its_file_are_the_same_tokenizer(folder):
    by_folder = hf_tokenizer.locate(str(folder))
    by_file = hf_tokenizer.locate(str(folder / "tokenizer.json"))
    assert by_folder.identity() == by_file.identity()
    assert (by_folder.vocab_size, by_folder.end_of_text) == (4, "<|fin|>")


def test_usual_end_tokens_are_known_without_a_configuration(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: the tokenizer has no end-of-text token"):
        hf_tokenizer.locate(str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert hf_tokenizer.locate(str(folder)).end_of_text == "</s>"


def test_a_unigram_vocabulary_is_a_list(tmp_path):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert hf_tokenizer.locate(str(tmp_path)).vocab_size == 3


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
        hf_tokenizer.locate(str(tmp_path))


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no such tokenizer file or folder"):
        hf_tokenizer.locate(str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file \(only fast tokenizers"):
        hf_tokenizer.locate(str(tmp_path))


@pytest.fixture
def remote(monkeypatch, folder):
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


def test_offline_a_name_says_what_to_do(remote):
    with pytest.raises(UserError) as error:
        hf_tokenizer.locate("someone/elsewhere")
    assert str(error.value) == (
        "tokenizer 'someone/elsewhere' is neither a path nor to be had from the hub: no route "
        "(check the name and the connection, or give the path of a tokenizer.json)"
    )
    assert ("tokenizer.json", "remote") not in remote  # that would retry for half a minute


def test_a_name_is_downloaded_with_its_configuration(remote, folder):
    assert hf_tokenizer.locate("someone/some-model").identity() == hf_tokenizer.locate(str(folder)).identity()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="has no end-of-text token"):
        hf_tokenizer.locate("someone/some-model")


def test_a_name_in_the_local_hub_cache_needs_no_network(remote, folder):
    (folder / "cached").touch()
    assert hf_tokenizer.locate("someone/some-model").identity() == hf_tokenizer.locate(str(folder)).identity()
    assert remote == [("tokenizer.json", "local"), ("tokenizer_config.json", "local")]
