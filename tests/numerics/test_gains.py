"""Gain (slope of quantised on exact), error and correlation of the rounding variants on Gaussian data.

The figures come from simulations that others ran; each is met within five standard errors, overall and at
each position in the block.
"""

import dataclasses

import pytest
import torch

from ablate.numerics import Key, OperandPolicy, round_operand
from tests.numerics.strategies import KEY, normal

FLOOR = OperandPolicy(format="mxfp4")
SR = dataclasses.replace(FLOOR, rounding="stochastic")
SR_PRESCALED = dataclasses.replace(SR, prescale=0.75)


def with_scale(policy, scale):
    return dataclasses.replace(policy, scale=scale)


def dequantised(x, policy, key=KEY, axis=1):
    done = round_operand(x, policy, axis=axis, key=key)
    return done.values.double() * done.descale


def gain(y, x):
    return (y * x).sum(0) / (x * x).sum(0)


@pytest.mark.parametrize(
    ("policy", "expected", "digits"),
    [
        (FLOOR, 0.9802, 5e-5),
        (with_scale(FLOOR, "even"), 0.9896, 5e-5),
        (with_scale(FLOOR, "rceil"), 0.9898, 5e-5),
        (with_scale(FLOOR, "ceil"), 0.9926, 5e-5),
        (SR, 0.98947, 5e-6),
        (SR_PRESCALED, 1.0, 5e-5),
        (with_scale(SR, "rceil"), 1.0, 5e-5),
        (with_scale(SR, "even"), 0.99784, 5e-6),
    ],
    ids=str,
)
def test_gain_overall_and_per_position_in_the_block(policy, expected, digits):
    x = normal(16384, 256)
    y = dequantised(x, policy).view(-1, 32)
    x = x.double().view(-1, 32)
    residual = (y - expected * x) * x
    error = residual.std(0) / len(x) ** 0.5 / (x * x).mean(0)
    assert ((gain(y, x) - expected).abs() < 5 * error + digits).all()
    overall = (y * x).sum() / (x * x).sum()
    # The elements of a block share its scale: the standard error is taken over blocks.
    by_block = residual.sum(1)
    overall_error = by_block.std() / len(x) ** 0.5 / (x * x).sum(1).mean()
    assert abs(overall - expected) < 5 * overall_error + digits


@pytest.mark.parametrize(
    ("scale", "expected"), [("floor", 0.01324), ("even", 0.01252), ("rceil", 0.01332), ("ceil", 0.02072)]
)
def test_relative_error_of_nearest_rounding(scale, expected):
    x = normal(16384, 256)
    error = (dequantised(x, with_scale(FLOOR, scale)) - x).square().view(-1, 32).sum(1)
    energy = x.double().square().view(-1, 32).sum(1)
    ratio = error.sum() / energy.sum()
    standard_error = (error - ratio * energy).std() / len(error) ** 0.5 / energy.mean()
    assert abs(ratio - expected) < 5 * standard_error + 5e-6


@pytest.mark.parametrize("axis", [0, 1])
def test_the_public_rocm_kernels_reading_truncates_half_of_the_elements(axis):
    # Others report gains of .998, .998, .836, .836; plain truncation, which it is by the code, has .8334.
    policy = OperandPolicy(format="mxfp4", scale="even", rounding="stochastic_rocm")
    x = normal(8192, 512)
    y = dequantised(x.t().contiguous() if axis == 0 else x, policy, axis=axis)
    y = (y.t() if axis == 0 else y).reshape(-1, 4)
    x = x.double().view(-1, 4)
    for position, expected in enumerate((0.998, 0.998, 0.8334, 0.8334)):
        assert abs(gain(y, x)[position] - expected) < 1e-3
    assert abs((y * x).sum() / (x * x).sum() - 0.9158) < 1e-3


def test_its_wgrad_is_biased_and_does_not_average_out():
    # Figures of 16 draws: gain .846; error .238 against .060 for true stochastic rounding.
    dy, x = normal(1024, 64), normal(1024, 96, seed=1)
    exact = dy.double().T @ x.double()
    errors = {}
    for rounding in ("stochastic", "stochastic_rocm"):
        policy = OperandPolicy(format="mxfp4", scale="even", rounding=rounding)
        total = torch.zeros_like(exact)
        for step in range(16):
            left, right = (
                dequantised(t, policy, Key(seed=0, layer="a", gemm="wgrad", operand=name, step=step), axis=0)
                for name, t in (("dy", dy), ("x", x))
            )
            total += left.T @ right / 16
        errors[rounding] = ((total - exact).norm() / exact.norm()).item()
        gained = ((total * exact).sum() / exact.square().sum()).item()
        assert abs(gained - {"stochastic": 0.996, "stochastic_rocm": 0.846}[rounding]) < 0.02
    assert abs(errors["stochastic"] - 0.060) < 0.015
    assert abs(errors["stochastic_rocm"] - 0.238) < 0.015


def correlation(a, b):
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].abs()


@pytest.mark.parametrize("policy", [SR_PRESCALED, OperandPolicy(format="nvfp4", rounding="stochastic")])
def test_noise_is_uncorrelated_over_rows_blocks_steps_layers_and_operands(policy):
    x = normal(1, 32).repeat(512, 8)  # the same block everywhere: only the noise differs
    noise = dequantised(x, policy) - x
    noise = noise - noise.mean()
    pairs = [(noise[:-1], noise[1:]), (noise[:, :-32], noise[:, 32:]), (noise[:, :-64], noise[:, 64:])]
    changes = ({"step": 4}, {"layer": "b"}, {"operand": "dy"}, {"call": 1}, {"seed": 1}, {"gemm": "dgrad"})
    others = [dataclasses.replace(KEY, **change) for change in changes]
    pairs += [(noise, dequantised(x, policy, key) - x) for key in others]
    for a, b in pairs:
        centred = [t - t.reshape(-1, 32).mean(0).repeat(t.shape[1] // 32) for t in (a, b)]
        assert correlation(*centred) < 5 / a.numel() ** 0.5
