"""Whether a change is kept: look by look, and over the looks' levels."""

from __future__ import annotations

import pytest
from runs_in_words import runs_of

from ablate.results.change_rule import judge, level_in_loop
from ablate.results.intervals import Method
from ablate.results.stop_rule import level_of_looks
from tests.golden import rows_of

LOOKS = (2, 3, 4, 5)
BASE = "100 101 99 100.5 99.5"
JUDGEMENTS = """
88 92 89.2 120 130        | 0   | keep 3
88 92 89.2 - -            | 0   | keep 3
112 108 110 - -           | 0   | discard 3
100.4 100.8 99.1 - -      | 0   | discard 3
# The margin is what would still be kept, and it moves both ends.
101 101 100 - -           | 4%  | keep 3
114 111.5 112 - -         | 4%  | discard 3
99 101 99.2 100.4 98.9    | 0   | undecided 5
# Not all runs of a look have a result.
99 - 99.2 100.4 98.9      | 0   | open 2
99 101 99.2 - -           | 0   | open 4
# What never reaches the target is no saving.
c150 x150 c151 - -        | 0   | discard 3
x150 90 89.2 - -          | 0   | discard 3
"""


@pytest.mark.parametrize(("change", "margin", "expected"), rows_of(JUDGEMENTS))
def test_the_first_look_that_decides_judges_the_change(change, margin, expected):
    method = Method(paired=True, alpha=level_of_looks(LOOKS, one_sided=True))
    limit = float(margin.rstrip("%")) / 100
    judgement = judge((runs_of(change), runs_of(BASE)), LOOKS, method, limit)
    assert f"{judgement.decision} {judgement.seeds}" == expected
    assert (judgement.cost is None) == (expected == "open 2")


def test_a_loop_spends_its_level_once():
    assert level_of_looks((2,), 0.01, one_sided=True) == pytest.approx(0.02, rel=0.05)
    assert 0.05 > level_of_looks(LOOKS, one_sided=True) > 2 * 0.05 / len(LOOKS)
    assert sum(map(level_in_loop, range(1, 10_000))) == pytest.approx(0.05, rel=2e-4)
