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
from functools import partial
from typing import TYPE_CHECKING, Any

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
_ONE_A_LINE = "expected one JSON object a line"
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


def file_documents(file: SourceFile, text_field: str | None, report: Callable[[int], None]) -> Iterator[str]:
    """Yield the documents of a file of JSON lines, or of plain text if ``text_field`` is None.

    ``report`` receives the number of bytes read so far.
    """
    return _text(file, report) if text_field is None else _json_lines(file, text_field, report)


def _text(file: SourceFile, report: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    buffer, is_long = "", False
    for _, block in _read(file, report, by_line=False):
        buffer += decoder.decode(block)
        is_long = is_long or len(buffer) > WHOLE_CHARACTERS
        start = 0
        while is_long and len(buffer) - start > PIECE_CHARACTERS[1]:
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
    if blank := _BLANK_LINE.search(text, low, high):
        return blank.end()
    return text.rfind("\n", low, high) + 1 or text.rfind(" ", low, high) + 1 or high


def _json_lines(file: SourceFile, text_field: str, report: Callable[[int], None]) -> Iterator[str]:
    for number, line in _read(file, report, by_line=True):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not content.strip():
            continue
        try:
            row = parse_json(content.decode("utf-8", "replace"))
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError("is not a JSON object", file=file.path, line=number, hint=_ONE_A_LINE)
        yield text_of(row, text_field, file.path, number)


def text_of(row: dict[str, Any], text_field: str, path: str, number: int) -> str:
    """Return the text of a row; ``path`` and ``number`` say in an error where it is."""
    text = row.get(text_field)
    if not isinstance(text, str):
        hint = f"fields here: {', '.join(row) or 'none'}; set data.text_field"
        raise UserError(f"no text in field '{text_field}'", file=path, line=number, hint=hint)
    return text


def _read(file: SourceFile, report: Callable[[int], None], *, by_line: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the content in lines or blocks, each with the number of the line that it begins in."""
    line = 0
    try:
        with open(file.path, "rb") as raw:  # noqa: PTH123
            is_packed = file.path.endswith(".gz")
            content = io.BufferedReader(gzip.GzipFile(fileobj=raw), _GZIP_BUFFER) if is_packed else raw
            read = partial(content.readline, _LONGEST_LINE + 1) if by_line else partial(content.read, _BLOCK)
            for chunk in iter(read, b""):
                if len(chunk) > _LONGEST_LINE:
                    what = f"a line of over {_LONGEST_LINE:,} bytes"
                    raise UserError(what, file=file.path, line=line + 1, hint=_ONE_A_LINE)
                yield line + 1, chunk
                line += chunk.count(b"\n")
                if not by_line or line % 256 == 0:
                    report(raw.tell())
            report(raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "the download or copy is incomplete; fetch the file again"
        what = f"gzip data is damaged after this line: {error}" if line else f"gzip data is damaged: {error}"
        raise UserError(what, file=file.path, line=line or None, hint=hint) from error
    except OSError as error:
        raise unreadable(file.path, error) from error
