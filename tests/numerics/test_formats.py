import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ablate.numerics import formats

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def all_finite_bf16():
    bits = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[torch.isfinite(values)].float()


def test_e2m1_agrees_with_ml_dtypes_on_every_finite_bf16():
    x = all_finite_bf16()
    assert len(x) == 65_280
    theirs = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(formats.e2m1_nearest(x), torch.from_numpy(theirs))


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(formats.e2m1_nearest(ties), expected)
    assert torch.equal(formats.e2m1_nearest(-ties), -expected)
    up = torch.nextafter(ties, torch.tensor(torch.inf))
    assert torch.equal(formats.e2m1_nearest(up), torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]))


def test_mi355x_silicon_vector():
    # v_cvt_scalef32_pk_fp4_f32 with scale byte 126 (2^-1), low nibble first; published in ROCm/aiter #974.
    x = torch.tensor([
        .3463, -.0499, .3794, -2.3764, .3960, .5989, -.6250, -.4239, -.6192, .2761, -.3746, .1462, .5216,
        -.5194,
        -.8497, -.8237, .5145, .3508, .0298, -.3462, .3917, .1096, 1.4494, 1.7009, -.5473, -2.0851, 1.8099,
        .3587, 1.4622, -2.3143, .3412, -.8931,
    ])  # fmt: skip
    expected = [129, 226, 34, 170, 26, 25, 162, 187, 18, 144, 2, 85, 234, 22, 229, 193]
    codes = formats.e2m1_encode(formats.e2m1_nearest(x * 2))
    assert (codes[0::2] | (codes[1::2] << 4)).tolist() == expected


def test_codes_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.e2m1_decode(codes)
    assert values[:8].tolist() == GRID
    assert torch.equal(formats.e2m1_encode(values), codes)


@pytest.mark.parametrize(
    ("fmt", "dtype"), [("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)]
)
def test_fp8_agrees_with_ml_dtypes_on_every_finite_bf16(fmt, dtype):
    x = all_finite_bf16()
    limit = formats.FP8_MAX[fmt]
    theirs = x.clamp(-limit, limit).numpy().astype(dtype).astype(np.float32)
    assert torch.equal(formats.fp8_nearest(x, fmt), torch.from_numpy(theirs))


def test_scale_byte_reads_the_exponent_field():
    # A float log2 rounds the value just under a power of two up to it.
    under = torch.nextafter(torch.tensor(2.0**10), torch.tensor(0.0))
    x = torch.tensor(
        [0.0, 2.0**-149, 2.0**-126, 2.0**-125, 1.0, under, 2.0**10, 3.4e38, torch.inf, torch.nan]
    )
    assert formats.floor_scale_byte(x).tolist() == [0, 0, 0, 0, 125, 134, 135, 252, 255, 255]


def test_e8m0_decode_agrees_with_ml_dtypes():
    byte = torch.arange(256, dtype=torch.int32)
    theirs = byte.to(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ours = formats.e8m0_decode(byte)
    assert torch.equal(ours[:255], torch.from_numpy(theirs)[:255])
    assert ours[255].isnan()
    assert torch.equal(formats.e8m0_reciprocal(byte[:254]) * ours[:254], torch.ones(254))


@given(st.floats(-7, 7, width=32), st.integers(0, 2**32 - 1))
def test_stochastic_gives_one_of_the_two_neighbours(value, word):
    x = torch.tensor([value])
    q = formats.e2m1_stochastic(x, torch.tensor([word])).item()
    magnitude = min(abs(value), 6.0)
    low = max(g for g in GRID if g <= magnitude)
    high = min(g for g in GRID if g >= magnitude)
    assert abs(q) in (low, high)
    u = (word >> 8) / 2**24
    expected = high if high > low and (magnitude - low) / (high - low) > u else low
    assert abs(q) == expected
    assert np.signbit(q) == np.signbit(np.float32(value))
