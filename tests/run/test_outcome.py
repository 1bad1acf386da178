from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.run.outcome import find_crossing, outcome
from ablate.store.plan_file import Target


def at(tokens, loss, target, rule="confirmed"):
    crossing = find_crossing(tokens, loss, target, rule)
    return None if crossing is None else (crossing.tokens, crossing.left_bound)


def test_interpolates_between_the_two_evaluations_around_it():
    # Half-way in ln tokens, in which loss curves are nearly straight.
    assert at([100, 200, 300, 400], [4.0, 3.0, 2.0, 1.0], 2.5) == (pytest.approx(60_000**0.5), False)


def test_from_an_evaluation_at_no_tokens_it_is_linear_for_0_has_no_logarithm():
    assert at([0, 200, 300], [4.0, 2.0, 1.0], 3.0) == (100.0, False)


def test_a_single_evaluation_under_the_target_is_no_crossing():
    # 200 is under, 300 is not: the crossing is the one before 400, which 500 confirms.
    tokens, left_bound = at([100, 200, 300, 400, 500], [3.0, 1.9, 2.2, 1.8, 1.7], 2.0)
    assert (tokens, left_bound) == (pytest.approx(120_000**0.5), False)


def test_the_last_evaluation_confirms_itself():
    assert at([100, 200, 300], [3.0, 2.5, 1.5], 2.0) == (pytest.approx(60_000**0.5), False)


def test_first_eval_takes_the_first_lucky_evaluation():
    assert at([100, 200, 300, 400, 500], [3.0, 1.9, 2.2, 1.8, 1.7], 2.0, "first_eval") == (200.0, False)


def test_under_the_target_from_the_start_is_bounded_on_the_left():
    assert at([100, 200], [1.0, 0.9], 2.0) == (100.0, True)
    # Not confirmed at the first evaluation, hence no bound on the left.
    assert at([100, 200, 300, 400], [1.9, 2.1, 1.9, 1.8], 2.0) == (pytest.approx(60_000**0.5), False)


@pytest.mark.parametrize(
    "loss", [[3.0, 3.0, 3.0], [2.5, 3.0, 3.5], [3.0], []], ids=["constant", "rising", "one point", "none"]
)
@pytest.mark.parametrize("rule", ["confirmed", "first_eval"])
def test_curves_that_never_cross(loss, rule):
    assert find_crossing([100, 200, 300][: len(loss)], loss, 2.0, rule) is None


def test_one_point_under_the_target():
    assert at([100], [1.0], 2.0) == (100.0, True)


def test_exactly_at_the_target_counts():
    assert at([100, 200, 300], [3.0, 2.0, 1.0], 2.0) == (pytest.approx(200.0), False)


def test_perplexity_is_the_exponential_of_the_loss():
    assert Target(kind="perplexity", value=27.1).val_loss == pytest.approx(3.2995, abs=1e-4)
    assert Target(kind="val_loss", value=3.3).val_loss == 3.3


losses = st.lists(st.floats(0.5, 6.0), min_size=1, max_size=30)
rules = st.sampled_from(["confirmed", "first_eval"])


@given(loss=losses, target=st.floats(0.5, 6.0), rule=rules, seed=st.integers(0, 99))
def test_the_order_of_rows_and_repeated_rows_do_not_matter(loss, target, rule, seed):
    tokens = np.arange(1, len(loss) + 1) * 50
    rng = np.random.default_rng(seed)
    rows = np.concatenate([np.arange(len(loss)), rng.integers(0, len(loss), 5)])
    rng.shuffle(rows)
    expected = find_crossing(tokens, loss, target, rule)
    assert find_crossing(tokens[rows], np.array(loss)[rows], target, rule) == expected


@given(loss=losses, low=st.floats(0.5, 6.0), high=st.floats(0.5, 6.0), rule=rules)
def test_an_easier_target_is_never_reached_later(loss, low, high, rule):
    low, high = sorted((low, high))
    tokens = np.arange(1, len(loss) + 1) * 50
    hard = find_crossing(tokens, loss, low, rule)
    easy = find_crossing(tokens, loss, high, rule)
    if hard is not None:
        assert easy is not None
        assert easy.tokens <= hard.tokens * (1 + 1e-12)


@given(loss=losses, target=st.floats(0.5, 6.0), rule=rules, unit=st.sampled_from([2, 1000, 8192]))
def test_a_change_of_the_unit_of_tokens_scales_the_result(loss, target, rule, unit):
    tokens = np.arange(1, len(loss) + 1) * 50
    one = find_crossing(tokens, loss, target, rule)
    other = find_crossing(tokens * unit, loss, target, rule)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert other.tokens == pytest.approx(one.tokens * unit)
        assert other.left_bound == one.left_bound


@given(loss=losses, target=st.floats(0.5, 6.0))
def test_the_crossing_lies_in_the_interval_that_the_first_confirmed_evaluation_ends(loss, target):
    tokens = np.arange(1, len(loss) + 1) * 50.0
    crossing = find_crossing(tokens, loss, target)
    under = [value <= target for value in loss]
    naive = next((i for i in range(len(loss)) if under[i] and (i + 1 == len(loss) or under[i + 1])), None)
    if naive is None:
        assert crossing is None
    else:
        assert crossing is not None
        slack = 1 + 1e-12
        assert tokens[max(naive - 1, 0)] <= crossing.tokens * slack
        assert crossing.tokens <= tokens[naive] * slack


def end_of(state, loss, target=2.0):
    tokens = np.arange(1, len(loss) + 1) * 100
    return outcome(
        seed=0, state=state, tokens=tokens, loss=loss, target=target, rule="confirmed", budget_tokens=900
    )


def test_ends():
    assert end_of("finished", [3.0, 1.0]).end == "hit"
    assert end_of("finished", [3.0, 2.5]).end == "censored"
    assert (end_of("finished", [3.0, 2.5]).low, end_of("finished", [3.0, 2.5]).high) == (200, math.inf)
    for state in ("pending", "running", "failed", "interrupted"):
        assert end_of(state, [3.0, 1.0, 0.5]).end == "missing"
    assert end_of("finished", []).end == "missing"


def test_a_diverged_run_never_reached_the_target_even_if_it_was_under_it():
    diverged = end_of("diverged", [3.0, 1.0, 1.0, 9.0])
    assert (diverged.end, diverged.low, diverged.high) == ("diverged", 900, math.inf)


@given(
    loss=losses,
    target=st.floats(0.5, 6.0),
    rule=rules,
    holes=st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=5
    ),
)
def test_an_evaluation_without_a_finite_loss_is_none(loss, target, rule, holes):
    tokens = [100 * (i + 1) for i in range(len(loss))]
    bare = find_crossing(tokens, loss, target, rule)
    with_holes = sorted([*zip(tokens, loss, strict=True), *((50 + 100 * at, value) for at, value in holes)])
    found = find_crossing(*zip(*with_holes, strict=True), target, rule)
    assert found == bare
