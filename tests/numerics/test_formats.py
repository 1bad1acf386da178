"""Grids, codes and roundings against ml_dtypes, gfloat, silicon, and a search of the grid in float64."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from ablate.numerics import formats
from ablate.numerics.formats import E2M1, E3M0, E4M3, E5M2, INT4, SCALE_ADD, UE5M3
from tests.numerics.strategies import GOES_UP, UE5M3_VALUES, to_grid

ORACLES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}


def codes_of(name, count):
    return np.arange(count, dtype=np.uint8).view(ORACLES[name])


GRIDS = {
    "E2M1": (E2M1, 4, codes_of("E2M1", 8)),
    "E3M0": (E3M0, 4, [0, 0.25, 0.5, 1, 2, 4, 8, 16]),
    "INT4": (INT4, 4, range(8)),
    "E4M3": (E4M3, 8, codes_of("E4M3", 127)),
    "E5M2": (E5M2, 8, codes_of("E5M2", 124)),
    "UE5M3": (UE5M3, 9, UE5M3_VALUES),
}
"""Elements, their bits with the sign, and the magnitudes by code."""


def grid_of(name):
    element, bits, grid = GRIDS[name]
    return element, bits, np.array(grid).astype(np.float64)


@pytest.mark.parametrize("name", GRIDS)
def test_codes(name):
    element, bits, grid = grid_of(name)
    values = torch.from_numpy(grid).float()
    codes = torch.arange(len(grid), dtype=torch.uint8)
    assert torch.equal(formats.decode(codes, element), values)
    assert torch.equal(formats.encode(values, element), codes)
    if bits < 9:  # UE5M3 has no sign
        signed = codes | 1 << bits - 1
        assert torch.equal(formats.encode(-values, element), signed)
        assert torch.equal(formats.decode(signed, element), -values)


@pytest.mark.parametrize("rounding", GOES_UP)
@pytest.mark.parametrize("name", GRIDS)
def test_rounding(name, rounding):
    """All of bf16, what is midway and beside it, and shares of few digits, of which some equal the bits."""
    element, _, grid = grid_of(name)
    generator = torch.Generator().manual_seed(0)
    bf16 = torch.arange(65_536).to(torch.int16).view(torch.bfloat16).float()
    middle = torch.from_numpy((grid[1:] + grid[:-1]) / 2).float()
    beside = [torch.nextafter(middle, torch.tensor(to)) for to in (torch.inf, 0.0)]
    short = (torch.rand(4000, generator=generator) * 2 - 1) * 1.2 * element.max
    short = (short * 256).round() / 256
    x = torch.cat((short, bf16, middle, -middle, *beside))
    bits = torch.randint(0, 2**24, x.shape, generator=generator)
    bits[::2] = bits[::2] >> 21 << 21
    bits[-2 * len(middle) :] = 1 << 23  # beside the middle, and p + u beside 1
    actual = formats.rounded(x, element, rounding, bits << 8)
    numbers = ~x.isnan()
    expected = to_grid(x.double().numpy(), grid, rounding, bits.numpy() / 2**24)
    expected = torch.from_numpy(expected)
    assert torch.equal(actual.isnan(), ~numbers)  # which NaN is left open
    assert torch.equal(actual[numbers], expected[numbers])
    assert torch.equal(torch.signbit(actual)[numbers], torch.signbit(x)[numbers])
    if rounding == "nearest" and name in ORACLES:
        clamped = x[numbers].clamp(-element.max, element.max).numpy()
        reference = clamped.astype(ORACLES[name]).astype(np.float32)
        assert torch.equal(actual[numbers], torch.from_numpy(reference))
    info = getattr(gfloat_formats, f"format_info_ocp_{name.lower()}", None)
    if rounding == "stochastic" and info is not None:
        for value, drawn, result in zip(
            *(part[:1500].tolist() for part in (x, bits, actual)), strict=True
        ):
            # gfloat adds the bits below the mantissa and truncates: its bits are the complement of ours.
            reference = gfloat.round_float(
                info,
                value,
                gfloat.RoundMode.StochasticFast,
                sat=True,
                srbits=2**24 - 1 - drawn,
                srnumbits=24,
            )
            assert abs(reference) == abs(result), (value, drawn)


def test_mi355x_silicon_vector():
    # v_cvt_scalef32_pk_fp4_f32 with scale byte 126 (2^-1), low nibble first; published in ROCm/aiter #974.
    x = torch.tensor([
        .3463, -.0499, .3794, -2.3764, .3960, .5989, -.6250, -.4239, -.6192, .2761, -.3746, .1462, .5216,
        -.5194,
        -.8497, -.8237, .5145, .3508, .0298, -.3462, .3917, .1096, 1.4494, 1.7009, -.5473, -2.0851, 1.8099,
        .3587, 1.4622, -2.3143, .3412, -.8931,
    ])  # fmt: skip
    expected = [129, 226, 34, 170, 26, 25, 162, 187, 18, 144, 2, 85, 234, 22, 229, 193]
    codes = formats.encode(formats.rounded(x * 2, E2M1), E2M1)
    assert (codes[0::2] | (codes[1::2] << 4)).tolist() == expected
    # scale byte 128: 2
    half = torch.tensor([0.5, torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))])
    assert formats.rounded(half / 2, E2M1).tolist() == [0.0, 0.5]


def test_rocm_words_without_low_bits_truncate():
    x = torch.tensor([0.4, 0.9, 1.7, 2.9, 3.9, 5.9])
    for word, expected in (
        # what a word shifted right by 16 holds at most
        (0xFFFF, [0.0, 0.5, 1.5, 2.0, 3.0, 4.0]),
        (0xFFFFFFFF, [0.5, 1.0, 2.0, 3.0, 4.0, 6.0]),
    ):
        actual = formats.rounded(x, E2M1, "stochastic_rocm", torch.full((6,), word))
        assert actual.tolist() == expected


@pytest.mark.parametrize(
    ("rule", "last_that_stays"),
    # amax = m · 2^f: the largest m whose exponent is still f − 2, for elements of E2M1.
    [
        ("floor", 2 - 2**-23),
        ("even", 1.75 - 2**-23),
        ("rceil", 1.5),
    ],
)
def test_scale_rules_turn_where_they_should(rule, last_that_stays):
    add = SCALE_ADD[rule](E2M1)
    for power in (-100, -1, 0, 7, 100):
        field = torch.tensor(last_that_stays * 2.0**power).view(torch.int32)
        assert formats.e8m0_byte(field, add, 2) == 125 + power
        assert formats.e8m0_byte(field + 1, add, 2) == 126 + power  # the next number


def test_scale_byte_reads_the_exponent_field():
    # A float log2 rounds the value just under a power of two up to it.
    under = torch.nextafter(torch.tensor(2.0**10), torch.tensor(0.0))
    x = [0.0, 2.0**-149, 2.0**-125, 1.0, under, 2.0**10, 3.4e38, torch.inf, torch.nan]
    byte = formats.e8m0_byte(torch.tensor(x).view(torch.int32) & 0x7FFFFFFF, 0, 2)
    assert byte.tolist() == [0, 0, 0, 125, 134, 135, 252, 255, 255]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_e8m0_decode_agrees_with_ml_dtypes():
    byte = torch.arange(256, dtype=torch.int32)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    actual = formats.e8m0_decode(byte).numpy()
    assert np.array_equal(actual, codes.astype(np.float32), equal_nan=True)
