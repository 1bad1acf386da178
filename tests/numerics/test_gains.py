"""Gain (slope of quantised on exact) of the rounding variants on Gaussian data.

The figures come from simulations that others ran; each is met within five standard errors, overall and at
each position in the block.
"""

import pytest

from ablate.backends.testing.inputs import policies_of
from ablate.numerics import fake_quantize
from ablate.numerics.quantiser import turned
from tests.golden import rows_of
from tests.numerics.strategies import KEY, normal


def gain(y, x):
    return (y * x).sum(0) / (x * x).sum(0)


@pytest.mark.parametrize(
    ("text", "gain_of_others"),
    rows_of("""
        mxfp4 | 0.9802
        mxfp4 even | 0.9896
        mxfp4 rceil | 0.9898
        mxfp4 stochastic | 0.98947
        mxfp4 stochastic 0.75 | 1.0000
        mxfp4 stochastic rceil | 1.0000
        mxfp4 stochastic even | 0.99784
    """),
)
def test_gain_overall_and_per_position_in_the_block(text, gain_of_others):
    (policy,) = policies_of(text)
    expected = float(gain_of_others)
    digits = 0.5 * 10.0 ** -len(gain_of_others[2:])
    x = normal(16384, 256)
    y = fake_quantize(x, policy, key=KEY).double().view(-1, 32)
    x = x.double().view(-1, 32)
    residual = (y - expected * x) * x
    error = residual.std(0) / len(x) ** 0.5 / (x * x).mean(0)
    assert ((gain(y, x) - expected).abs() < 5 * error + digits).all()
    # The elements of a block share its scale: the standard error is taken over blocks.
    energy = (x * x).sum(1)
    error = residual.sum(1).std() / len(x) ** 0.5 / energy.mean()
    assert abs((y * x).sum() / energy.sum() - expected) < 5 * error + digits


@pytest.mark.parametrize("axis", [0, 1])
def test_the_public_rocm_kernels_reading_truncates_half_of_the_elements(axis):
    # Others report gains of .998, .998, .836, .836; plain truncation, which it is by the code, has .8334.
    (policy,) = policies_of("mxfp4 even stochastic_rocm")
    x = normal(8192, 512)
    stored = turned(x, axis).contiguous()
    y = turned(fake_quantize(stored, policy, axis=axis, key=KEY), axis)
    y = y.double().reshape(-1, 4)
    x = x.double().view(-1, 4)
    for position, expected in enumerate((0.998, 0.998, 0.8334, 0.8334)):
        assert abs(gain(y, x)[position] - expected) < 1e-3
    assert abs((y * x).sum() / (x * x).sum() - 0.9158) < 1e-3
