from __future__ import annotations

import pytest

from ablate.reports.words import words
from ablate.results.cost import Cost
from ablate.results.intervals import Interval


def plain(text: str) -> str:
    return text.replace(words.NBSP, " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (950, "950"), (999.7, "1.00 k"), (4096, "4.10 k"), (623_400, "623 k"),
        (999_999, "1.00 M"), (1_234_567, "1.23 M"), (2.1e10, "21.0 B"), (3e12, "3000 B"), (None, "–"),
    ],
)  # fmt: skip
def test_tokens(value, text):
    assert plain(words.tokens(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1824, "+18.2 %"), (-0.031, "−3.1 %"), (0.00001, "0.0 %"), (12.34, "+1234 %"), (None, "–")],
)
def test_percent(value, text):
    assert plain(words.percent(value)) == text


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (Cost(kind="interval", estimate=0.18, low=0.14, high=0.22), "+18.0 % [+14.0, +22.0]"),
        (Cost(kind="point", estimate=0.18), "+18.0 % (no interval)"),
        (Cost(kind="bound", low=0.35), "> 35.0 %"),
        (Cost(kind="bound", low=-0.05), "> −5.0 %"),
        (Cost(kind="bound", high=0.35), "< +35.0 %"),
        (Cost(kind="none"), "–"),
        (Cost(kind="baseline"), "baseline"),
    ],
)
def test_costs(cost, text):
    assert plain(words.cost(cost)) == text


def test_intervals():
    assert plain(words.tokens_interval(Interval(estimate=6e5, low=5e5, high=7e5))) == "600 k [500 k, 700 k]"
    assert plain(words.tokens_interval(Interval(low=1e6))) == "> 1.00 M"
    assert words.loss_interval(Interval(estimate=0.01234), difference=True) == "+0.0123"
    assert words.loss_interval(Interval(estimate=-0.00001, low=-0.1, high=0.1), difference=True) == (
        "0.0000 [−0.1000, +0.1000]"
    )
    assert words.moment(1.7e9) == "2023-11-14 22:13 UTC"
