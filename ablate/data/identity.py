"""The identity of a corpus: a digest of everything that can change its tokens, and of nothing else.

The digest is part of every run's id. It covers the content of the files, their relative names, the rule
that splits training from validation text, and the tokeniser with its parameters, but not the location of
the files. ``resolve`` also returns the files it found, so that ``prepare`` reads exactly what was hashed.

How it fails: ``UserError`` for contradictory fields, missing or unreadable files, or an unreachable hub
data set or tokeniser.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError
from ablate.data.hub import HfTokenizer, HubSource, find_data_set, find_tokenizer
from ablate.data.sources import (
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    SourceFile,
    content_hashes,
    find_files,
    stdlib_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.run.config import DataConfig

# Raise this when the same files would give other documents, another split or other tokens.
RULES_VERSION = 1

BYTES_VOCABULARY = 256
# BPE: the 256 bytes and the end-of-text token.
BPE_MINIMUM = 257

_SHARE = 0.015
_AT_MOST = 0.1
_AT_LEAST_BYTES = 384 * 1024
AT_LEAST_TOKENS = 98_304
"""The tokens of 384 KiB of text at four bytes per token."""

_WHOLE_BYTES, _PIECE_BYTES = 65_536, 16_384
"""A text file up to this size is one document; of a longer one a piece is (``ablate.data.documents``)."""
_BYTES_PER_TOKEN = {"bytes": (1, 1), "bpe": (2, 5), "hf": (2, 5)}
"""By tokeniser, at least and usually at most."""

_SUFFIXES = {"text": TEXT_SUFFIXES, "jsonl": JSON_SUFFIXES, "tokens": TOKEN_SUFFIXES}


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The identity of a corpus and its tokens.

    ``num_bytes`` is the stored size of the source, or ``max_bytes`` if that is smaller.
    ``validation_tokens``: about how many there will be, least and most, where the files' sizes tell.
    """

    digest: str
    vocab_size: int
    num_bytes: int
    validation_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An identity and its sources, for ``prepare``.

    ``train_hashes`` are the content hashes of the training files.
    """

    identity: DataIdentity
    train: tuple[SourceFile, ...] = ()
    train_hashes: tuple[str, ...] = ()
    validation: tuple[SourceFile, ...] = ()
    hub: HubSource | None = None
    hf: HfTokenizer | None = None


def identify(data: DataConfig) -> DataIdentity:
    """Return the identity of a corpus without reading text that was hashed before.

    Raises:
        UserError: the corpus cannot be used as configured; lists every problem, one line each.
    """
    return resolve(data).identity


def resolve(data: DataConfig) -> Corpus:
    """Return the identity with the files, hub revision and tokeniser that it describes."""
    if wrong := [Problem(what=f"data: {what}", hint=hint) for what, _, hint in field_faults(data)]:
        raise UserError(*wrong)
    hub_source = find_data_set(data) if data.source == "hub" else None
    hf = find_tokenizer(data.tokenizer_path) if data.tokenizer == "hf" and data.tokenizer_path else None
    if hf is not None and data.vocab_size not in (None, hf.vocab_size):
        what = f"the tokenizer has {hf.vocab_size:,} tokens, but data.vocab_size is {data.vocab_size:,}"
        raise UserError(what, file=hf.json_path, hint="is it the one that was meant?")
    validation: list[SourceFile] = []
    if data.source == "stdlib":
        train = stdlib_files()
    elif hub_source is not None:
        train = list(hub_source.files)
    else:
        train, validation = (
            find_files(paths, _SUFFIXES[data.source]) for paths in (data.paths, data.validation_paths)
        )
    files = [*train, *validation]
    if data.source == "tokens":
        _check_token_files(data, files)
    places = [*data.paths, "", *data.validation_paths] if data.paths else [sysconfig.get_path("stdlib")]
    hashes = content_hashes(files, "\n".join([data.source, *map(os.path.abspath, places)]))
    if data.source == "tokens":
        _check_no_shared_file(train, validation, hashes)
    hashed_train = _ordered(train, hashes[: len(train)])
    hashed_validation = _ordered(validation, hashes[len(train) :])
    vocab_size = hf.vocab_size if hf else (data.vocab_size or BYTES_VOCABULARY)
    content = {
        "rules": RULES_VERSION,
        "source": data.source,
        "train": [(file.name, content_hash) for file, content_hash in hashed_train],
        "validation": [(file.name, content_hash) for file, content_hash in hashed_validation],
        "hub": hub_source.identity() if hub_source else None,
        "text_field": data.text_field if data.source in ("jsonl", "hub") else None,
        "max_bytes": data.max_bytes,
        "token_dtype": data.token_dtype if data.source == "tokens" else None,
        "tokenizer": None if data.source == "tokens" else (hf.identity() if hf else data.tokenizer),
        "vocab_size": vocab_size,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    stored = sum(file.size for file in files)
    num_bytes = min(stored or data.max_bytes or 0, data.max_bytes or stored)
    return Corpus(
        identity=DataIdentity(
            digest=digest,
            vocab_size=vocab_size,
            num_bytes=num_bytes,
            validation_tokens=None if hub_source else _validation_tokens(data, train, validation),
        ),
        train=tuple(file for file, _ in hashed_train),
        train_hashes=tuple(content_hash for _, content_hash in hashed_train),
        validation=tuple(file for file, _ in hashed_validation),
        hub=hub_source,
        hf=hf,
    )


def _ordered(files: Sequence[SourceFile], hashes: Sequence[str]) -> list[tuple[SourceFile, str]]:
    """Sort files independently of their location, even if names are equal."""
    return sorted(zip(files, hashes, strict=True), key=lambda pair: (pair[0].name, pair[1]))


def field_faults(data: DataConfig) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    """Yield what contradicts itself, or has no effect and would make equal arms of a grid.

    Each as (what, the fields, a hint or None).
    """
    source, tokenizer, size = data.source, data.tokenizer, data.vocab_size
    if source == "stdlib":
        for key, given in (("paths", data.paths), ("validation_paths", data.validation_paths)):
            if given:
                yield f"source stdlib takes no {key}", (key, "source"), None
    elif not data.paths:
        yield f"source {source} needs paths", ("paths", "source"), None
    if data.text_field != "text" and source not in ("jsonl", "hub"):
        yield f"source {source} has no text_field", ("text_field", "source"), None
    if source == "tokens":
        if tokenizer != "bytes":
            yield f"source tokens takes no tokenizer {tokenizer}", ("tokenizer", "source"), None
        elif data.tokenizer_path is not None:
            yield "source tokens takes no tokenizer_path", ("tokenizer_path", "source"), None
        if size is None:
            yield "source tokens needs vocab_size", ("vocab_size", "source"), "one above the largest token"
        elif data.token_dtype == "uint16" and size > 1 << 16:  # noqa: S105  a data type, no password
            hint = "token_dtype: uint32?"
            yield f"vocab_size {size} does not fit uint16", ("vocab_size", "token_dtype"), hint
        return
    if data.token_dtype != "uint16":  # noqa: S105
        yield f"source {source} has no token_dtype", ("token_dtype", "source"), None
    if tokenizer == "bpe" and size is None:
        yield "tokenizer bpe needs vocab_size", ("vocab_size", "tokenizer"), "the size to train"
    if tokenizer == "bpe" and size is not None and size < BPE_MINIMUM:
        hint = f"from {BPE_MINIMUM} up: the bytes and an end of text"
        yield f"vocab_size {size} is too small for bpe", ("vocab_size", "tokenizer"), hint
    if tokenizer == "bytes" and size is not None:
        what = "tokenizer bytes has a vocabulary of its own"
        yield what, ("vocab_size", "tokenizer"), "vocab_size is for bpe, hf, and source tokens"
    if tokenizer == "hf" and data.tokenizer_path is None:
        hint = "a local path or a hub name"
        yield "tokenizer hf needs tokenizer_path", ("tokenizer_path", "tokenizer"), hint
    if tokenizer != "hf" and data.tokenizer_path is not None:
        yield f"tokenizer {tokenizer} takes no tokenizer_path", ("tokenizer_path", "tokenizer"), None


def _check_token_files(data: DataConfig, files: Sequence[SourceFile]) -> None:
    width = {"uint16": 2, "uint32": 4}[data.token_dtype]
    hint = "set data.token_dtype to the type it was written with"
    what = f"bytes are no whole number of {data.token_dtype} tokens"
    if wrong := [
        Problem(file=file.path, what=f"{file.size} {what}", hint=hint) for file in files if file.size % width
    ]:
        raise UserError(*wrong)


def _check_no_shared_file(
    train: Sequence[SourceFile], validation: Sequence[SourceFile], hashes: Sequence[str]
) -> None:
    """Reject a whole file used on both sides; token files have no documents to compare."""
    in_training = dict(zip(hashes, train, strict=False))
    for file, digest in zip(validation, hashes[len(train) :], strict=True):
        if digest in in_training:
            what = f"has the same content as the training file {in_training[digest].path}"
            raise UserError(what, file=file.path, hint="validate on other tokens")


def held_out_size(total: int, at_least: int = _AT_LEAST_BYTES) -> int:
    """Return the part of ``total`` to hold out, in the same unit."""
    return int(max(_SHARE * total, min(at_least, _AT_MOST * total)))


def _validation_tokens(
    data: DataConfig, train: Sequence[SourceFile], validation: Sequence[SourceFile]
) -> tuple[int, int] | None:
    """Return about how many validation tokens there will be, least and most; None where sizes do not tell.

    They do not for compressed files. Exact for files of tokens.
    """
    files = validation or train
    if not files or any(file.path.endswith((".gz", ".parquet")) for file in files):
        return None
    size = min(sum(file.size for file in files), data.max_bytes or 1 << 62)
    if data.source == "tokens":
        tokens = size // (2 if data.token_dtype == "uint16" else 4)  # noqa: S105  a data type, no password
        tokens = tokens if validation else held_out_size(tokens, AT_LEAST_TOKENS)
        return tokens, tokens
    least = most = size
    if not validation:
        last = max(file.size if file.size <= _WHOLE_BYTES else _PIECE_BYTES for file in files)
        one = min(file.size if data.source != "jsonl" and file.size <= _WHOLE_BYTES else 0 for file in files)
        # The last document that is held out is held out whole, and one stays for training.
        most = max(0, min(held_out_size(size) + last, size - one))
        least = min(held_out_size(size), most)
    few, many = _BYTES_PER_TOKEN[data.tokenizer]
    return least // many, most // few
