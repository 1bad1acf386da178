"""The local fit against weighted least squares of numpy, and what it must leave alone."""

import math
from functools import partial

import numpy as np
import pytest

from ablate.run.outcome import WIDTH, LocalFit, find_crossing, outcome

ALWAYS = ((0.0, math.inf),)
TOKENS = np.exp(np.linspace(9, 13, 40))
TRUE = math.exp(3.5 / 0.3)  # where the curve crosses 1.5


def curve(tokens=TOKENS, noise=0.0, seed=0):
    return (
        5
        - 0.3 * np.log(tokens)
        + np.random.default_rng(seed).normal(0, noise, len(tokens))
    )


def crossing(loss, target=1.5, tokens=TOKENS, spans=ALWAYS):
    near = find_crossing(tokens, loss, target)[1]
    return float(LocalFit(tokens, loss, spans).crossings([near], [target])[0])


def by_hand(tokens, loss, place, weights):
    """Return the value of the local line, by numpy's weighted polynomial fit."""
    x = np.log(tokens) - place
    width = max(WIDTH, np.sort(np.abs(x))[4])
    weights = np.clip(1 - (np.abs(x) / width) ** 3, 0, None) ** 3 * weights
    counts = weights > 0
    return np.polyval(
        np.polyfit(x[counts], loss[counts], 1, w=np.sqrt(weights[counts])), 0
    )


@pytest.mark.parametrize("points", [8, 40, 600])
def test_it_is_the_lowess_of_the_definition(points):
    tokens = np.exp(np.linspace(9, 13, points))
    loss = curve(tokens, noise=0.01)
    weights = np.ones(points)
    for _ in range(2):
        residual = np.abs(
            loss - [by_hand(tokens, loss, place, weights) for place in np.log(tokens)]
        )
        weights = np.clip(1 - (residual / (6 * np.median(residual))) ** 2, 0, None) ** 2
    value = by_hand(tokens, loss, math.log(crossing(loss, tokens=tokens)), weights)
    # Of many evaluations the distances are interpolated between some places.
    assert value == pytest.approx(1.5, abs=1e-7 if points < 250 else 1e-5)


@pytest.mark.parametrize(
    ("loss", "spans", "expected"),
    [
        (curve(), ALWAYS, TRUE),
        (curve(), ((0.0, 1e4), (1e4, 2e6)), TRUE),
        (
            np.where(TOKENS < 3e4, 1.0, 0.0) + curve(),
            ((3e4, math.inf),),
            TRUE,
        ),  # a kink in another span
        (curve(), (), math.nan),
        (
            curve(),
            ((0.0, 1.2 * TRUE),),
            math.nan,
        ),  # a decay from 1.2 T on: the kink would bias it
        (curve(), ((0.9 * TRUE, math.inf),), math.nan),  # the warm-up has just ended
    ],
)
def test_only_where_training_is_steady_around_the_crossing(loss, spans, expected):
    assert crossing(loss, spans=spans) == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_nothing_is_found_beyond_the_last_evaluation_nor_of_too_few():
    loss = curve(TOKENS[:30])
    loss[-1] -= 0.05  # crosses by luck at the end; the curve has not
    assert math.isnan(crossing(loss, float(loss[-1]) + 0.01, TOKENS[:30]))
    assert math.isnan(crossing(curve(TOKENS[::12]), 2.0, TOKENS[::12]))


def test_an_outcome_has_both_and_takes_the_fit():
    loss = curve(noise=0.01)
    outcome_of = partial(
        outcome,
        seed=0,
        state="finished",
        tokens=TOKENS,
        loss=loss,
        target=1.5,
        budget_tokens=1e6,
    )
    fit = LocalFit(TOKENS, loss, ALWAYS)
    run = outcome_of(rule="confirmed", fit=fit)
    assert run.high == run.low == run.fitted == crossing(loss) != run.interpolated
    assert run.interpolated == find_crossing(TOKENS, loss, 1.5)[1]
    assert outcome_of(rule="confirmed").high == run.interpolated
    assert outcome_of(rule="first_eval", fit=fit).fitted is None
    near_targets = {1e5: 1.5, 7e4: 1.6, 2e5: 1.45}
    alone = [
        fit.crossings([near], [target])[0] for near, target in near_targets.items()
    ]
    together = fit.crossings([*near_targets], [*near_targets.values()])
    np.testing.assert_allclose(together, alone, rtol=1e-12)
