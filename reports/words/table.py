"""A table as text in cells, so that the HTML, Markdown and LaTeX of one cannot differ in a figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in cells. The first column names the row; ``numeric`` holds the columns set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
