"""The identity of a corpus: a digest of everything that can change its tokens, and of nothing else.

The digest is part of every run's id. It covers the content of the files, their relative names, the rule
that splits training from validation text, and the tokeniser with its parameters, but not the location of
the files. It comes with the files that were found, so that ``prepare`` reads exactly what was hashed.

How it fails: ``UserError`` for contradictory fields, missing or unreadable files, or an unreachable hub
data set or tokeniser.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Iterator, Mapping, Sequence

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


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The identity of a corpus and its tokens, and the sources that were hashed.

    ``num_bytes`` is the stored size of the source, or ``max_bytes`` if that is smaller.
    """

    digest: str
    vocab_size: int
    num_bytes: int
    train: tuple[SourceFile, ...] = ()
    validation: tuple[SourceFile, ...] = ()
    hub: HubSource | None = None
    hf: HfTokenizer | None = None


def identify(data: DataConfig) -> DataIdentity:
    """Identify a corpus without rereading text that was hashed before.

    Raises:
        UserError: the corpus cannot be used as configured; lists every problem, one line each.
    """
    problems = [
        Problem(what=f"data: {what}", hint=hint) for what, _, hint in field_faults(data)
    ]
    if problems:
        raise UserError(*problems)
    hub = find_data_set(data) if data.source == "hub" else None
    if data.tokenizer == "hf" and data.tokenizer_path:
        hf = find_tokenizer(data.tokenizer_path)
    else:
        hf = None
    if hf is not None and data.vocab_size not in (None, hf.vocab_size):
        raise UserError(
            f"the tokenizer has {hf.vocab_size:,} tokens, but data.vocab_size is {data.vocab_size:,}",
            file=hf.json_path,
            hint="is it the one that was meant?",
        )
    validation: list[SourceFile] = []
    if data.source == "stdlib":
        train = stdlib_files()
    elif hub is not None:
        train = list(hub.files)
    else:
        suffixes = {
            "text": TEXT_SUFFIXES,
            "jsonl": JSON_SUFFIXES,
            "tokens": TOKEN_SUFFIXES,
        }[data.source]
        train = find_files(data.paths, suffixes)
        validation = find_files(data.validation_paths, suffixes)
    files = (*train, *validation)
    if data.paths:
        places = [*data.paths, "", *data.validation_paths]
    else:
        places = [sysconfig.get_path("stdlib")]
    hashes = content_hashes(
        files, "\n".join([data.source, *map(os.path.abspath, places)])
    )
    hash_at = dict(zip((file.path for file in files), hashes, strict=True))
    if data.source == "tokens":
        _check_token_files(data.token_dtype, train, validation, hash_at)
    # By name and content: the location of the files does not count, even if names are equal.
    for side in (train, validation):
        side.sort(key=lambda file: (file.name, hash_at[file.path]))
    if hf is not None:
        vocab_size = hf.vocab_size
        tokenizer: Any = hf.identity()
    else:
        vocab_size = data.vocab_size or BYTES_VOCABULARY
        tokenizer = data.tokenizer if data.source != "tokens" else None
    content = {
        "rules": RULES_VERSION,
        "source": data.source,
        "train": [(file.name, hash_at[file.path]) for file in train],
        "validation": [(file.name, hash_at[file.path]) for file in validation],
        "hub": hub.identity() if hub else None,
        "text_field": data.text_field if data.source in ("jsonl", "hub") else None,
        "max_bytes": data.max_bytes,
        "token_dtype": data.token_dtype if data.source == "tokens" else None,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    stored = sum(file.size for file in files)
    return DataIdentity(
        digest=digest,
        vocab_size=vocab_size,
        num_bytes=min(stored or data.max_bytes or 0, data.max_bytes or stored),
        train=tuple(train),
        validation=tuple(validation),
        hub=hub,
        hf=hf,
    )


def _check_token_files(
    dtype: str,
    train: Sequence[SourceFile],
    validation: Sequence[SourceFile],
    hash_at: Mapping[str, str],
) -> None:
    """Reject files of another type, and a whole file on both sides: tokens have no documents to compare."""
    num_bytes = {"uint16": 2, "uint32": 4}[dtype]
    problems = [
        Problem(
            file=file.path,
            what=f"{file.size} bytes are no whole number of {dtype} tokens",
            hint="set data.token_dtype to the type it was written with",
        )
        for file in (*train, *validation)
        if file.size % num_bytes
    ]
    if problems:
        raise UserError(*problems)
    in_training = {hash_at[file.path]: file.path for file in train}
    for file in validation:
        if same := in_training.get(hash_at[file.path]):
            raise UserError(
                f"has the same content as the training file {same}",
                file=file.path,
                hint="validate on other tokens",
            )


def field_faults(data: DataConfig) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    """Yield fields that contradict each other, or that have no effect, so that arms of a grid would be equal.

    Each as (what, the fields, a hint or None).
    """
    source = data.source
    tokenizer = data.tokenizer
    size = data.vocab_size
    if source == "stdlib":
        for key in ("paths", "validation_paths"):
            if getattr(data, key):
                yield f"source stdlib takes no {key}", (key, "source"), None
    elif not data.paths:
        yield f"source {source} needs paths", ("paths", "source"), None
    if data.text_field != "text" and source not in ("jsonl", "hub"):
        yield f"source {source} has no text_field", ("text_field", "source"), None
    if source == "tokens":
        if tokenizer != "bytes":
            yield (
                f"source tokens takes no tokenizer {tokenizer}",
                ("tokenizer", "source"),
                None,
            )
        elif data.tokenizer_path is not None:
            yield (
                "source tokens takes no tokenizer_path",
                ("tokenizer_path", "source"),
                None,
            )
        if size is None:
            yield (
                "source tokens needs vocab_size",
                ("vocab_size", "source"),
                "one above the largest token",
            )
        elif data.token_dtype == "uint16" and size > 1 << 16:  # noqa: S105  a data type, no password
            yield (
                f"vocab_size {size} does not fit uint16",
                ("vocab_size", "token_dtype"),
                "token_dtype: uint32?",
            )
        return
    if data.token_dtype != "uint16":  # noqa: S105
        yield f"source {source} has no token_dtype", ("token_dtype", "source"), None
    if tokenizer == "bpe":
        if size is None:
            yield (
                "tokenizer bpe needs vocab_size",
                ("vocab_size", "tokenizer"),
                "the size to train",
            )
        elif size < BPE_MINIMUM:
            yield (
                f"vocab_size {size} is too small for bpe",
                ("vocab_size", "tokenizer"),
                f"from {BPE_MINIMUM} up: the bytes and an end of text",
            )
    if tokenizer == "bytes" and size is not None:
        yield (
            "tokenizer bytes has a vocabulary of its own",
            ("vocab_size", "tokenizer"),
            "vocab_size is for bpe, hf, and source tokens",
        )
    if tokenizer == "hf" and data.tokenizer_path is None:
        yield (
            "tokenizer hf needs tokenizer_path",
            ("tokenizer_path", "tokenizer"),
            "a local path or a hub name",
        )
    if tokenizer != "hf" and data.tokenizer_path is not None:
        yield (
            f"tokenizer {tokenizer} takes no tokenizer_path",
            ("tokenizer_path", "tokenizer"),
            None,
        )


def held_out_size(total: int, at_least: int = _AT_LEAST_BYTES) -> int:
    """Compute how much of ``total`` to hold out; all in one unit, bytes or tokens."""
    return int(max(_SHARE * total, min(at_least, _AT_MOST * total)))
