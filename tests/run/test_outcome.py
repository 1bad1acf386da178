import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.run.outcome import LocalFit, find_crossing, outcome


@pytest.mark.parametrize(
    ("tokens", "loss", "target", "expected"),
    [
        (
            [100, 200, 300, 400],
            [4.0, 3.0, 2.0, 1.0],
            2.5,
            60_000**0.5,
        ),  # half-way in ln tokens
        ([0, 200, 300], [4.0, 2.0, 1.0], 3.0, 100.0),  # 0 has no logarithm: linear
        # 200 is under, 300 is not: the crossing is the one before 400, which 500 confirms.
        ([100, 200, 300, 400, 500], [3.0, 1.9, 2.2, 1.8, 1.7], 2.0, 120_000**0.5),
        (
            [100, 200, 300],
            [3.0, 2.5, 1.5],
            2.0,
            60_000**0.5,
        ),  # the last confirms itself
        ([100, 200, 300], [3.0, 2.0, 1.0], 2.0, 200.0),  # exactly at the target
        ([100, 200], [1.0, 0.9], 2.0, "at most 100"),  # under it from the start
        (
            [100, 200, 300, 400],
            [1.9, 2.1, 1.9, 1.8],
            2.0,
            60_000**0.5,
        ),  # the first is not confirmed
        ([100, 200, 300], [3.0, 3.0, 3.0], 2.0, None),
        ([], [], 2.0, None),
    ],
)
def test_where_a_curve_crosses(tokens, loss, target, expected):
    crossing = find_crossing(tokens, loss, target)
    if expected is None:
        assert crossing is None
        assert find_crossing(tokens, loss, target, "first_eval") is None
        return
    assert crossing == pytest.approx(
        (0, 100) if expected == "at most 100" else (expected, expected)
    )
    first = tokens[[value <= target for value in loss].index(True)]
    assert find_crossing(tokens, loss, target, "first_eval") == (first, first)


losses = st.lists(st.floats(0.5, 6.0), min_size=1, max_size=30)
rules = st.sampled_from(["confirmed", "first_eval"])
holes = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([math.nan, math.inf, -math.inf])),
    max_size=5,
)


@given(
    loss=losses,
    target=st.floats(0.5, 6.0),
    rule=rules,
    seed=st.integers(0, 99),
    holes=holes,
)
def test_order_repeated_rows_and_losses_that_are_not_finite_do_not_matter(
    loss, target, rule, seed, holes
):
    tokens = np.arange(1, len(loss) + 1) * 50
    rng = np.random.default_rng(seed)
    rows = np.concatenate([np.arange(len(loss)), rng.integers(0, len(loss), 5)])
    rng.shuffle(rows)
    places = [*tokens[rows], *(50 * place + 25 for place, _ in holes)]
    values = [*np.array(loss)[rows], *(value for _, value in holes)]
    expected = find_crossing(tokens, loss, target, rule)
    assert find_crossing(places, values, target, rule) == expected
    scaled = find_crossing(tokens * 8192, loss, target, rule)
    assert scaled == (
        expected and pytest.approx((expected[0] * 8192, expected[1] * 8192))
    )


@given(loss=losses, target=st.floats(0.5, 6.0))
def test_the_crossing_lies_in_the_interval_that_the_first_confirmed_evaluation_ends(
    loss, target
):
    tokens = np.arange(1, len(loss) + 1) * 50.0
    crossing = find_crossing(tokens, loss, target)
    under = [*(value <= target for value in loss), True]
    naive = next((i for i in range(len(loss)) if under[i] and under[i + 1]), None)
    assert (crossing is None) == (naive is None)
    if crossing is not None:
        slack = 1 + 1e-12
        low, high = crossing
        assert (tokens[naive - 1] if naive else 0) <= low * slack
        assert low <= high <= tokens[naive] * slack


@pytest.mark.parametrize(
    ("state", "loss", "end", "low"),
    [
        ("finished", [3.0, 1.0], "hit", pytest.approx(100 * 2**0.5)),
        ("finished", [3.0, 2.5], "censored", 200),
        (
            "diverged",
            [3.0, 1.0, 1.0, 9.0],
            "diverged",
            900,
        ),  # although it was under the target
        *(
            (state, [3.0, 1.0, 0.5], "missing", 0)
            for state in ("pending", "running", "failed")
        ),
        ("finished", [], "missing", 0),
    ],
)
def test_ends(state, loss, end, low):
    tokens = np.arange(1, len(loss) + 1) * 100
    run = outcome(
        seed=0,
        state=state,
        tokens=tokens,
        loss=loss,
        target=2.0,
        rule="confirmed",
        budget_tokens=900,
    )
    assert (run.end, run.low, run.high) == (end, low, low if end == "hit" else math.inf)


@pytest.mark.parametrize(
    ("decay_begins", "expected"),
    [(250, (200, 300)), (200, None), (300, None), (350, None), (math.inf, None)],
)
def test_a_crossing_around_a_change_is_known_to_lie_between_its_evaluations(
    decay_begins, expected
):
    tokens = [100, 200, 300, 400]
    loss = [4.0, 3.0, 2.0, 1.0]
    end = outcome(
        seed=0,
        state="finished",
        tokens=tokens,
        loss=loss,
        target=2.5,
        rule="confirmed",
        budget_tokens=400,
        fit=LocalFit(tokens, loss, [(0, decay_begins)]),
    )
    assert (end.low, end.high) == pytest.approx(expected or (60_000**0.5,) * 2)
    assert end.at_change is (expected is not None)
    assert end.exact is (expected is None)
