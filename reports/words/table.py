"""A table as text in cells, so that the HTML, Markdown and LaTeX of one cannot differ in a figure.

LaTeX is for the ``booktabs`` package; names and signs that it reads otherwise are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

Row = TypeVar("Row")

_ESCAPES = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    words.NBSP: "~",
    words.MINUS: "$-$",
    "×": r"$\times$",
    "≤": r"$\le$",
    "±": r"$\pm$",
    "→": r"$\to$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in cells. The first column names the row; ``numeric`` holds the columns set to the right.

    ``tones``: of a cell, by row and column, what was found there, as a page colours it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: Collection[int] = ()
    tones: Mapping[tuple[int, int], str] = field(default_factory=dict)


def make_table(
    caption: str,
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    numeric: Collection[int] = (),
) -> Table:
    """Return a table with a row for each of ``rows``. ``columns``: head → what writes its cell."""
    return Table(
        caption=caption,
        columns=tuple(columns),
        rows=tuple(tuple(write(row) for write in columns.values()) for row in rows),
        numeric=numeric,
    )


def escape_latex(text: str) -> str:
    """Return text as LaTeX prints it; line breaks become spaces, characters that cannot be printed go."""
    flat = re.sub(r"[ \t\r\n]+", " ", text).strip(" ")  # a space that may not break stays
    return "".join(_ESCAPES.get(c, c if c.isprintable() else "") for c in flat)


def to_latex(table: Table, label: str) -> str:
    """Return a table environment with the table, its caption and a label."""
    alignment = "".join("r" if i in table.numeric else "l" for i in range(len(table.columns)))
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_latex(table.caption)}}}",
        rf"  \label{{tab:{label}}}",
        rf"  \begin{{tabular}}{{{alignment}}}",
        r"    \toprule",
        f"    {' & '.join(escape_latex(column) for column in table.columns)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(escape_latex(cell) for cell in row)} \\\\" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
