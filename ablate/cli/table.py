"""Plain tables for the terminal: fast for thousands of rows, and nothing to import.

Columns are as wide as their content; if that exceeds the width, the widest columns wrap.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = "  "
_NARROWEST = 8


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Return a table as text that fits the width, if its columns can be that narrow."""
    widths = [max(_cells(row[i]) for row in (header, *rows)) for i in range(len(header))]
    room = width - len(_GAP) * (len(header) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widest = widths.index(max(widths))
        second = max([_NARROWEST, *widths[:widest], *widths[widest + 1 :]])
        excess = sum(widths) - room
        widths[widest] = max(min(second, widths[widest] - 1), widths[widest] - excess)
    lines = []
    for row in (header, *rows):
        wrapped = [
            [cell] if _cells(cell) <= size else textwrap.wrap(cell, size)
            for cell, size in zip(row, widths, strict=True)
        ]
        for i in range(max(map(len, wrapped))):
            parts = [cell[i] if i < len(cell) else "" for cell in wrapped]
            padded = [part + " " * (size - _cells(part)) for part, size in zip(parts, widths, strict=True)]
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def _cells(text: str) -> int:
    """Return how many places a text takes on the screen; East Asian characters take two."""
    if text.isascii():
        return len(text)
    import unicodedata

    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
