import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.run.outcome import LocalFit, find_crossing, outcome
from tests.golden import check_answers


def crossings(line):
    """Where losses, each with its tokens, cross a target: interpolated and confirmed, and as MLPerf scores."""
    if line.startswith("#"):
        return
    target, *evaluations = line.replace(":", "").split()
    points = [map(float, evaluation.split("@")) for evaluation in evaluations]
    loss, tokens = zip(*points, strict=True) if points else ((), ())
    for rule in ("confirmed", "first_eval"):
        crossing = find_crossing(tokens, loss, float(target), rule)
        place = "never" if crossing is None else "{:.9g} to {:.9g}".format(*crossing)
        yield f"{rule}: {place}"


def test_where_a_curve_crosses():
    check_answers(Path(__file__).with_name("crossings.txt"), crossings)


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


def ends(line):
    """How a run ends in this state, with these losses after each 100 tokens; its target is 2, its budget 900."""
    state, *loss = line.split()
    tokens = [100 * (index + 1) for index in range(len(loss))]
    run = outcome(
        seed=0, state=state, tokens=tokens, loss=[*map(float, loss)], target=2.0,
        rule="confirmed", budget_tokens=900,
    )  # fmt: skip
    yield f"{run.end}: {run.low:.9g} to {run.high:.9g}"


def test_ends():
    check_answers(Path(__file__).with_name("ends.txt"), ends)


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
