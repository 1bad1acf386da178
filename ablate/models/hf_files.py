"""Find a Hugging Face model's files and hash their content, without torch and transformers.

A name is a folder with ``config.json`` or a name on the hub, pinned by ``name@revision``. The local hub
cache is checked first. Random weights only need the configuration; a checkpoint also needs its weights, as
safetensors.

How it fails: ``UserError`` for a name that is neither a folder, nor cached, nor available on the hub.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.data.hub import cached_first
from ablate.data.sources import content_hashes, find_files, unreadable

if TYPE_CHECKING:
    from ablate.run.config import ModelConfig

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def config_folder(name: str, *, weights: bool = False) -> Path:
    """Return the folder of a model's ``config.json``, which also has the weights if ``weights`` is set.

    Raises:
        UserError: there is no such model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            what = f"model.hf: no config.json in {name}"
            raise UserError(what, hint="expected a folder as save_pretrained writes it")
        if weights and not any(folder.glob("*.safetensors")):
            what = f"model.hf: no *.safetensors in {name}"
            raise UserError(what, hint="pretrained: false takes random weights")
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model.hf: no such folder {name}", hint="relative paths start at the study file")
    return _from_hub(name, weights=weights)


def hf_digest(model: ModelConfig) -> str:
    """Return a hash of a model's configuration, and of its weights if training starts from them.

    Raises:
        UserError: the files are not available.
    """
    folder = config_folder(str(model.hf), weights=model.pretrained)
    path = folder / "config.json"
    try:
        digest = hashlib.sha256(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    if model.pretrained:
        files = [file for file in find_files([str(folder)], _WEIGHTS) if "/" not in file.name]
        for file, content in zip(files, content_hashes(files, f"hf {folder.absolute()}"), strict=True):
            digest.update(f"\n{file.name} {content}".encode())
    return digest.hexdigest()


def _from_hub(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    patterns = ["config.json", *(f"*{suffix}" for suffix in _WEIGHTS if weights)]

    def fetch(local: bool) -> Path:
        folder = Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns, local_files_only=local
            )
        )
        if not (folder / "config.json").exists() or (weights and not any(folder.glob("*.safetensors"))):
            raise FileNotFoundError("config.json" if not weights else "config.json or *.safetensors")
        return folder

    what = f"model.hf '{name}' is neither a folder nor cached, nor to be had from the hub"
    hint = "check the name and the connection, or fetch it with `hf download` where there is one"
    return cached_first(fetch, what, hint)
