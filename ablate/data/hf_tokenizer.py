"""Find a Hugging Face tokeniser's files: a ``tokenizer.json``, a folder that has one, or a name on the hub.

Planning needs the vocabulary's size and a hash. Both come from the JSON file, so the ``tokenizers`` package
is not imported here. A name is looked up in the local hub cache and downloaded only if it is missing there.
The end-of-text token is the ``eos_token`` of ``tokenizer_config.json``, else a special token with one of the
usual names.

How it fails: ``UserError`` if the tokeniser does not exist, the hub is unreachable, or no end-of-text token
is found (documents could then not be separated).
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate.base.errors import UserError
from ablate.base.files import parse_json
from ablate.data.hub import cached_first
from ablate.data.sources import unreadable

_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class HfTokenizer:
    """A tokeniser's file and the data that planning needs."""

    name: str
    json_path: Path
    vocab_size: int
    end_of_text: str
    content_hash: str

    def identity(self) -> dict[str, str]:
        """Return everything that can change the tokens: the file's content, but not its location."""
        return {"hf": self.content_hash, "end_of_text": self.end_of_text}


def locate(name: str) -> HfTokenizer:
    """Return the tokeniser of a path or a hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        json_path, config_path = path / "tokenizer.json", path / "tokenizer_config.json"
    elif path.is_file():
        json_path, config_path = path, path.with_name("tokenizer_config.json")
    elif name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise UserError(
            "no such tokenizer file or folder", file=name, hint="relative paths start at the study file"
        )
    else:
        json_path, config_path = _from_hub(name)
    try:
        content = json_path.read_bytes()
    except FileNotFoundError:
        hint = "only fast tokenizers can be used; save one with tokenizers' Tokenizer.save"
        raise UserError("no such file", file=json_path, hint=hint) from None
    except OSError as error:
        raise unreadable(json_path, error) from error
    try:
        value = parse_json(content)
        tokens = _vocabulary(value)
        vocab_size = max(tokens.values()) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "expected the file that tokenizers' Tokenizer.save writes"
        raise UserError("is not a tokenizer", file=json_path, hint=hint) from error
    return HfTokenizer(
        name=name,
        json_path=json_path,
        vocab_size=vocab_size,
        end_of_text=_end_of_text(json_path, config_path, tokens),
        content_hash=hashlib.sha256(content).hexdigest(),
    )


def _from_hub(name: str) -> tuple[Path, Path]:
    from huggingface_hub import HfApi, hf_hub_download

    def fetch(local: bool) -> tuple[Path, Path]:
        if not local:  # This call fails at once when offline; the download would try for half a minute.
            HfApi().model_info(name, timeout=20)
        json_path = Path(hf_hub_download(name, "tokenizer.json", local_files_only=local))
        config_path = json_path.with_name("tokenizer_config.json")
        with suppress(Exception):  # optional: the end-of-text token may be found by name
            config_path = Path(hf_hub_download(name, config_path.name, local_files_only=local))
        return json_path, config_path

    hint = "check the name and the connection, or give the path of a tokenizer.json"
    return cached_first(fetch, f"tokenizer '{name}' is neither a path nor to be had from the hub", hint)


def _vocabulary(value: dict[str, Any]) -> dict[str, int]:
    vocabulary = value["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [[piece, score], …]
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in value.get("added_tokens") or []}
    return {**vocabulary, **added}


def _end_of_text(json_path: Path, config_path: Path, tokens: dict[str, int]) -> str:
    try:
        named = parse_json(config_path.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        named = None
    if isinstance(named, dict):
        named = named.get("content")
    for candidate in (named, *_USUAL_END_TOKENS):
        if candidate in tokens:
            return str(candidate)
    hint = "put a tokenizer_config.json with eos_token beside it"
    raise UserError("the tokenizer has no end-of-text token", file=json_path, hint=hint)
