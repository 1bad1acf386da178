"""A table as LaTeX, for the ``booktabs`` package; names and signs that LaTeX reads otherwise are escaped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ablate.reports.words import words

if TYPE_CHECKING:
    from ablate.reports.words.table import Table

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
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
