"""Scales and codes against numpy transcriptions of the sources' formulas, bit for bit, and torchao itself."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.prototype.blockwise_fp8_training.kernels import (
    torch_blockwise_scale_act_quant_lhs,
    torch_blockwise_scale_weight_quant,
)

from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.numerics import OperandPolicy, quantize, round_operand
from ablate.numerics.formats import E2M1, E4M3, decode
from ablate.numerics.philox import random_words
from ablate.numerics.rotate import rotate
from tests.numerics.strategies import KEY, normal

FOUR_SIX = OperandPolicy(format="nvfp4", scale="four_six")
QUEST = OperandPolicy(format="mxfp4", scale="quest")
F32 = np.float32


def spread(rows, columns, octaves=8):
    """Values whose blocks lie far apart, with zeros, a zero block and subnormals."""
    x = normal(rows, columns) * 2.0 ** (normal(rows, 1, seed=1) * octaves)
    x[:, 5] = -0.0
    x[0] = 0
    x[1] *= 2.0**-140 / x[1].abs().max()
    return x


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("scale", "rows", "columns"), [("row", 1, 512), ("1x128", 1, 128), ("128x128", 128, 128)]
)
def test_fp8_scales_of_a_group_are_divided_once(fmt, scale, rows, columns):
    """As TransformerEngine's ``compute_scale_from_amax``: one correctly rounded division."""
    dtype = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}[fmt]
    largest = float(ml_dtypes.finfo(dtype).max)
    x = spread(1024, 512)
    grouped = x.numpy().reshape(1024 // rows, rows, 512 // columns, columns)
    amax = np.abs(grouped).max((1, 3), keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(amax == 0, F32(1), np.minimum(F32(largest) / amax, np.finfo(F32).max))
    values = (grouped * factor).clip(-largest, largest).astype(dtype).astype(F32)
    codes = quantize(x, OperandPolicy(format=fmt, scale=scale))
    ours = codes.codes.numpy().view(dtype).astype(F32)
    assert np.array_equal(ours, values.reshape(1024, 512))
    assert np.array_equal(codes.scales.numpy(), (F32(1) / factor)[:, 0, :, 0])


@pytest.mark.parametrize(
    ("scale", "theirs"),
    [("1x128", torch_blockwise_scale_act_quant_lhs), ("128x128", torch_blockwise_scale_weight_quant)],
)
def test_fp8_blocks_agree_with_torchao(scale, theirs):
    x = normal(512, 512)
    ours = quantize(x, OperandPolicy(format="fp8_e4m3", scale=scale))
    codes, scales = theirs(x)
    assert torch.equal(ours.codes, codes.view(torch.uint8))
    assert torch.equal(ours.scales, scales)


def four_over_six(blocks, prescale=1.0, words=None):
    """Return the values and scales of both references for blocks [n, rows, 16], and where they took 4.

    TransformerEngine's ``quantize_4over6_nvfp4.cuh`` and ``reference_nvfp4.py`` (bound 256, MSE), and
    fouroversix' ``reference.py``; the prescale is the latter's ``adjustment_factor``.
    """
    tensor_amax = np.abs(blocks).max()
    encode = F32(1536) / tensor_amax
    decode_scale = F32(1) / encode
    base = np.abs(blocks).max((1, 2), keepdims=True) / F32(6) * encode
    candidates = []
    for expand in (F32(1), F32(1.5)):
        scale = np.minimum(base * expand, F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
        with np.errstate(divide="ignore"):
            down = np.minimum(F32(1) / (scale * decode_scale), np.finfo(F32).max)
        with np.errstate(over="ignore"):  # in blocks whose scale is zero
            scaled = blocks * down * F32(prescale)
        values = nearest_or_up(scaled, words)
        difference = values * scale * tensor_amax / F32(1536 * prescale) - blocks
        error = np.zeros(blocks.shape[:2], F32)
        for column in range(16):  # in order, as TransformerEngine adds them
            error = error + difference[..., column] * difference[..., column]
        while error.shape[1] > 1:  # and the rows of a tile by halves
            half = error.shape[1] // 2
            error = error[:, :half] + error[:, half:]
        candidates.append((values, scale, error[:, :, None]))
    (six, scale_six, error_six), (four, scale_four, error_four) = candidates
    pick = error_four < error_six
    return np.where(pick, four, six), np.where(pick, scale_four, scale_six), pick


def nearest_or_up(scaled, words):
    if words is None:
        return scaled.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(F32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    magnitude = np.minimum(np.abs(scaled), 6)
    low = np.minimum(np.searchsorted(grid, magnitude, side="right") - 1, 6)
    p = (magnitude - grid[low]) / (grid[low + 1] - grid[low])
    up = p > (words.numpy() >> 8).astype(F32) * F32(2**-24)
    return np.copysign(np.where(up, grid[low + 1], grid[low]), scaled)


def tied(largest, maxima):
    """Blocks whose scale lies on a tie of E4M3, which an order of operations decides."""
    of_block = torch.tensor(maxima).repeat(64 * 16).view(-1, 256 // 16).repeat_interleave(16, 1)
    x = (normal(*of_block.shape) / 3).clamp(-1, 1) * of_block
    x[:, ::16] = of_block[:, ::16]
    x[0, 0] = largest
    return x


@pytest.mark.parametrize("prescale", [None, 16 / 17, 0.75], ids=["nearest", "sr 16/17", "sr 3/4"])
@pytest.mark.parametrize(
    "x",
    [normal(512, 256), spread(512, 256, octaves=2), tied(224.0, [175.0, 203.0]), tied(192.0, [25.0, 50.0])],
    ids=["normal", "spread", "ties to 6", "ties to 4"],
)
def test_four_or_six_is_that_of_both_references(x, prescale):
    x = x.to(torch.bfloat16)
    policy = FOUR_SIX
    if prescale is not None:
        policy = dataclasses.replace(FOUR_SIX, rounding="stochastic", prescale=prescale)
    words = None if prescale is None else random_words(*x.shape, KEY).view(-1, 1, 16)
    values, scales, pick = four_over_six(x.float().view(-1, 1, 16).numpy(), prescale or 1.0, words)
    codes = quantize(x, policy, key=KEY)
    assert 0.1 < pick.mean() < 0.9
    ours = codes.scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(F32)
    assert np.array_equal(ours.reshape(-1), scales.reshape(-1))
    assert np.array_equal(decode(codes.codes, E2M1).numpy(), values.reshape(x.shape))
    for axis in (0, 1):  # the compiled quantiser too
        stored = x if axis else x.t().contiguous()
        expected = round_operand(stored, policy, axis=axis, key=KEY)
        done = load_backend("emulated").quantize(stored, Draw(policy=policy, key=KEY), axis=axis)
        assert torch.equal(done.values, expected.values)
        assert done.descale == expected.descale


def test_four_or_six_of_a_tile_is_that_of_transformer_engine():
    x = normal(256, 256)
    tiles = x.view(16, 16, 16, 16).transpose(1, 2).reshape(-1, 16, 16)
    values, scales, pick = four_over_six(tiles.numpy())
    assert 0 < pick.mean() < 0.9
    codes = quantize(x, dataclasses.replace(FOUR_SIX, block="16x16"))
    ours = codes.scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(F32)
    assert np.array_equal(ours.reshape(-1), scales.reshape(-1))
    ours = decode(codes.codes, E2M1).view(16, 16, 16, 16).transpose(1, 2).reshape(-1, 16, 16)
    assert np.array_equal(ours.numpy(), values)


@pytest.mark.parametrize("axis", [0, 1])
def test_quest_shows_an_overflow_of_its_sums(axis):
    """Squares above 1.8e19 leave fp32: a scale that is not known makes the block NaN, in every back end."""
    x = normal(32, 64)
    x[:, :32] *= 1e21
    x = x if axis else x.t().contiguous()
    expected = torch.zeros(32, 64, dtype=torch.bool)
    expected[:, :32] = True
    for name in ("reference", "emulated"):
        values = load_backend(name).quantize(x, Draw(policy=QUEST), axis=axis).values
        assert torch.equal((values if axis else values.t()).isnan(), expected)


def test_mxfp8_below_bf16_is_rounded_once_and_its_codes_are_not():
    """E4M3 has steps down to 2^-9, E8M0 scales down to 2^-127: bf16 ends at 2^-133."""
    x = normal(64, 64) * 2.0**-125
    codes = quantize(x, OperandPolicy(format="mxfp8"))
    scales = 2.0 ** (codes.scales.double().repeat_interleave(32, 1) - 127)
    exact = decode(codes.codes, E4M3).double() * scales
    expected = (exact * 2.0**133).round() / 2.0**133  # to even
    assert (expected != exact).any()
    for name in ("reference", "emulated"):
        values = load_backend(name).quantize(x, Draw(policy=OperandPolicy(format="mxfp8")), axis=1).values
        assert torch.equal(values.double(), expected)


def eden(rotated, group, words, *, unscaled):
    """Return values, stretched scales before and after their rounding, and the tensor's scale.

    After Quartet II's ``quartet_2.py``; ``unscaled`` measures energy and product in the tensor's own units.
    """

    def tree(values):
        while values.shape[1] > 1:
            half = values.shape[1] // 2
            values = values[:, :half] + values[:, half:]
        return values

    blocks = rotated.numpy().reshape(-1, 16)
    clip = F32(6) / F32(17 / 16 * 0.93)
    decode_scale = np.abs(blocks).max() / F32(255.99) / clip
    scale = (np.abs(blocks).max(1, keepdims=True) / clip / decode_scale).astype(ml_dtypes.float8_e4m3fn)
    scale = scale.astype(F32)
    scale[scale == 0] = 1
    scaled = blocks / (scale * decode_scale)
    values = scaled.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(F32)
    x, y = (scaled * scale, values * scale) if unscaled else (scaled, values)
    stretch = tree((x * x).reshape(-1, group)) / tree((x * y).reshape(-1, group))
    wanted = scale * stretch.repeat(group // 16, 0)
    step = np.maximum(2.0 ** np.floor(np.log2(wanted)), 2.0**-6).astype(F32) / 8
    low = np.floor(wanted / step)
    up = wanted / step - low > (words.numpy()[:, None] >> 8).astype(F32) * F32(2**-24)
    return values, wanted, (low + up) * step, decode_scale


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("scale", ["ms_eden", "ms_eden_unscaled"])
def test_ms_eden_to_the_bit_and_where_its_stretch_is_unbiased(scale, group):
    policy = OperandPolicy(format="nvfp4", scale=scale, hadamard=group, signs="step")
    x = (normal(256, 256) * 2.0 ** (normal(1, 256, seed=2))).to(torch.bfloat16)
    rotated = rotate(x.float(), policy, KEY)
    words = random_words(256, 256, KEY)[:, ::16].reshape(-1)
    values, wanted, chosen, decode_scale = eden(rotated, group, words, unscaled=scale == "ms_eden_unscaled")
    expected = torch.from_numpy((values * chosen).reshape(256, 256))
    for name in ("reference", "emulated"):
        done = load_backend(name).quantize(x, Draw(policy=policy, key=KEY), axis=1)
        assert torch.equal(done.values.float(), expected)
        assert done.descale == decode_scale
    # The mean over its words is that of the scales before their rounding.
    estimate = (values * wanted * decode_scale).astype(np.float64).reshape(-1, group)
    exact = rotated.double().numpy().reshape(-1, group)
    gain = (estimate * exact).sum(1) / (exact * exact).sum(1)
    if scale == "ms_eden" and group > 16:  # of one block the scale cancels
        assert abs(gain - 1).max() > 1e-3
    else:
        assert abs(gain - 1).max() < 1e-5
