"""NVFP4's further scales and elements, and FP8 in powers of two, by numpy from each source's formula."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ablate.numerics import OperandPolicy, fake_quantize, quantize, round_operand
from ablate.numerics.formats import ELEMENTS, INT4, UE5M3, decode, encode, round_nearest
from tests.numerics.strategies import KEY, normal

F32 = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ROW, SPAN = (OperandPolicy(format="nvfp4", scale=f"two_level_{of}") for of in ("row", "1x128"))


def spread(rows=32, columns=256, seed=0):
    """Rows of very different size, zero rows and blocks, subnormals, ±0."""
    x = normal(rows, columns, seed=seed) * 2.0 ** torch.linspace(-40, 40, rows)[:, None]
    x[3] = 0
    x[5, 16:48] = 0
    x[7, 128:] = 0
    x[8] = normal(columns) * 2.0**-130
    x[9, ::2] = -0.0
    return x


def quantised(x, policy):
    """Return the elements, the block scales and the dequantised values of a policy."""
    codes = quantize(x, policy)
    scales = codes.scales.numpy().view(E4M3).astype(F32)
    done = round_operand(x, policy, axis=1)
    return (
        decode(codes.codes, ELEMENTS[policy.format]).numpy(),
        scales,
        done.values.numpy() * F32(done.descale),
    )


def to_e2m1(scaled):
    return np.clip(scaled, -6, 6).astype(E2M1).astype(F32)


def blocks_of(x):
    return x.numpy().reshape(x.shape[0], -1, 16)


def test_nvfp4_with_a_scale_a_row_as_transformer_engines_reference():
    x = spread()
    blocks, largest = blocks_of(x), np.finfo(F32).max
    with np.errstate(divide="ignore", over="ignore"):
        encode_scale = np.minimum(F32(448 * 6) / np.abs(blocks).max((1, 2), keepdims=True), largest)
        outer = F32(1) / encode_scale
        base = np.abs(blocks).max(2, keepdims=True) * (encode_scale * (F32(1) / F32(6)))
        scale = np.minimum(base, 448).astype(E4M3).astype(F32)
        values = to_e2m1(blocks * np.minimum(F32(1) / (scale * outer), largest))
    ours, scales, dequantised = quantised(x, ROW)
    assert np.array_equal(ours, values.reshape(x.shape))
    assert np.array_equal(scales, scale[..., 0])
    assert np.array_equal(dequantised, (values * (scale * outer)).reshape(x.shape))


def test_nvfp4_with_a_scale_for_128_as_tetrajet_v2s_kernel():
    x = spread()
    blocks = blocks_of(x)
    spans = np.abs(x.numpy().reshape(x.shape[0], -1, 128)).max(2).repeat(8, 1)[..., None]
    outer = spans / F32(448) / F32(6)
    outer[outer == 0] = 1
    inner = np.abs(blocks).max(2, keepdims=True) / outer / F32(6)
    inner[inner == 0] = 2.0**-9
    inner = np.minimum(inner, 448).astype(E4M3).astype(F32)
    product = outer * inner
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(product == 0, F32(0), np.minimum(F32(1) / product, np.finfo(F32).max))
    values = to_e2m1(blocks * inverse)
    ours, scales, dequantised = quantised(x, SPAN)
    assert np.array_equal(ours, values.reshape(x.shape))
    assert np.array_equal(scales, inner[..., 0])
    assert np.array_equal(dequantised, (values * product).reshape(x.shape))
    assert scales[3].max() == 2.0**-9


@pytest.mark.parametrize("policy", [ROW, SPAN], ids=lambda policy: policy.scale)
def test_a_bad_value_spoils_what_shares_its_outer_scale(policy):
    for value in (torch.nan, torch.inf):
        x = normal(32, 256)
        x[5, 7] = value
        bad = round_operand(x, policy, axis=1).values.isnan()
        assert bad.sum() == (256 if policy is ROW else 128)
        assert bad[5, :128].all()
    assert round_operand(torch.zeros(4, 128), policy, axis=1).values.abs().max() == 0
    assert round_operand(torch.zeros(0, 128), policy, axis=1).values.shape == (0, 128)


def test_128_neighbours_must_divide_the_contraction():
    with pytest.raises(ValueError, match="group of 128 does not divide 96"):
        round_operand(normal(4, 96), SPAN, axis=1)


ue5m3_codes = np.arange(255)
UE5M3_VALUES = np.where(
    ue5m3_codes < 8, ue5m3_codes / 8 * 2.0**-14, (1 + ue5m3_codes % 8 / 8) * 2.0 ** (ue5m3_codes // 8 - 15)
)


def test_ue5m3_has_254_for_its_largest_and_255_for_nan():
    grid = torch.from_numpy(UE5M3_VALUES).to(torch.float32)
    assert torch.equal(round_nearest(grid, UE5M3), grid)
    assert encode(grid, UE5M3).tolist() == ue5m3_codes.tolist()
    assert grid.max() == 114688
    middle = (grid[1:] + grid[:-1]) / 2
    even = grid[torch.arange(255)[:-1] + torch.arange(255)[:-1] % 2]
    assert torch.equal(round_nearest(middle, UE5M3), even)
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    assert torch.equal(round_nearest(above, UE5M3), grid[1:])


def ue5m3(values):
    """Nearest on the table, ties to even code."""
    low = np.searchsorted(UE5M3_VALUES, values, side="right") - 1
    high = np.minimum(low + 1, 254)
    below, above = values - UE5M3_VALUES[low], UE5M3_VALUES[high] - values
    return UE5M3_VALUES[np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low)].astype(
        F32
    )


@pytest.mark.parametrize("rule", ["ue5m3", "two_level_ue5m3"])
def test_amd_fp4_divides_by_a_scale_that_is_never_zero(rule):
    x = normal(32, 256) * 2.0 ** torch.linspace(-24, 18, 32)[:, None]
    x[3] = 0
    policy = OperandPolicy(format="nvfp4", scale=rule)
    outer = F32(1) if rule == "ue5m3" else F32(np.abs(x.numpy()).max()) / F32(114688 * 6)
    blocks = blocks_of(x)
    scale = ue5m3(np.clip(np.abs(blocks).max(2, keepdims=True) / outer / F32(6), 2.0**-17, 114688))
    values = to_e2m1(blocks / (scale * outer))
    codes = quantize(x, policy)
    assert np.array_equal(decode(codes.codes, ELEMENTS["nvfp4"]).numpy(), values.reshape(x.shape))
    assert np.array_equal(UE5M3_VALUES[codes.scales.numpy()], scale[..., 0])
    done = round_operand(x, policy, axis=1)
    assert done.values.dtype == torch.bfloat16  # exact: 2 and 4 bits
    assert np.array_equal(done.values.float().numpy(), (values * scale).reshape(x.shape))
    assert done.descale == outer
    x[5, 7] = torch.inf
    assert round_operand(x, policy, axis=1).values.isnan().sum() == (16 if rule == "ue5m3" else x.numel())
    assert (quantize(x, policy).scales == 255).sum() == (1 if rule == "ue5m3" else x.numel() / 16)


def test_int4_is_the_whole_numbers_to_seven():
    ties = torch.arange(-9, 9.25, 0.25)
    assert torch.equal(round_nearest(ties, INT4), ties.clamp(-7, 7).round())
    whole = torch.arange(-7.0, 8)
    assert torch.equal(decode(encode(whole, INT4), INT4), whole)


def divided(blocks, largest, bound=448):
    """fouroversix's scales: amax / largest · encode, and the factor that divides values."""
    amax = np.abs(blocks).max()
    encode_scale = F32(largest * bound) / amax
    scale = (np.abs(blocks).max(2, keepdims=True) / F32(largest) * encode_scale).astype(E4M3).astype(F32)
    with np.errstate(divide="ignore"):
        return scale, F32(1) / encode_scale, F32(1) / (F32(1) / encode_scale * scale)


def with_zeros():
    x = normal(32, 256)
    x[3], x[5, 16:48] = 0, 0
    x[9, ::2] = -0.0
    return x


def test_nvint4_is_whole_numbers_under_nvfp4s_scales():
    x = with_zeros()
    blocks = blocks_of(x)
    scale, outer, factor = divided(blocks, 7)
    values = np.where(scale == 0, 0, np.rint(np.clip(blocks * np.where(scale == 0, 0, factor), -7, 7)))
    policy = OperandPolicy(format="nvint4")
    codes = quantize(x, policy)
    assert np.array_equal(decode(codes.codes, INT4).numpy(), values.reshape(x.shape))
    assert np.array_equal(codes.scales.numpy().view(E4M3).astype(F32), scale[..., 0])
    done = round_operand(x, policy, axis=1)
    assert np.array_equal(done.values.float().numpy(), (values * scale).reshape(x.shape))
    assert done.descale == outer
    assert values.max() == 7


def test_if4_takes_for_each_block_the_grid_that_errs_less():
    x = with_zeros()
    blocks = blocks_of(x)
    scale, outer, factor = divided(blocks, 6)
    scaled = blocks * np.where(scale == 0, 0, factor)
    six, seven = to_e2m1(scaled), np.rint(np.clip(scaled * F32(7 / 6), -7, 7))
    errors = [
        ((values * (scale * outer) * F32(ratio) - blocks).astype(np.float64) ** 2).sum(2, keepdims=True)
        for values, ratio in ((six, 1), (seven, 6 / 7))
    ]
    clear = np.abs(errors[0] - errors[1]) > 1e-5 * errors[0]
    whole = errors[1] < errors[0]
    policy = OperandPolicy(format="if4")
    codes = quantize(x, policy)
    flags = codes.scales.numpy() >> 7 == 1
    assert ((flags == whole[..., 0]) | ~clear[..., 0]).all()
    assert 0.2 < flags.mean() < 0.8
    assert np.array_equal((codes.scales.numpy() & 127).view(E4M3).astype(F32), scale[..., 0])
    grids = [decode(codes.codes, ELEMENTS["if4"]).numpy(), decode(codes.codes, INT4).numpy()]
    ours = np.where(
        flags[..., None], blocks_of(torch.from_numpy(grids[1])), blocks_of(torch.from_numpy(grids[0]))
    )
    assert np.array_equal(ours, np.where(flags[..., None], seven, six))
    done = round_operand(x, policy, axis=1)
    assert done.values.dtype == torch.float32
    ratio = np.where(flags[..., None], F32(6 / 7), F32(1))
    assert np.array_equal(done.values.numpy(), (ours * (scale * ratio)).reshape(x.shape))
    assert done.descale == outer


@pytest.mark.parametrize("fmt", ["nvint4", "if4"])
def test_a_bad_value_and_zeros_in_nvint4_and_if4(fmt):
    policy = OperandPolicy(format=fmt)
    assert fake_quantize(torch.zeros(16, 32), policy).abs().max() == 0
    x = normal(16, 32)
    x[0, 0] = torch.nan
    assert fake_quantize(x, policy).isnan().all()
    stochastic = OperandPolicy(format=fmt, rounding="stochastic", prescale=16 / 17)
    wide = normal(512, 512)
    gain = (fake_quantize(wide, stochastic, key=KEY) * wide).sum() / wide.square().sum()
    # IF4 chooses by the errors of the rounded values, which favours what was rounded up.
    assert abs(gain - 1) < (6e-3 if fmt == "if4" else 2e-3)
    columns = fake_quantize(normal(64, 48), policy, axis=0)
    assert torch.equal(columns, fake_quantize(normal(64, 48).t().contiguous(), policy).t())


@pytest.mark.parametrize("measure", ["mse", "mae", "max"])
@pytest.mark.parametrize("bound", [256, 448])
def test_four_or_six_by_three_errors_and_two_bounds(measure, bound):
    if (measure, bound) == ("max", 448):
        pytest.skip("no source has it")
    rule = "four_six" + ("" if measure == "mse" else f"_{measure}") + ("_448" if bound == 448 else "")
    x = normal(256, 256)
    blocks = blocks_of(x).astype(np.float64)
    outer = np.abs(blocks).max() / (6 * bound)
    errors = []
    for largest in (6, 4):
        raw = np.abs(blocks).max(2, keepdims=True) / largest / outer
        step = np.minimum(raw, 448).astype(F32).astype(E4M3).astype(np.float64) * outer
        difference = np.abs(to_e2m1((blocks / step).astype(F32)) * step - blocks)
        errors.append(
            {"mse": (difference**2).sum(2), "mae": difference.sum(2), "max": difference.max(2)}[measure]
        )
    ours = np.abs(
        blocks_of(fake_quantize(x, OperandPolicy(format="nvfp4", scale=rule))).astype(np.float64) - blocks
    )
    chosen = {"mse": (ours**2).sum(2), "mae": ours.sum(2), "max": ours.max(2)}[measure]
    assert np.allclose(chosen, np.minimum(*errors), rtol=1e-4, atol=1e-7)
    assert 0.1 < (errors[1] < errors[0]).mean() < 0.8


def test_where_four_and_six_err_alike_six_is_taken():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 6.0, 3.0  # each block is exact by both
    codes = quantize(x, OperandPolicy(format="nvfp4", scale="four_six_mae"))
    assert codes.codes[0, 0] == 7
    assert codes.codes[0, 16] == 7


@pytest.mark.parametrize(("scale", "group"), [("1x128", (1, 128)), ("128x128", (128, 128))])
@pytest.mark.parametrize("axis", [0, 1])
def test_fp8_in_powers_of_two_as_transformer_engines_reference(scale, group, axis):
    x = normal(256, 256) * torch.logspace(-20, 20, 256)[:, None]
    x[:128, :128] = 0
    x[200, 128:] *= 2.0**-100
    policy = OperandPolicy(format="fp8_e4m3", scale=f"{scale}_pow2")
    done = round_operand(x, policy, axis=axis)
    rows, columns = group
    v = (x.t() if axis == 0 else x).numpy()
    grouped = v.reshape(256 // rows, rows, 256 // columns, columns)
    amax = np.abs(grouped).max((1, 3), keepdims=True)
    with np.errstate(divide="ignore"):
        exact = np.where(amax == 0, F32(1), np.minimum(F32(448) / amax, np.finfo(F32).max))
    factor = np.ldexp(F32(1), np.frexp(exact)[1] - 1)
    values = np.clip(grouped * factor, -448, 448).astype(E4M3).astype(F32) * (F32(1) / factor)
    assert (done.values.dtype, done.descale) == (torch.bfloat16, 1.0)
    ours = done.values.t() if axis == 0 else done.values
    assert np.array_equal(ours.float().numpy(), values.reshape(256, 256))
    x[255, 255] = torch.inf
    bad = round_operand(x, policy, axis=axis).values.isnan()
    assert bad.sum() == rows * columns


def test_other_dtypes_and_strides_give_the_same_bits():
    x = normal(64, 512)[:, ::2].to(torch.bfloat16)
    for scale in ("two_level_row", "two_level_1x128", "ue5m3", "four_six_max"):
        policy = OperandPolicy(format="nvfp4", scale=scale, rounding="nearest_away")
        strided = round_operand(x, policy, axis=1)
        assert torch.equal(strided.values, round_operand(x.float().contiguous(), policy, axis=1).values)
        assert torch.equal(strided.values, round_operand(x.t().contiguous(), policy, axis=0).values.t())
