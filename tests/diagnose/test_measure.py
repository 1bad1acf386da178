"""Every figure against its definition, computed apart in numpy's float64."""

import base64
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.backends.testing.inputs import policies_of
from ablate.check.figures import error_parts
from ablate.diagnose.measure import (
    data_noise,
    median_crest,
    operand_figures,
    product_figures,
    sketch_of,
)
from ablate.numerics import round_operand
from ablate.numerics.quantiser import on_grid, turned
from ablate.reports.findings.diagnoses import sketch_cosine
from tests.numerics.strategies import KEY, MXFP4, normal


def by_definition(exact, outputs):
    y = exact.double().numpy()
    results = torch.stack(outputs).double().numpy()
    errors = results - y
    draws = len(errors)
    energy = (y * y).sum()
    mean_energy = (errors**2).sum() / draws
    figures = {
        "relative_error": math.sqrt(mean_energy / energy),
        "gain": (results * y).sum() / draws / energy,
        "zeros": np.mean(results == 0),
        "bias_share": 1.0,
    }
    if draws > 1:
        variance = errors.var(axis=0, ddof=1).sum()
        common = (errors.mean(axis=0) ** 2).sum() - variance / draws
        figures["bias_share"] = common / mean_energy
    return figures


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_a_products_figures_are_their_definitions(draws):
    exact = normal(40, 24)
    exact[0, :2] = torch.tensor([0, 1e-42])  # bf16 has no value so small
    noisy = (exact * 0.9 + 0.3 * normal(40, 24, seed=n + 1) for n in range(draws))
    outputs = [output.relu().to(torch.bfloat16) for output in noisy]
    figures = product_figures(exact, iter(outputs), per_token=True)
    assert (figures["draws"], figures["zeros_bf16"]) == (draws, pytest.approx(2 / 960))
    for name, value in by_definition(exact, outputs).items():
        assert figures[name] == pytest.approx(value, rel=1e-4), name


UNDEFINED = "relative_error", "gain", "bias_share", "sketch"


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_what_is_not_defined_is_none_and_an_exact_product_has_no_error(value):
    exact = torch.full((4, 8), value)
    figures = product_figures(exact, [exact.clone(), exact.clone()], per_token=True)
    assert [figures[name] for name in UNDEFINED] == [None] * 4
    assert median_crest(exact, (1, 8)) is None
    exact = normal(8, 8)
    figures = product_figures(exact, [exact.clone()], per_token=False)
    assert [figures[name] for name in UNDEFINED] == [0.0, 1.0, None, None]


@pytest.mark.parametrize("count", [3, 512, 40_000])
def test_the_sketches_cosine_is_that_of_the_tensors(count):
    a = normal(count)
    for weight in (0.0, 0.5, 0.9, 1.0):
        b = weight * a + math.sqrt(1 - weight**2) * normal(count, seed=2)
        true = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        estimate = sketch_cosine(sketch_of(a), sketch_of(b))
        spread = 0.0 if count <= 512 else (1 - true**2) / math.sqrt(512)
        assert abs(estimate - true) < 5 * spread + 0.02
    whole = sketch_of(a)
    assert len(base64.b64decode(whole)) == 512
    assert (
        sketch_cosine(whole, whole[:40]) is sketch_cosine(whole, "no base64!") is None
    )


@pytest.mark.parametrize("sequences", [2, 4, 8])
def test_noise_and_signal_of_gradients_with_known_ones(sequences):
    """Each sequence's gradient is G + noise of covariance I in 400 dimensions."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=400)
    parts = min(sequences, 4)
    splits = []
    for _ in range(300):
        each = signal + rng.normal(size=(parts, sequences // parts, 400))
        contributions = each.sum(1) / sequences
        total = contributions.sum(0)
        energies = (contributions**2).sum(1).tolist()
        splits.append(data_noise(energies, total @ total, sequences))
    for name, expected in (
        ("noise_energy", 400 / sequences),
        ("signal_energy", signal @ signal),
    ):
        estimates = [split[name] for split in splits]
        error = np.std(estimates) / math.sqrt(len(splits))
        assert abs(np.mean(estimates) - expected) < 5 * error
    for energies in ([], [2.0], [math.nan, 1.0]):
        assert data_noise(energies, 2.0, 2) is None
    # noise explains all of it
    assert data_noise([1.0, 1.0], 1.0, 2)["signal_energy"] <= 0


def measured(x, policy, axis=1, key=KEY):
    done = round_operand(x, policy, axis=axis, key=key)
    quantised = done.values.float() * done.descale
    grid = on_grid(x, policy, axis=axis, key=key)
    figures = operand_figures(grid, turned(quantised, axis), turned(x.float(), axis))
    return figures, quantised


def test_figures_of_a_floor_scale_are_their_definitions():
    x = (normal(64, 96) * torch.logspace(-3, 1, 96)).to(torch.bfloat16)
    x[:, 5] = 0
    figures, quantised = measured(x, MXFP4)
    v, q = x.double().numpy(), quantised.double().numpy()
    blocks = v.reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    largest = np.where(amax > 0, amax, 1)
    scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    there = blocks != 0
    clips = np.abs(blocks) / scale > 6
    assert figures["clipped"] == pytest.approx(clips[there].mean())
    assert figures["zeroed"] == pytest.approx((q == 0)[v != 0].mean())
    assert 0 < figures["clipped"] < 0.1 < figures["zeroed"]
    assert figures["gain"] == pytest.approx((q * v).sum() / (v * v).sum(), rel=1e-5)
    assert figures["relative_error"] == pytest.approx(
        np.linalg.norm(q - v) / np.linalg.norm(v), rel=1e-5
    )
    rms = np.sqrt((blocks**2).mean(1))
    crest = (amax[:, 0] / np.where(rms > 0, rms, 1))[rms > 0]
    assert figures["crest_before"] == pytest.approx(np.median(crest), rel=0.02)
    assert figures["crest_after"] == figures["crest_before"]
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = 6 * np.abs(blocks / largest)[..., None]
    nearest = levels[np.abs(scaled - levels).argmin(-1)]
    ideal = np.square(np.abs(blocks) - nearest * largest / 6)
    dead, whole = ideal[nearest == 0].sum(), np.square(q - v).sum()
    expected = (whole - ideal.sum(), dead, ideal.sum() - dead)
    assert 0.02 * whole < min(expected)
    grid = on_grid(x, MXFP4, axis=1)
    parts = error_parts(grid.rotated, quantised, grid.ideal)
    assert parts.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_rotation_along_the_tokens_gathers_a_constant_mean_in_few_of_them():
    """The case in which a deterministic Hadamard makes quantising harder (facts of the field's re-tests)."""
    x = (0.1 * normal(256, 32) + 1).to(torch.bfloat16)
    figures, _ = measured(x, dataclasses.replace(MXFP4, hadamard=16), axis=0)
    assert figures["crest_after"] > 2 * figures["crest_before"]


POLICIES = policies_of("""
mxfp4
mxfp4 stochastic 0.75
mxfp4 H32 step
nvfp4
fp8_e4m3
mxfp8
""")


@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    value=st.sampled_from([None, 0.0, math.nan, math.inf, 1e38, 1e-40]),
    policy=st.sampled_from(POLICIES),
    everywhere=st.booleans(),
)
def test_whatever_the_operand_every_figure_is_a_finite_number_or_none(
    rows, blocks, value, policy, everywhere
):
    x = normal(rows, 32 * blocks)
    if value is not None:
        x.view(-1)[: x.numel() if everywhere else 1] = value
    figures, _ = measured(x, policy)
    json.dumps(figures, allow_nan=False)
    for share in (figures["clipped"], figures["zeroed"]):
        assert share is None or 0 <= share <= 1
