"""Whether a change is kept: look by look, and over the looks' levels."""

from __future__ import annotations

import pytest
from runs_in_words import runs_of

from ablate.results.change_rule import alpha_of, judge, level_in_loop
from ablate.results.intervals import Method
from tests.golden import rows_of

LOOKS = (2, 3, 4, 5)
BASE = "100 101 99 100.5 99.5"
JUDGEMENTS = """
88 92 89.2 120 130        | 0   | keep 3: better
88 92 89.2 - -            | 0   | keep 3: better
112 108 110 - -           | 0   | discard 3: shown to be worse
100.4 100.8 99.1 - -      | 0   | discard 3: looks worse after half
# The margin is what would still be kept, and it moves both ends.
101 101 100 - -           | 4%  | keep 3: better
114 111.5 112 - -         | 4%  | discard 3: shown to be worse
99 101 99.2 100.4 98.9    | 0   | undecided 5: used up
# Not all runs of a look have a result.
99 - 99.2 100.4 98.9      | 0   | open 2: not all
99 101 99.2 - -           | 0   | open 4: not all
# What never reaches the target is no saving; cut at the budget it is shown to cost.
c150 x150 c151 - -        | 0   | discard 2: shown to be worse
x150 90 89.2 - -          | 0   | discard 3: looks worse after half
"""


@pytest.mark.parametrize(("change", "margin", "expected"), rows_of(JUDGEMENTS))
def test_the_first_look_that_decides_judges_the_change(change, margin, expected):
    method = Method(paired=True, alpha=alpha_of(LOOKS))
    limit = float(margin.rstrip("%")) / 100
    judgement = judge((runs_of(change), runs_of(BASE)), LOOKS, method, limit)
    decision, seeds, *reason = expected.replace(":", "").split(maxsplit=2)
    assert (judgement.decision, judgement.seeds) == (decision, int(seeds))
    assert reason[0] in judgement.reason
    assert (judgement.cost is None) == (expected == "open 2: not all")


def test_a_loop_spends_its_level_once():
    assert alpha_of((2,)) == pytest.approx(0.10, abs=0.001)
    assert 0.05 > alpha_of(LOOKS) > 2 * 0.05 / len(LOOKS)
    assert alpha_of(LOOKS, 0.01) == 0.005
    assert sum(map(level_in_loop, range(1, 10_000))) == pytest.approx(0.05, rel=2e-4)
