"""Ratios and their standard errors, and the figures of rounding, against known answers."""

import math

import numpy as np
import pytest
import torch

from ablate.check.figures import RatioEstimate, Sums, ratios
from tests.numerics.strategies import normal


def test_the_standard_error_is_the_spread_of_the_ratio_over_repeats():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400):
        whole = rng.uniform(1, 3, (30, 2))
        part = whole * (0.5, 0.2) + rng.normal(0, 0.2, (30, 2))
        pairs = torch.tensor(np.stack([part, whole], axis=1))
        estimates = ratios([*pairs], 1.0)
        found.append([(estimate.value, estimate.error) for estimate in estimates])
    values, errors = np.moveaxis(found, 2, 0)
    spread = values.std(0)
    assert (abs(values.mean(0) - (1.5, 1.2)) < 4 * spread / 20).all()
    assert errors.mean(0) == pytest.approx(spread, rel=0.1)


def test_distances_from_what_is_expected():
    one = RatioEstimate(value=0.9, error=0.03)
    nothing = RatioEstimate(value=None, error=None)
    assert one.off(1.2) == pytest.approx(-10)
    assert RatioEstimate(value=0.9, error=0.0).off(1.0) == -math.inf
    assert one.is_at(1.0)
    assert not one.is_at(1.2)
    # the arithmetic's own error
    assert RatioEstimate(value=1 - 1e-7, error=0.0).is_at(1.0)
    assert not nothing.is_at(1.0)
    assert one.is_at(1.1, 0.04)  # 4 standard errors of the difference
    assert not one.is_at(1.2, 0.04)
    assert nothing.is_at(None)
    assert not one.is_at(None)


def figures(quantise, columns=4, tensors=32):
    sums = Sums(columns)
    for number in range(tensors):
        x = normal(64, 64, seed=number)
        sums.add(x, quantise(x, number), x.round())
    return sums.figures()


def draws(number, *shape):
    return [0.1 * normal(*shape, seed=10_000 + 2 * number + draw) for draw in range(2)]


def noisy(slope):
    return figures(
        lambda x, number: [x * slope + noise for noise in draws(number, 64, 64)]
    )


def test_bias_is_told_from_noise_and_a_gain_by_its_place_in_the_block():
    plain = noisy(1.0)
    assert plain.unbiased
    assert plain.pattern == (pytest.approx(1.0, abs=0.002),)
    found = noisy(torch.tensor([1.0, 1.0, 0.9, 0.9]).repeat(16))
    # Energies: half of the values have a bias of 0.1 of themselves; the noise has 0.1² everywhere.
    assert found.gain.value == pytest.approx(0.95, abs=5 * found.gain.error)
    assert found.relative_error.value**2 == pytest.approx(0.005 + 0.01, rel=0.02)
    share = found.bias_share
    assert share.value == pytest.approx(1 / 3, abs=5 * share.error)
    assert share.error < 0.01
    assert found.pattern == pytest.approx((1.0, 1.0, 0.9, 0.9), abs=0.002)
    assert not found.unbiased
    assert found.largest_alike is None


def test_one_draw_has_only_bias():
    found = figures(lambda x, _: [0.9 * x])
    assert found.bias_share.value == pytest.approx(1.0)
    assert found.noise_alike == {}
    assert found.relative_error.value == pytest.approx(0.1, rel=1e-4)
    parts = [one.value for one in (found.scale_bias, found.dead_zone, found.grid_noise)]
    assert sum(parts) == pytest.approx(1.0)
    # rounding to whole numbers errs more than 10 %
    assert parts[0] < 0 < parts[1] < parts[2]


def test_a_word_shared_by_neighbours_is_seen_although_their_signs_differ():
    def quantise(x, number):
        pairs = [noise.repeat_interleave(2, 1) for noise in draws(number, 64, 32)]
        return [x + x.sign() * noise for noise in pairs]

    which, alike = figures(quantise).largest_alike
    assert which == "1 apart"
    assert alike.value == pytest.approx(0.5, abs=0.02)
