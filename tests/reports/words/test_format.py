"""Numbers, intervals and tables as text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from ablate.reports.pages.render import escape_markdown, latex
from ablate.reports.words import format as words
from ablate.reports.words.format import Column, escape_latex, make_table, number
from ablate.results.cost import Cost
from ablate.results.intervals import Interval
from tests.golden import rows_of

VALUES = """
tokens   | 0.0                                                  | 0
tokens   | 950                                                  | 950
tokens   | 999.7                                                | 1 k
tokens   | 4096                                                 | 4.1 k
tokens   | 623400                                               | 623 k
tokens   | 999999                                               | 1 M
tokens   | 1234567                                              | 1.23 M
tokens   | 21000000000                                          | 21 B
tokens   | 3000000000000                                        | 3 T
tokens   | null                                                 | –
percent  | 0.1824                                               | +18.2 %
percent  | -0.031                                               | −3.1 %
percent  | 0.00001                                              | 0.0 %
percent  | 12.34                                                | +1234 %
percent  | null                                                 | –
share    | -0.031                                               | 3.1 %
cost     | {kind: interval, estimate: 0.18, low: 0.14, high: 0.22} | +18.0 % [+14.0, +22.0]
cost     | {kind: point, estimate: 0.18, counted_from: 250}     | +18.0 % from 250 on
cost     | {kind: bound, low: 0.35}                             | > +35.0 %
cost     | {kind: bound, high: 0.35}                            | ≤ +35.0 %
cost     | {kind: bound, low: 0.1, high: 0.35}                  | between +10.0 and +35.0 %
cost     | {kind: none}                                         | –
cost     | {kind: baseline}                                     | baseline
times    | {estimate: 1.1, low: 1.0, high: 1.2}                 | 1.10× [1.00, 1.20]
interval | {estimate: 2.0}                                      | 2.0000
difference | {estimate: -0.00001, low: -0.1, high: 0.1} | 0.0000 [−0.1000, +0.1000]
listed   | [a]                                                  | a
listed   | [a, b, c]                                            | a, b and c
moment   | 1700000000                                           | 2023-11-14 22:13 UTC
"""


@pytest.mark.parametrize(("write", "value", "text"), rows_of(VALUES))
def test_values(write, value, text):
    value = yaml.safe_load(value)
    if isinstance(value, dict):
        value = (Cost if "kind" in value else Interval)(**value)
    assert getattr(words, write)(value).replace(words.NBSP, " ") == text


NAME = "<script>alert(1)</script> | *a* `b` [c](d) $x^2$ & \\ _e_ #\n50% \u202e\x07"


def test_names_are_escaped_in_every_form():
    assert escape_latex(NAME + "\u00a0\u22121.5 1.09×") == (
        r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{} | *a* `b` [c](d) "
        r"\$x\textasciicircum{}2\$ \& \textbackslash{} \_e\_ \# 50\% ~$-$1.5 1.09$\times$"
    )
    assert escape_markdown(NAME) == (
        r"&lt;script>alert(1)&lt;/script> \| \*a\* \`b\` \[c\](d) \$x^2\$ &amp; \\ \_e\_ \# 50% "
        r"\\u202e\\x07"
    )


def test_a_table_in_latex():
    columns = [Column("Arm", "name"), number("n", "n")]
    records = [SimpleNamespace(name="fp8", n=3), SimpleNamespace(name="a&b", n=None)]
    table = make_table("arms", "The arms", "Arms.", columns, records)
    assert latex(table) == (
        "\\begin{table}\n  \\centering\n  \\caption{Arms.}\n  \\label{tab:arms}\n  \\begin{tabular}{lr}\n"
        "    \\toprule\nArm & n \\\\\n    \\midrule\nfp8 & 3 \\\\\na\\&b & -- \\\\\n"
        "    \\bottomrule\n  \\end{tabular}\n\\end{table}\n"
    )
