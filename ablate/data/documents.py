"""Split text files into documents, the unit of holding out and comparing; an end-of-text token follows each.

In JSON lines each line is a document. A text file of up to 65,536 characters is one document. A longer file
has no known document structure, so it is cut at blank lines into pieces of 8,192 to 16,384 characters (at a
line end or a space if there is no blank line). Invalid UTF-8 is decoded with replacement characters. Files
are streamed, so a corpus may be larger than memory.

How it fails: ``UserError`` with the file and, if known, the line: damaged gzip, a line that is not a
JSON object, a line without the text field.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from ablate.base.errors import UserError
from ablate.base.files import parse_json
from ablate.data.sources import unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.data.sources import SourceFile

WHOLE_CHARACTERS = 65_536
PIECE_CHARACTERS = (8_192, 16_384)

_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 28
"""Bytes; some kilobytes of gzip can hold a line that no memory does."""
_GZIP_BUFFER = 1 << 15  # at most lost at a damaged place; lines are counted before it
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


def file_documents(file: SourceFile, text_field: str | None, report: Callable[[int], None]) -> Iterator[str]:
    """Yield the documents of a file of JSON lines, or of plain text if ``text_field`` is None.

    ``report`` receives the number of bytes read so far.
    """
    if text_field is None:
        return text_documents(file, report)
    return json_documents(file, text_field, report)


def text_documents(file: SourceFile, report: Callable[[int], None]) -> Iterator[str]:
    """Yield the documents of a text file; ``report`` receives the number of bytes read so far."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with _open(file) as opened:
        buffer = ""
        cutting = False
        while block := opened.content.read(_BLOCK):
            report(opened.raw.tell())
            opened.line += block.count(b"\n")
            buffer += decoder.decode(block)
            cutting = cutting or len(buffer) > WHOLE_CHARACTERS
            if cutting:
                start = 0
                while len(buffer) - start > PIECE_CHARACTERS[1]:
                    end = _cut(buffer, start)
                    yield buffer[start:end]
                    start = end
                buffer = buffer[start:]
        buffer += decoder.decode(b"", final=True)
    if buffer:
        yield buffer


def _cut(text: str, start: int) -> int:
    """Return the end of the piece that begins at ``start``."""
    low, high = start + PIECE_CHARACTERS[0], start + PIECE_CHARACTERS[1]
    blank = _BLANK_LINE.search(text, low, high)
    if blank:
        return blank.end()
    for mark in ("\n", " "):
        at = text.rfind(mark, low, high)
        if at >= 0:
            return at + 1
    return high


def json_documents(file: SourceFile, text_field: str, report: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of each JSON line, with or without gzip."""
    with _open(file) as opened:
        read = partial(opened.content.readline, _LONGEST_LINE + 1)
        for number, line in enumerate(iter(read, b""), start=1):
            if len(line) > _LONGEST_LINE:
                hint = "expected one JSON object a line"
                raise UserError(
                    f"a line of over {_LONGEST_LINE:,} bytes", file=file.path, line=number, hint=hint
                )
            if number % 256 == 0:
                report(opened.raw.tell())
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield _json_text(file, number, content, text_field)
            opened.line = number
        report(opened.raw.tell())


def _json_text(file: SourceFile, number: int, line: bytes, text_field: str) -> str:
    try:
        value = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        hint = "expected one JSON object a line"
        raise UserError("is not a JSON object", file=file.path, line=number, hint=hint)
    return text_of(value, text_field, file.path, number)


def text_of(row: dict[str, Any], text_field: str, path: str, number: int) -> str:
    """Return the text of a row; ``path`` and ``number`` say in an error where it is."""
    text = row.get(text_field)
    if not isinstance(text, str):
        hint = f"fields here: {', '.join(row) or 'none'}; set data.text_field"
        raise UserError(f"no text in field '{text_field}'", file=path, line=number, hint=hint)
    return text


@dataclass(kw_only=True)
class _Opened:
    """A file's content, the raw file whose position is the progress, and the last valid line, for errors."""

    content: BinaryIO
    raw: BinaryIO
    line: int = 0


@contextmanager
def _open(file: SourceFile) -> Iterator[_Opened]:
    line = 0
    try:
        with open(file.path, "rb") as raw:  # noqa: PTH123
            packed = file.path.endswith(".gz")
            content = io.BufferedReader(gzip.GzipFile(fileobj=raw), _GZIP_BUFFER) if packed else raw
            opened = _Opened(content=content, raw=raw)
            try:
                yield opened
            finally:
                line = opened.line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "the download or copy is incomplete; fetch the file again"
        what = f"gzip data is damaged{' after this line' if line else ''}: {error}"
        raise UserError(what, file=file.path, line=line or None, hint=hint) from error
    except OSError as error:
        raise unreadable(file.path, error) from error
