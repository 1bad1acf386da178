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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.data.hub import HfTokenizer, HubSource, find_data_set, find_tokenizer
from ablate.data.sources import SourceFile, content_hashes, corpus_files

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
    problems = []
    for what, _, hint in field_faults(data):
        problems.append(Problem(what=f"data: {what}", hint=hint))
    if problems:
        raise UserError(*problems)
    is_tokens = data.source == "tokens"
    content: dict[str, Any] = {
        "rules": RULES_VERSION,
        "source": data.source,
        "hub": None,
        "text_field": None,
        "max_bytes": data.max_bytes,
        "token_dtype": None,
        "tokenizer": data.tokenizer,
        "vocab_size": data.vocab_size or BYTES_VOCABULARY,
    }
    if is_tokens:
        content |= {"token_dtype": data.token_dtype, "tokenizer": None}
    elif data.source in ("jsonl", "hub"):
        content["text_field"] = data.text_field
    hf = None
    if data.tokenizer_path is not None:
        hf = find_tokenizer(data.tokenizer_path)
        content |= {"tokenizer": hf.identity(), "vocab_size": hf.vocab_size}
        if data.vocab_size not in (None, hf.vocab_size):
            raise UserError(
                f"the tokenizer has {hf.vocab_size:,} tokens, but data.vocab_size is {data.vocab_size:,}",
                file=hf.json_path,
                hint="is it the one that was meant?",
            )
    hub = None
    validation: list[SourceFile] = []
    if data.source == "hub":
        hub = find_data_set(data)
        content["hub"] = hub.identity()
        train = list(hub.files)
    else:
        train = corpus_files(data.source, data.paths)
        if data.validation_paths:
            validation = corpus_files(data.source, data.validation_paths)
    files = train + validation
    places = map(os.path.abspath, [*data.paths, *data.validation_paths])
    hashes = content_hashes(files, "\n".join([data.source, *places]))
    hash_at = dict(zip((file.path for file in files), hashes, strict=True))
    if is_tokens:
        _check_token_files(data.token_dtype, train, validation, hash_at)
    # By name and content: the location of the files does not count, even if names are equal.
    for side, side_files in (("train", train), ("validation", validation)):
        side_files.sort(key=lambda file: (file.name, hash_at[file.path]))
        content[side] = [(file.name, hash_at[file.path]) for file in side_files]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    stored = sum(file.size for file in files)
    return DataIdentity(
        digest=digest,
        vocab_size=content["vocab_size"],
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
    problems = []
    for file in (*train, *validation):
        if file.size % num_bytes:
            fault = f"{file.size} bytes are no whole number of {dtype} tokens"
            hint = "set data.token_dtype to the type it was written with"
            problems.append(Problem(file=file.path, what=fault, hint=hint))
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
