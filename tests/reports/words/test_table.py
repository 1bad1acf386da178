"""Tables as LaTeX."""

from __future__ import annotations

import re

import pytest

from ablate.reports.findings.analyse import analyse
from ablate.reports.words.table import Table, escape_latex, to_latex
from ablate.reports.words.tables import headline
from ablate.results.frames import load_frames


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b & 50% of $x$ #1", r"a\_b \& 50\% of \$x\$ \#1"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("+8.6\u00a0%", r"+8.6~\%"),
        ("\u22121.5", "$-$1.5"),
        ("a\nb  c", "a b c"),
        ("a\u00a0b\nc", "a~b c"),
        ("1.09×", r"1.09$\times$"),
        ("<b>\x07", r"\textless{}b\textgreater{}"),
        ("", ""),
    ],
)
def test_escapes(text, expected):
    assert escape_latex(text) == expected


def test_a_table():
    table = Table(
        caption="Arms.", columns=("Arm", "n"), rows=(("fp8", "3"), ("a&b", "2")), numeric=frozenset({1})
    )
    text = to_latex(table, "arms")
    assert r"\begin{tabular}{lr}" in text
    assert r"\toprule" in text
    assert r"\label{tab:arms}" in text
    assert r"    a\&b & 2 \\" in text


def test_every_row_of_a_report_has_its_cells(ladder):
    table = headline(analyse(load_frames(ladder)))
    text = to_latex(table, "arms")
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == len(table.rows) + 1
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.columns) - 1}
    assert text.isascii()
