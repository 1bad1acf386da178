import json

import pytest

from ablate.base.errors import UserError
from ablate.models.hf_files import config_folder, hf_digest
from ablate.run.config import ModelConfig


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def digest(folder, **options):
    return hf_digest(ModelConfig(hf=str(folder), **options))


def test_the_digest_is_of_the_configuration_and_of_a_checkpoints_weights(folder, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.json").write_bytes((folder / "config.json").read_bytes())
    before = digest(folder)
    assert digest(moved) == before
    (folder / "model.safetensors").write_bytes(b"weights")
    assert digest(folder) == before  # random weights
    trained = digest(folder, pretrained=True)
    assert trained != before
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert digest(folder, pretrained=True) != trained
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert digest(folder) != before


def test_a_cached_name_needs_no_network(folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "a" * 40
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    refs = tmp_path / "hub" / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert config_folder("some/model") == snapshot
    assert config_folder(f"some/model@{commit}") == snapshot
    assert digest("some/model") == digest(folder)


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("{tmp}/nowhere", False, "no such folder"),
        ("./nowhere", False, "no such folder"),
        ("{tmp}", False, "no config.json in"),
        ("{tmp}/model", True, r"no \*.safetensors in"),
        ("not/cached-anywhere", False, "'not/cached-anywhere' is neither a folder nor cached, nor to be had"),
    ],
)
def test_what_is_not_there_is_one_line(folder, tmp_path, monkeypatch, name, weights, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said) as caught:
        config_folder(name.format(tmp=tmp_path), weights=weights)
    assert "\n" not in str(caught.value)
