import warnings

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from hypothesis import given
from hypothesis import strategies as st

from ablate.numerics import formats
from ablate.numerics.formats import E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, INT4, SCALE_ADD

GRIDS = {
    "E2M1": (E2M1, [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "E3M0": (E3M0, [0, 0.25, 0.5, 1, 2, 4, 8, 16]),
    "E2M3": (E2M3, formats.decode(torch.arange(32), E2M3).tolist()),
    "E3M2": (E3M2, formats.decode(torch.arange(32), E3M2).tolist()),
    "E4M3": (E4M3, formats.decode(torch.arange(127), E4M3).tolist()),
    "E5M2": (E5M2, formats.decode(torch.arange(124), E5M2).tolist()),
    "INT4": (INT4, list(range(8))),
}
ORACLES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}


def all_finite_bf16():
    bits = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[torch.isfinite(values)].float()


@pytest.mark.parametrize("name", ORACLES)
def test_every_finite_bf16_agrees_with_ml_dtypes(name):
    x = all_finite_bf16()
    assert len(x) == 65_280
    element = GRIDS[name][0]
    theirs = x.clamp(-element.max, element.max).numpy().astype(ORACLES[name]).astype(np.float32)
    ours = formats.round_nearest(x, element)
    assert torch.equal(ours, torch.from_numpy(theirs))
    assert torch.equal(torch.signbit(ours), torch.signbit(x))


@pytest.mark.parametrize("name", ORACLES)
def test_codes_agree_with_ml_dtypes(name):
    element = GRIDS[name][0]
    largest = formats.encode(torch.tensor([element.max]), element).item()
    codes = torch.arange(largest + 1, dtype=torch.uint8)
    theirs = codes.numpy().view(ORACLES[name]).astype(np.float32)
    assert torch.equal(formats.decode(codes, element), torch.from_numpy(theirs))
    for sign in (1, -1):
        values = sign * formats.decode(codes, element)
        coded = values.numpy().astype(ORACLES[name]).view(np.uint8)
        assert torch.equal(formats.encode(values, element), torch.from_numpy(coded))


def test_e3m0_by_search_on_every_finite_bf16():
    grid = torch.tensor(GRIDS["E3M0"][1], dtype=torch.float64)
    x = all_finite_bf16()
    distance = (x.double().abs().clamp(max=16)[:, None] - grid).abs()
    near = distance == distance.min(1, keepdim=True).values
    even_first = near.double() * torch.where(torch.arange(8) % 2 == 0, 2.0, 1.0)
    assert torch.equal(formats.round_nearest(x, E3M0).abs().double(), grid[even_first.argmax(1)])


@pytest.mark.parametrize("name", GRIDS)
def test_all_ties_go_to_the_even_code(name):
    element, grid = GRIDS[name]
    low, high = torch.tensor(grid[:-1]), torch.tensor(grid[1:])
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    for sign in (1, -1):
        assert torch.equal(formats.round_nearest(sign * middle, element), sign * even)
    up = torch.nextafter(middle, torch.tensor(torch.inf))
    assert torch.equal(formats.round_nearest(up, element), high)
    down = torch.nextafter(middle, torch.tensor(0.0))
    assert torch.equal(formats.round_nearest(down, element), low)


def test_mi355x_silicon_vector():
    # v_cvt_scalef32_pk_fp4_f32 with scale byte 126 (2^-1), low nibble first; published in ROCm/aiter #974.
    x = torch.tensor([
        .3463, -.0499, .3794, -2.3764, .3960, .5989, -.6250, -.4239, -.6192, .2761, -.3746, .1462, .5216,
        -.5194,
        -.8497, -.8237, .5145, .3508, .0298, -.3462, .3917, .1096, 1.4494, 1.7009, -.5473, -2.0851, 1.8099,
        .3587, 1.4622, -2.3143, .3412, -.8931,
    ])  # fmt: skip
    expected = [129, 226, 34, 170, 26, 25, 162, 187, 18, 144, 2, 85, 234, 22, 229, 193]
    codes = formats.encode(formats.round_nearest(x * 2, E2M1), E2M1)
    assert (codes[0::2] | (codes[1::2] << 4)).tolist() == expected
    half = torch.tensor([0.5, torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))])  # scale byte 128: 2
    assert formats.round_nearest(half / 2, E2M1).tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("E2M1", gfloat_formats.format_info_ocp_e2m1),
        ("E2M3", gfloat_formats.format_info_ocp_e2m3),
        ("E3M2", gfloat_formats.format_info_ocp_e3m2),
        ("E4M3", gfloat_formats.format_info_ocp_e4m3),
    ],
)
def test_stochastic_rounding_agrees_with_gfloat_given_the_same_bits(name, info):
    # gfloat adds the bits below the mantissa and truncates: up when p + bits / 2^n >= 1, so its bits are
    # the complement of ours. p has few digits here, so that both see all of it.
    element = GRIDS[name][0]
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(2000, generator=generator) * 1.2 * element.max * 256).round() / 256
    x *= torch.where(torch.rand(2000, generator=generator) < 0.5, -1, 1)
    u24 = torch.randint(0, 2**24, (2000,), generator=generator)
    ours = formats.round_stochastic(x, element, u24 << 8)
    for value, bits, result in zip(x.tolist(), u24.tolist(), ours.tolist(), strict=True):
        theirs = gfloat.round_float(
            info, value, gfloat.RoundMode.StochasticFast, sat=True, srbits=2**24 - 1 - bits, srnumbits=24
        )
        assert abs(theirs) == abs(result), (value, bits)


@given(st.floats(-20, 20, width=32), st.integers(0, 2**32 - 1), st.sampled_from(sorted(GRIDS)))
def test_stochastic_gives_one_of_the_two_neighbours(value, word, name):
    element, grid = GRIDS[name]
    x = torch.tensor([value])
    q = formats.round_stochastic(x, element, torch.tensor([word])).item()
    magnitude = min(abs(value), element.max)
    low, high = max(g for g in grid if g <= magnitude), min(g for g in grid if g >= magnitude)
    u = (word >> 8) / 2**24
    expected = high if high > low and (magnitude - low) / (high - low) > u else low
    assert abs(q) == expected
    assert np.signbit(q) == np.signbit(np.float32(value))


def test_rocm_words_without_low_bits_truncate():
    x = torch.tensor([0.4, 0.9, 1.7, 2.9, 3.9, 5.9])
    small = torch.full((6,), 0xFFFF)  # what a word shifted right by 16 holds at most
    assert torch.equal(
        formats.round_stochastic_rocm(x, E2M1, small), torch.tensor([0.0, 0.5, 1.5, 2.0, 3.0, 4.0])
    )
    large = torch.full((6,), 0xFFFFFFFF)
    assert torch.equal(
        formats.round_stochastic_rocm(x, E2M1, large), torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 6.0])
    )


@pytest.mark.parametrize("name", GRIDS)
def test_nan_and_inf(name):
    element = GRIDS[name][0]
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    words = torch.full((4,), 2**31)
    for rounded in (formats.round_nearest(x, element), formats.round_stochastic(x, element, words)):
        assert rounded[0].isnan()
        assert rounded[1:].tolist() == [element.max, -element.max, 0.0]
        assert torch.signbit(rounded[3])


def field(value):
    return torch.tensor([value], dtype=torch.float32).view(torch.int32)


@pytest.mark.parametrize(
    ("rule", "last_that_stays"),
    # amax = m · 2^f: the largest m whose exponent is still f − 2, for elements of E2M1.
    [("floor", 2 - 2**-23), ("even", 1.75 - 2**-23), ("rceil", 1.5), ("ceil", 1.0), ("uos", 1.8125)],
)
def test_scale_rules_turn_where_they_should(rule, last_that_stays):
    add = SCALE_ADD[rule](E2M1)
    for power in (-100, -1, 0, 7, 100):
        assert formats.e8m0_byte(field(last_that_stays * 2.0**power), add, 2).item() == 127 + power - 2
        above = torch.nextafter(torch.tensor(last_that_stays), torch.tensor(torch.inf)).item()
        assert formats.e8m0_byte(field(above * 2.0**power), add, 2).item() == 127 + power - 1


def test_scale_byte_reads_the_exponent_field():
    # A float log2 rounds the value just under a power of two up to it.
    under = torch.nextafter(torch.tensor(2.0**10), torch.tensor(0.0))
    x = torch.tensor(
        [0.0, 2.0**-149, 2.0**-126, 2.0**-125, 1.0, under, 2.0**10, 3.4e38, torch.inf, torch.nan]
    )
    byte = formats.e8m0_byte(x.view(torch.int32) & 0x7FFFFFFF, 0, 2)
    assert byte.tolist() == [0, 0, 0, 0, 125, 134, 135, 252, 255, 255]


def test_e8m0_decode_agrees_with_ml_dtypes():
    byte = torch.arange(256, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = byte.to(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ours = formats.e8m0_decode(byte)
    assert torch.equal(ours[:255], torch.from_numpy(theirs)[:255])
    assert ours[255].isnan()
    assert torch.equal(formats.e8m0_reciprocal(byte[:254]) * ours[:254], torch.ones(254))


@pytest.mark.parametrize("name", GRIDS)
def test_ties_away_from_zero_and_toward_it(name):
    element, values = GRIDS[name]
    grid = torch.tensor(values, dtype=torch.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    for sign in (1, -1):
        assert torch.equal(formats.round_nearest_away(sign * middle, element), sign * grid[1:])
        assert torch.equal(formats.round_nearest_toward_zero(sign * middle, element), sign * grid[:-1])
    # Off the ties all three agree, and beyond the largest value all saturate.
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * element.max / 2
    nearest = formats.round_nearest(values, element)
    tie = torch.isin(values.abs(), middle)
    for rounded in (formats.round_nearest_away, formats.round_nearest_toward_zero):
        assert torch.equal(rounded(values, element)[~tie], nearest[~tie])
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 2.0**-140])
        ours, usual = rounded(special, element), formats.round_nearest(special, element)
        assert torch.equal(ours.isnan(), usual.isnan())
        assert torch.equal(ours.nan_to_num(), usual.nan_to_num())
        assert torch.equal(torch.signbit(ours[:2]), torch.signbit(special[:2]))
