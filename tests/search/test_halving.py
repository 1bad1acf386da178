"""Fronts as defined, and the order in which trials go on to a larger budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from ablate.search.halving import DIVERGED, crowding, dominates, front, promoted
from ablate.search.ledger import VIOLATION


def trial(number, values, violation=0.0, state=TrialState.COMPLETE):
    made = create_trial(state=state, values=values, constraints={VIOLATION: violation})
    made.number = number
    return made


def test_the_front_is_what_nothing_dominates():
    trials = [trial(0, (1.0, 1.0)), trial(1, (2.0, 0.5)), trial(2, (2.0, 1.0)), trial(3, (0.5, 0.1), 1.0)]
    trials += [trial(4, None, state=TrialState.FAIL), trial(5, (1.0, 1.0))]
    assert [one.number for one in front(trials)] == [1, 0, 5]
    assert front([]) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_nothing_dominates_the_front_and_all_else_is_dominated(points):
    trials = [trial(number, point) for number, point in enumerate(points)]
    best = {one.number for one in front(trials)}
    for number, point in enumerate(points):
        assert (number in best) == (not any(dominates(other, point) for other in points))


def test_promotion_keeps_the_whole_front_and_the_share():
    trials = [trial(i, (i / 10, 1 - i / 10)) for i in range(5)]  # all on the front
    assert len(promoted(trials, 0.2)) == 5
    trials = [trial(0, (0.0, 0.0)), trial(1, (1.0, 1.0)), trial(2, (2.0, 2.0)), trial(3, (3.0, 3.0))]
    assert [one.number for one in promoted(trials, 0.5)] == [0, 1]
    assert [one.number for one in promoted(trials, 0.6)] == [0, 1, 2]
    missed = [
        trial(0, (0.0, 0.0)),
        trial(1, (1.0, 1.0), 0.3),
        trial(2, (1.0, 1.0), 0.1),
        trial(3, (1.0, 1.0), DIVERGED),
    ]
    assert [one.number for one in promoted(missed, 1.0)] == [0, 2, 1]


def test_within_a_layer_the_lonely_ones_are_promoted_first():
    best = [trial(0, (0.0, 0.0))]
    layer = [trial(1, (1.0, 4.0)), trial(2, (1.1, 3.9)), trial(3, (2.5, 2.5)), trial(4, (4.0, 1.0))]
    assert [one.number for one in promoted(best + layer, 0.8)] == [0, 1, 4, 3]


def test_crowding_is_the_gap_to_the_neighbours():
    far = crowding({0: (0.0, 4.0), 1: (1.0, 2.0), 2: (1.5, 1.0), 3: (4.0, 0.0)})
    assert far[0] == far[3] == float("inf")
    assert far[1] == pytest.approx(1.5 / 4 + 3 / 4)
