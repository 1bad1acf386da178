"""Hugging Face data sets, tokenisers and models' files, from a local folder or the hub.

A data set is streamed: ``paths: [name]`` or ``paths: [name, configuration]``. Hashing one on the hub would
download all of it, so its commit represents its content: the one pinned by ``name@commit``, else the hub's
current one. A pinned data set can be planned offline. A local folder is hashed like any other and never uses
the network; it holds files that ``load_dataset`` reads, or the output of ``save_to_disk``. The training text
is the split ``train``; ``validation_paths`` may name another.

Planning needs a tokeniser's vocabulary size and a hash. Both come from its ``tokenizer.json``, so the
``tokenizers`` package is not imported here. The end-of-text token is the ``eos_token`` of
``tokenizer_config.json``, else a special token with one of the usual names.

A model is a folder with ``config.json`` or a name, pinned by ``name@revision``; random weights only need that
file, a checkpoint also its safetensors. Models and tokenisers are first looked for in the local hub cache.

How it fails: ``UserError`` if ``datasets`` is not installed, the hub is unreachable, what was named does not
exist, a row has no text field, or a tokeniser has no end-of-text token.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, first_line
from ablate.base.files import parse_json
from ablate.data.sources import (
    ANY_SUFFIX,
    SourceFile,
    content_hashes,
    find_files,
    text_of,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.run.config import DataConfig, ModelConfig

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_USUAL_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set at one commit, or a local folder (then ``files`` holds its content)."""

    name: str
    configuration: str | None
    validation_split: str | None
    commit: str | None
    files: tuple[SourceFile, ...]

    def identity(self) -> dict[str, str | None]:
        """Return what can change the text, but no name of a local folder: its files are hashed."""
        return {
            "name": None if self.files else self.name,
            "commit": self.commit,
            "configuration": self.configuration,
            "validation_split": self.validation_split,
        }


def find_data_set(data: DataConfig) -> HubSource:
    """Find the data set that ``data.paths`` names, and its commit if it is on the hub.

    Raises:
        UserError: the fields name more than one, ``datasets`` is missing, or the hub does not answer.
    """
    paths = data.paths
    validation_paths = data.validation_paths
    if len(paths) > 2 or len(validation_paths) > 1:
        raise UserError(
            "data.source: hub takes one data set",
            hint="paths: [name] or [name, configuration]; validation_paths: [split]",
        )
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            "data.source: hub needs the package 'datasets'",
            hint="pip install -e '.[hub]'",
        )
    name, _, revision = paths[0].partition("@")
    folder = Path(paths[0]).expanduser()
    files = tuple(find_files([str(folder)], ANY_SUFFIX)) if folder.is_dir() else ()
    if not files and data.max_bytes is None:
        raise UserError(
            "data.max_bytes is missing, but data.source: hub needs it",
            hint="a data set on the hub is streamed; say how much text to take, such as 1_000_000_000",
        )
    commit: str | None = revision
    if files:
        name = str(folder.absolute())
        commit = None
    elif not _COMMIT.fullmatch(revision):
        from huggingface_hub import HfApi

        try:
            info = HfApi().dataset_info(name, revision=revision or None, timeout=20)
        except Exception as error:
            # offline, unknown name, no rights, proxy: many types, one remedy
            hint = f"check the name and the connection; pinned as {name}@<40-digit commit> it plans offline"
            raise _unusable(name, error, hint) from error
        commit = info.sha
    return HubSource(
        name=name,
        configuration=next(iter(paths[1:]), None),
        validation_split=next(iter(validation_paths), None),
        commit=commit,
        files=files,
    )


def documents(source: HubSource, split: str, text_field: str) -> Iterator[str]:
    """Stream the texts of one split."""
    try:
        for number, row in enumerate(_rows(source, split), start=1):
            yield text_of(row, text_field, source.name, number)
    except UserError:
        raise
    except Exception as error:
        hint = f"check the name, the configuration and the split '{split}'"
        raise _unusable(source.name, error, hint) from error


def _rows(source: HubSource, split: str) -> Any:
    import datasets

    folder = Path(source.name)
    has_splits = (folder / "dataset_dict.json").is_file()
    is_saved = has_splits or (folder / "state.json").is_file()
    if not (source.files and is_saved):
        return datasets.load_dataset(
            source.name,
            source.configuration,
            split=split,
            streaming=True,
            revision=source.commit,
        )
    if source.configuration is not None:
        raise UserError(
            "what save_to_disk wrote has no configurations",
            file=folder,
            hint=f"paths: [{folder}]",
        )
    saved = datasets.load_from_disk(source.name)
    splits = dict(saved) if has_splits else {"train": saved}
    if split not in splits:
        raise UserError(
            f"has no split '{split}'",
            file=folder,
            hint=f"splits here: {', '.join(splits)}",
        )
    return splits[split]


def _unusable(name: str, error: Exception, hint: str) -> UserError:
    return UserError(
        f"hub data set '{name}' cannot be read: {first_line(error)}", hint=hint
    )


def _from_hub(name: str, key: str, needed: Iterable[str], optional: str) -> Path:
    """Find the folder with these files of a repository in the local hub cache, or else download them."""
    if (
        name.startswith((".", "/", "~"))
        or name.endswith(".json")
        or name.count("/") > 1
    ):
        raise UserError(
            f"{key}: no such file or folder {name}",
            hint="relative paths start at the study file",
        )
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    fault = ""
    for local in (True, False):
        try:
            folder = Path(
                snapshot_download(
                    repository,
                    revision=revision or None,
                    allow_patterns=[*needed, optional],
                    local_files_only=local,
                )
            )
        except Exception as error:  # not cached, offline, unknown: many types
            fault = first_line(error)
        else:
            missing = [pattern for pattern in needed if not any(folder.glob(pattern))]
            if not missing:
                return folder
            fault = f"it has no {', '.join(missing)}"
    raise UserError(
        f"{key} '{name}' is neither a path nor cached, nor to be had from the hub: {fault}",
        hint="check the name and the connection, or give a local path",
    )


@dataclass(frozen=True, kw_only=True)
class HfTokenizer:
    """A tokeniser's file and the data that planning needs."""

    json_path: Path
    vocab_size: int
    end_of_text: str
    content_hash: str

    def identity(self) -> dict[str, str]:
        """Return what can change the tokens: the file's content, but not its location."""
        return {"hf": self.content_hash, "end_of_text": self.end_of_text}


def find_tokenizer(name: str) -> HfTokenizer:
    """Find a tokeniser by its path (a file or folder) or hub name.

    Raises:
        UserError: there is none, or it has no end-of-text token.
    """
    path = Path(name).expanduser()
    if not path.exists():
        path = _from_hub(name, "tokenizer", ["tokenizer.json"], "tokenizer_config.json")
    if path.is_dir():
        path /= "tokenizer.json"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            "no such file",
            file=path,
            hint="only fast tokenizers can be used; save one with tokenizers' Tokenizer.save",
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        value = parse_json(content)
        tokens = value["model"]["vocab"]
        if isinstance(tokens, list):  # Unigram: [[piece, score], …]
            tokens = {piece: index for index, (piece, _) in enumerate(tokens)}
        for token in value.get("added_tokens") or []:
            tokens[token["content"]] = token["id"]
        vocab_size = max(tokens.values()) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "is not a tokenizer",
            file=path,
            hint="expected the file that tokenizers' Tokenizer.save writes",
        ) from error
    named: Any = None
    with suppress(OSError, ValueError, AttributeError):
        named = parse_json(path.with_name("tokenizer_config.json").read_bytes()).get(
            "eos_token"
        )
    if isinstance(named, dict):
        named = named.get("content")
    for end_of_text in (named, *_USUAL_END_TOKENS):
        if end_of_text in tokens:
            return HfTokenizer(
                json_path=path,
                vocab_size=vocab_size,
                end_of_text=end_of_text,
                content_hash=hashlib.sha256(content).hexdigest(),
            )
    raise UserError(
        "the tokenizer has no end-of-text token",
        file=path,
        hint="put a tokenizer_config.json with eos_token beside it",
    )


def config_folder(name: str, *, weights: bool = False) -> Path:
    """Find the folder of a model's ``config.json``, with ``weights`` one that also has safetensors.

    Raises:
        UserError: there is no such model.
    """
    needed = {"config.json": "expected a folder as save_pretrained writes it"}
    if weights:
        needed["*.safetensors"] = "pretrained: false takes random weights"
    folder = Path(name).expanduser()
    if folder.is_dir():
        for pattern, hint in needed.items():
            if not any(folder.glob(pattern)):
                raise UserError(f"model.hf: no {pattern} in {name}", hint=hint)
        return folder
    # without weights the repository's index of them costs next to nothing
    return _from_hub(name, "model.hf", needed, "*.safetensors.index.json")


def hf_digest(model: ModelConfig) -> str:
    """Hash a model's configuration, and its weights if training starts from them.

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
        files = [
            file for file in find_files([str(folder)], _WEIGHTS) if "/" not in file.name
        ]
        hashes = content_hashes(files, f"hf {folder.absolute()}")
        for file, content in zip(files, hashes, strict=True):
            digest.update(f"\n{file.name} {content}".encode())
    return digest.hexdigest()
