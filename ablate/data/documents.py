"""Split text files into documents, and documents into training and validation text without overlap.

In JSON lines each line is a document. A text file of up to 65,536 characters is one document. A longer file
has no known document structure, so it is cut at blank lines into pieces of 8,192 to 16,384 characters (at a
line end or a space if there is no blank line). Invalid UTF-8 is decoded with replacement characters. Files
are streamed, so a corpus may be larger than memory.

A document's side depends on its content hash, so copies of a document are always on the same side.
Documents are sorted by that hash, and the first ones are held out until they reach 1.5 % of the text,
or 384 KiB if that is more, but at most 10 %. (384 KiB suffice for the default ``eval_tokens`` of 65,536 with
any usual tokeniser.) Validation text holds each document once. Validation text given by the user stays
complete, and its documents are left out of training.

In both cases near copies are left out of training too, such as a review posted twice with another signature,
or a generated table with a few other entries. A training document is a near copy if at least half of its long
lines, by bytes, occur in validation documents. Real corpora show a gap: documents share under a tenth (a
licence, a quotation) or over a half.

How it fails: ``UserError`` with the file and, if known, the line: damaged gzip, a line that is not a
JSON object, a line without the text field; too little text.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from array import array
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ablate.base.errors import UserError
from ablate.base.files import parse_json
from ablate.data.identity import held_out_size
from ablate.data.sources import SourceFile, text_of, unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

WHOLE_CHARACTERS = 65_536
PIECE_CHARACTERS = (8_192, 16_384)

NEAR_COPY = 0.5
LONG_LINE_BYTES = 32

_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 28
"""A line that is larger than the memory can come from some kilobytes of gzip."""
_ONE_A_LINE = "expected one JSON object a line"
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


def file_documents(file: SourceFile, text_field: str | None) -> Iterator[str]:
    """Yield the documents of a file of JSON lines, or of plain text if ``text_field`` is None."""
    if text_field is None:
        yield from _pieces(file)
        return
    for line_number, line in _read(file, by_line=True):
        # a byte order mark
        content = line.removeprefix("\ufeff") if line_number == 1 else line
        if not content.strip():
            continue
        try:
            row = parse_json(content)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                "is not a JSON object",
                file=file.path,
                line=line_number,
                hint=_ONE_A_LINE,
            )
        yield text_of(row, text_field, file.path, line_number)


def _pieces(file: SourceFile) -> Iterator[str]:
    """Yield a plain text whole, or in pieces if it is long."""
    buffer = ""
    is_long = False
    for _, block in _read(file, by_line=False):
        buffer += block
        is_long = is_long or len(buffer) > WHOLE_CHARACTERS
        start = 0
        while is_long and len(buffer) - start > PIECE_CHARACTERS[1]:
            end = _cut(buffer, start)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut(text: str, start: int) -> int:
    """Choose the end of the piece that begins at ``start``."""
    low = start + PIECE_CHARACTERS[0]
    high = start + PIECE_CHARACTERS[1]
    if blank := _BLANK_LINE.search(text, low, high):
        return blank.end()
    return text.rfind("\n", low, high) + 1 or text.rfind(" ", low, high) + 1 or high


def _read(file: SourceFile, *, by_line: bool) -> Iterator[tuple[int, str]]:
    """Yield the content in lines or blocks, each with the number of its first line."""
    line_number = 0
    opened = gzip.open if file.path.endswith(".gz") else open
    try:
        with opened(
            file.path, "rt", encoding="utf-8", errors="replace", newline="\n"
        ) as content:
            if by_line:
                read = partial(content.readline, _LONGEST_LINE + 1)
            else:
                read = partial(content.read, _BLOCK)
            for chunk in iter(read, ""):
                if len(chunk) > _LONGEST_LINE:
                    raise UserError(
                        f"a line of over {_LONGEST_LINE:,} characters",
                        file=file.path,
                        line=line_number + 1,
                        hint=_ONE_A_LINE,
                    )
                yield line_number + 1, chunk
                line_number += chunk.count("\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fault = "gzip data is damaged"
        if line_number:
            fault += " after this line"
        raise UserError(
            f"{fault}: {error}",
            file=file.path,
            line=line_number or None,
            hint="the download or copy is incomplete; fetch the file again",
        ) from error
    except OSError as error:
        raise unreadable(file.path, error) from error


def encoded(documents: Iterable[str], max_bytes: int | None) -> Iterator[bytes]:
    """Yield documents as UTF-8 until they total ``max_bytes``; the last one is kept whole.

    Documents of white space only are dropped.
    """
    num_bytes = 0
    for document in documents:
        text = document.encode("utf-8", "replace")  # JSON can hold lone surrogates
        if not text.strip():
            continue
        yield text
        num_bytes += len(text)
        if max_bytes is not None and num_bytes >= max_bytes:
            return


def content_hash(text: bytes) -> int:
    """Hash a text without surrounding white space; every process gives the same result."""
    return int.from_bytes(hashlib.blake2b(text.strip(), digest_size=8).digest(), "big")


class Documents:
    """The ``hashes`` and ``lengths`` (bytes) of documents, both [documents], and with a path also the texts.

    The texts are in the file ``path``: text from the hub must not be fetched twice, and validation text is
    needed in another order than the source's. A document takes 16 bytes of memory.
    """

    def __init__(self, texts: Iterable[bytes], path: Path | None = None) -> None:
        hashes = array("Q")
        lengths = array("q")
        with path.open("wb") if path else nullcontext() as file:
            for text in texts:
                hashes.append(content_hash(text))
                lengths.append(len(text))
                if file:
                    file.write(text)
        self.hashes: Hashes = np.array(hashes, dtype=np.uint64)
        self.lengths: NDArray[np.int64] = np.array(lengths, dtype=np.int64)
        self._path = path

    def texts(self, indices: Iterable[int] | None = None) -> Iterator[bytes]:
        """Yield documents in the order of ``indices``, default: all; needs the path."""
        starts = np.cumsum(self.lengths) - self.lengths
        assert self._path is not None
        with self._path.open("rb") as file:
            for index in range(len(starts)) if indices is None else indices:
                file.seek(starts[index])
                yield file.read(self.lengths[index])


def hold_out(hashes: Hashes, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose the validation documents: indices sorted by hash, so that their beginning is a fair sample, too.

    Raises:
        UserError: there are fewer than two distinct documents.
    """
    distinct, first = np.unique(hashes, return_index=True)
    if len(distinct) < 2:
        raise UserError(
            f"too little text for a validation set: {len(distinct)} distinct documents",
            hint="add text to data.paths, or name other text in data.validation_paths",
        )
    wanted = held_out_size(int(lengths.sum()))
    count = int(np.searchsorted(np.cumsum(lengths[first]), wanted)) + 1
    return first[: min(count, len(distinct) - 1)]


class ValidationSide:
    """What training text must not repeat: validation documents and their long lines, by their hashes."""

    def __init__(self, validation: Documents) -> None:
        self._documents = set(validation.hashes.tolist())
        self._lines = {
            content_hash(line)
            for text in validation.texts()
            for line in _long_lines(text)
        }

    def leave_out(self, texts: Iterable[bytes]) -> tuple[list[bytes], int]:
        """Return the training documents among ``texts``, and the number of near copies left out.

        At least half of a near copy's long lines, by bytes, are in validation text.
        """
        kept_texts: list[bytes] = []
        near_copies = 0
        for text in texts:
            if content_hash(text) in self._documents:
                continue
            lines = _long_lines(text)
            shared = sum(
                len(line) for line in lines if content_hash(line) in self._lines
            )
            if shared and shared >= NEAR_COPY * sum(map(len, lines)):
                near_copies += 1
            else:
                kept_texts.append(text)
        return kept_texts, near_copies


def _long_lines(text: bytes) -> set[bytes]:
    return {
        line
        for line in map(bytes.strip, text.split(b"\n"))
        if len(line) >= LONG_LINE_BYTES
    }
