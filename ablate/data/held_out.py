"""How much text is held out for validation, from sizes alone; light enough for planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.data.sources import SourceFile
    from ablate.run.config import DataConfig

_SHARE = 0.015
_AT_MOST = 0.1
_AT_LEAST_BYTES = 384 * 1024
AT_LEAST_TOKENS = 98_304
"""The tokens of 384 KiB of text at four bytes per token."""

_WHOLE_BYTES, _PIECE_BYTES = 65_536, 16_384
"""A text file up to this size is one document; of a longer one a piece is (``ablate.data.documents``)."""
_BYTES_PER_TOKEN = {"bytes": (1, 1), "bpe": (2, 5), "hf": (2, 5)}
"""By tokeniser, at least and usually at most."""


def held_out_size(total: int, at_least: int = _AT_LEAST_BYTES) -> int:
    """Return the part of ``total`` to hold out, in the same unit."""
    return int(max(_SHARE * total, min(at_least, _AT_MOST * total)))


def validation_tokens(
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
