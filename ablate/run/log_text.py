"""The text of logs: whole files, and what is new in files that a running command writes.

Every reader of logs takes its text from here, so all read the same: gzip, UTF-8 with or without a mark,
UTF-16 and UTF-32 with one, any line ends, carriage returns of progress bars, colours of terminals.

How it fails: bytes that are no text in the file's encoding stay visible as lone surrogates, or as U+FFFD.
"""

from __future__ import annotations

import codecs
import ctypes
import glob
import gzip
import io
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.files import hash_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

    from ablate.run.log_rows import LogSource

LONGEST_LINE = 1 << 16
"""Longer lines are read in parts of so many characters, as a file may have no line breaks."""
_PIECE = 1 << 20
_HEAD = 64
_MOST_AT_ONCE = 1 << 26
"""Bytes of a running command's output that one look reads at most."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def files_of(pattern: str) -> list[Path]:
    """List the files that a path with ``*``, ``**`` or ``?`` names, sorted."""
    return sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207  Path.glob takes no absolute one


def _encoding_of(head: bytes) -> tuple[str, int]:
    """Return the encoding of a text that begins with these bytes, and the length of its mark.

    Garbled output may begin as UTF-16 does, but it has no zero bytes, which ASCII has there.
    """
    for mark, encoding in _MARKS.items():
        if head.startswith(mark) and (encoding == "utf-8" or b"\0" in head):
            return encoding, len(mark)
    return "utf-8", 0


def open_text(path: Path, *, newline: str | None = None) -> TextIO:
    """Open a log for reading; ``newline`` as of ``open``.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    content = gzip.open(path) if is_packed else path.open("rb")  # noqa: SIM115  the caller closes it
    encoding, mark = _encoding_of(content.peek(_HEAD)[:_HEAD])
    content.read(mark)
    errors = "surrogateescape" if encoding == "utf-8" else "replace"
    return io.TextIOWrapper(content, encoding=encoding, errors=errors, newline=newline)


def texts_of(path: Path, source: LogSource) -> Iterator[tuple[int, str]]:
    """Yield what ``LogReader`` reads of a file, with the number of the line: lines, or the whole.

    A long line comes in parts.

    Raises:
        OSError: the file cannot be read.
    """
    form = source.format.form
    if form == "events":
        for text in Events(source).new(
            sorted(path.parent.glob("events.out.tfevents.*"))
        ):
            yield 1, text
        return
    with open_text(path) as file:
        if form in ("json", "csv"):
            yield 1, file.read()
            return
        for line_number, line in enumerate(
            iter(lambda: file.readline(LONGEST_LINE), ""), 1
        ):
            yield line_number, without_colours(line).strip()


def without_colours(text: str) -> str:
    """Remove ANSI's codes of colours."""
    return _COLOURS.sub("", text)


def read_bytes(path: Path) -> bytes:
    """Read a whole log as UTF-8.

    Raises:
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    encoding, mark = _encoding_of(content[:_HEAD])
    if encoding == "utf-8":
        return content[mark:]
    return content[mark:].decode(encoding, "replace").encode()


def _digest_before(path: Path, offset: int) -> str | None:
    """Hash the bytes of a file before a place; None if it is shorter."""
    try:
        with path.open("rb") as file:
            start = max(0, offset - _HEAD)
            file.seek(start)
            content = file.read(offset - start)
            return hash_of(content) if file.tell() == offset else None
    except OSError:
        return None


def last_bytes(path: Path) -> bytes:
    """Return the last bytes of a file, at most a MiB."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _PIECE))
        return file.read()


def _next_data(descriptor: int, offset: int, size: int) -> int:
    """Return the place of the next byte that is kept in a file from which parts were left out."""
    if offset >= size:
        return offset
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # nothing more, or a file system without holes
        return offset


def leave_out(path: Path, begin: int, end: int) -> bool:
    """Free the storage of a part of a file, which then reads as zeros; tell whether the file system can."""
    # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h
    keep_size_and_punch = 0x01 | 0x02
    with path.open("rb+") as file:
        fallocate = ctypes.CDLL(None).fallocate
        places = (ctypes.c_int64(begin), ctypes.c_int64(end - begin))
        return bool(fallocate(file.fileno(), keep_size_and_punch, *places) == 0)


def is_cut(path: Path) -> bool:
    """Tell whether a part of a file was left out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return size > 0 and file.seek(0, os.SEEK_HOLE) < size


class NewText:
    """New lines of a text that is still written; a carriage return ends a line, too."""

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._begin()
        if known is not None:
            offset = known["offset"]
            if known["digest"] == _digest_before(path, offset):
                self.offset = offset

    @property
    def known(self) -> dict[str, Any]:
        """What another reader needs to go on from here, as plain data; without the rest of a line."""
        offset = self.offset - len(self._rest.encode("utf-8", "replace"))
        return {"offset": offset, "digest": _digest_before(self.path, offset)}

    def _begin(self) -> None:
        self.is_behind = False
        self.offset = 0
        self._rest = ""
        self._decoder: codecs.IncrementalDecoder | None = None

    def new(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the lines of ``new_pieces``."""
        for lines in self.new_pieces(ended=ended):
            yield from lines

    def new_pieces(self, *, ended: bool = False) -> Iterator[list[str]]:
        """Yield lines without colours and outer blanks, of some MiB at most (``is_behind``: there are more).

        ``ended``: nothing more is written, so that an incomplete last line counts, too.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if size < self.offset:  # written anew
                self._begin()
            self.offset = _next_data(file.fileno(), self.offset, size)
            end = min(size, self.offset + _MOST_AT_ONCE)
            file.seek(self.offset)
            while self.offset < end and (
                piece := file.read(min(_PIECE, end - self.offset))
            ):
                self.offset += len(piece)
                yield self._lines(piece)
            self.is_behind = self.offset < size
        if ended and self._rest and not self.is_behind:
            yield [without_colours(self._rest).strip()]
            self._rest = ""

    def _lines(self, piece: bytes) -> list[str]:
        if self._decoder is None:
            encoding, mark = _encoding_of(piece[:_HEAD])
            piece = piece[mark:]
            self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        text = (self._rest + self._decoder.decode(piece)).replace("\r", "\n")
        *lines, self._rest = without_colours(text).split("\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        return [line.strip() for line in lines]


class NewFiles:
    """What is new in the files at a place (a path or glob): lines of text, or other forms as JSON."""

    def __init__(self, source: LogSource, place: str) -> None:
        self._source = source
        self._place = place
        self._texts: dict[Path, NewText] = {}
        self._events = Events(source)
        self._newest = 0.0

    def new(self, *, ended: bool = False) -> Iterator[str]:
        """Yield lines, or the newest of whole files; ``ended``: nothing more is written."""
        form = self._source.format.form
        if form == "events":
            yield from self._events.new(
                files_of(f"{self._place}/**/events.out.tfevents.*")
            )
        elif form in ("json", "csv"):
            written = max(
                ((path.stat().st_mtime, path) for path in files_of(self._place)),
                default=None,
            )
            if written and (ended or written[0] > self._newest):
                self._newest, newest_file = written
                for _, text in texts_of(newest_file, self._source):
                    yield text
        elif self._source.place:
            for path in files_of(self._place):
                yield from self._texts.setdefault(path, NewText(path)).new(ended=ended)


class Events:
    """New values in TensorBoard's event files, as one line of JSON for each step."""

    def __init__(self, source: LogSource) -> None:
        self._tags = set().union(*source.format.keys.values())
        self._loaders: dict[Path, Any] = {}

    def new(self, paths: Sequence[Path]) -> Iterator[str]:
        """Yield the new values of the tags that are read, by rising steps."""
        from tensorboard.backend.event_processing.event_file_loader import (
            EventFileLoader,
        )
        from tensorboard.util import tensor_util

        rows: dict[int, dict[str, float]] = {}
        for path in paths:
            for event in self._loaders.setdefault(
                path, EventFileLoader(str(path))
            ).Load():
                for value in event.summary.value:
                    if value.tag in self._tags:
                        row = rows.setdefault(event.step, {"step": event.step})
                        row[value.tag] = float(tensor_util.make_ndarray(value.tensor))
        for step in sorted(rows):
            yield json.dumps(rows[step])
