"""Ratios and their standard errors, and the figures of rounding, against numpy and known answers."""

import math

import numpy as np
import pytest
import torch

from ablate.check.figures import Estimate, Sums, ratios


def test_a_ratio_and_its_standard_error_are_those_of_the_estimator():
    rng = np.random.default_rng(0)
    whole = rng.uniform(1, 3, (40, 2))
    part = 0.3 * whole + rng.normal(0, 0.1, (40, 2))
    pairs = list(zip(torch.from_numpy(part), torch.from_numpy(whole), strict=True))
    for place, one in enumerate(ratios(pairs, 1.0)):
        a, b = part[:, place], whole[:, place]
        ratio = a.sum() / b.sum()
        assert one.value == pytest.approx(1 + ratio)
        residual = a - ratio * b
        assert one.error == pytest.approx(math.sqrt(40 / 39 * (residual**2).sum()) / b.sum())


def test_the_standard_error_is_the_spread_of_the_ratio_over_repeats():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400):
        whole = rng.uniform(1, 3, 30)
        pairs = [(torch.tensor([0.5 * b + rng.normal(0, 0.2)]), torch.tensor([b])) for b in whole]
        found += ratios(pairs)
    spread = np.std([one.value for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.1)


def test_distances_from_what_is_expected():
    assert Estimate(value=0.9, error=0.01).off(1.0) == pytest.approx(-10)
    assert not Estimate(value=0.9, error=0.01).is_at(1.0)
    assert Estimate(value=0.96, error=0.01).is_at(1.0)
    assert Estimate(value=1 - 1e-7, error=0.0).is_at(1.0)  # the arithmetic's own error
    assert Estimate(value=0.9, error=0.0).off(1.0) == -math.inf
    assert not Estimate(value=None, error=None).is_at(1.0)
    one, other = Estimate(value=0.9, error=0.03), Estimate(value=1.1, error=0.04)
    assert one.agrees_with(other)  # 4 standard errors
    assert not one.agrees_with(Estimate(value=1.2, error=0.04))
    assert not one.agrees_with(Estimate(value=None, error=None))


def normal(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def figures(quantise, columns=4, tensors=32):
    sums = Sums(columns)
    for number in range(tensors):
        x = normal(number, 64, 64)
        sums.add(x, quantise(x, number))
    return sums.figures()


def test_bias_is_told_from_noise_and_a_gain_by_its_place_in_the_block():
    slope = torch.tensor([1.0, 1.0, 0.9, 0.9]).repeat(16)

    def quantise(x, number):
        return [x * slope + 0.1 * normal(10_000 + 2 * number + draw, 64, 64) for draw in range(2)]

    found = figures(quantise)
    # Energies: half of the values have a bias of 0.1 of themselves; the noise has 0.1² everywhere.
    assert found.gain.value == pytest.approx(0.95, abs=5 * found.gain.error)
    assert found.relative_error.value**2 == pytest.approx(0.005 + 0.01, rel=0.02)
    assert found.bias_share.value == pytest.approx(1 / 3, abs=5 * found.bias_share.error)
    assert found.bias_share.error < 0.01
    assert found.pattern == pytest.approx((1.0, 1.0, 0.9, 0.9), abs=0.002)
    assert not found.unbiased
    assert found.largest_alike is None


def test_noise_alone_is_unbiased_and_has_no_pattern():
    found = figures(lambda x, n: [x + 0.1 * normal(10_000 + 2 * n + draw, 64, 64) for draw in range(2)])
    assert found.unbiased
    assert found.pattern == (pytest.approx(1.0, abs=0.002),)


def test_one_draw_has_only_bias():
    found = figures(lambda x, _: [0.9 * x])
    assert found.bias_share.value == pytest.approx(1.0)
    assert (found.draws, found.noise_alike) == (1, {})
    assert found.relative_error.value == pytest.approx(0.1, rel=1e-4)


def test_a_word_shared_by_neighbours_is_seen_although_their_signs_differ():
    def quantise(x, number):
        return [
            x + x.sign() * 0.1 * normal(10_000 + 2 * number + draw, 64, 32).repeat_interleave(2, 1)
            for draw in range(2)
        ]

    which, alike = figures(quantise).largest_alike
    assert which == "1 apart"
    assert alike.value == pytest.approx(0.5, abs=0.02)
