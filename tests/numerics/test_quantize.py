import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from ablate.numerics import Key, OperandPolicy, fake_quantize, formats, quantize

MXFP4 = OperandPolicy(format="mxfp4", scale="floor")
SR_PRESCALED = OperandPolicy(format="mxfp4", scale="floor", rounding="stochastic", prescale=0.75)
SR_PLAIN = OperandPolicy(format="mxfp4", scale="floor", rounding="stochastic")
KEY = Key(seed=0, layer="a", gemm="wgrad", operand="x", step=3)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def torchao_floor(x):
    scale, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    packed = packed.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(x.shape)
    return codes, scale.view(torch.uint8)


def special_blocks():
    """Random bits, narrow exponents, ties, maxima just under powers of two, ±0; no scale byte 0."""
    generator = torch.Generator().manual_seed(1)
    random_bits = torch.randint(-(2**31), 2**31 - 1, (256, 32), generator=generator, dtype=torch.int64)
    floats = random_bits.to(torch.int32).view(torch.float32)
    floats = floats[torch.isfinite(floats).all(1)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4).repeat(20, 1)
    ties = ties * 2.0 ** torch.arange(-10, 10)[:, None]
    under = torch.nextafter(2.0 ** torch.arange(-20, 20), torch.tensor(0.0))[:, None] * normal(40, 32).clamp(
        -1, 1
    )
    under[:, 0] = torch.nextafter(2.0 ** torch.arange(-20.0, 20), torch.tensor(0.0))
    zeros = normal(8, 32)
    zeros[:, ::2] = -0.0
    return torch.cat((floats, ties, under, zeros, normal(200, 32) * 1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_agree_with_torchao(dtype):
    x = special_blocks().to(dtype)
    x = x[torch.isfinite(x).all(1)]
    codes, scales = quantize(x, MXFP4)
    their_codes, their_scales = torchao_floor(x)
    keep = scales[:, 0] > 0  # torchao halves the values of blocks whose scale byte is 0
    assert keep.sum() > 200
    assert torch.equal(scales[keep], their_scales[keep])
    same = (codes == their_codes) | ((codes & 7 == 0) & (their_codes & 7 == 0))  # the sign of zero is free
    assert same[keep].all()


def by_the_book(block):
    """Quantise one block of 32 in float64: the exponent from frexp, the nearest of the grid by search."""
    amax = max(abs(float(v)) for v in block)
    if amax == 0:
        return [0.0] * 32
    exponent = max(-127, min(127, torch.frexp(torch.tensor(amax, dtype=torch.float64))[1].item() - 1 - 2))
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = []
    for v in block:
        a = min(abs(float(v)) * 2.0**-exponent, 6.0)
        best = min(range(8), key=lambda code: (abs(grid[code] - a), code % 2))
        out.append(grid[best] * 2.0**exponent * (-1 if v < 0 else 1))
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=32, max_size=32),
)
def test_any_finite_block_by_the_book(values):
    x = torch.tensor([values])
    assert fake_quantize(x, MXFP4).values.double().tolist()[0] == by_the_book(values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_value_makes_its_block_nan_and_no_other(bad):
    x = normal(4, 64)
    x[1, 40] = bad
    values = fake_quantize(x, MXFP4).values
    expected = torch.zeros(4, 64, dtype=torch.bool)
    expected[1, 32:] = True
    assert torch.equal(values.isnan(), expected)
    assert fake_quantize(x, OperandPolicy(format="fp8_e4m3", scale="tensor")).values.isnan().all()


def test_zero_and_subnormal_blocks():
    x = torch.zeros(2, 32)
    x[1] = 2.0**-140
    codes, scales = quantize(x, MXFP4)
    assert scales.flatten().tolist() == [0, 0]
    assert codes.max() == 0
    x[1] = 2.0**-126
    assert torch.equal(fake_quantize(x, MXFP4).values.float(), x)


@pytest.mark.parametrize("policy", [MXFP4, SR_PRESCALED, OperandPolicy(format="fp8_e5m2", scale="tensor")])
def test_axis_zero_is_the_transposed_problem(policy):
    x = normal(64, 96)
    along_rows = fake_quantize(x, policy, axis=0, key=KEY).values
    assert along_rows.shape == x.shape
    if policy.rounding == "nearest":
        assert torch.equal(along_rows, fake_quantize(x.t(), policy, axis=1, key=KEY).values.t())
    if policy.format == "mxfp4":
        assert not torch.equal(along_rows, fake_quantize(x, policy, axis=1, key=KEY).values)


@pytest.mark.parametrize("policy", [MXFP4, SR_PRESCALED])
@pytest.mark.parametrize("axis", [0, 1])
def test_strides_do_not_matter(policy, axis):
    x = normal(64, 96)
    transposed = x.t().contiguous().t()
    padded = torch.zeros(64, 200)[:, :96].copy_(x)
    expected = fake_quantize(x, policy, axis=axis, key=KEY).values
    for other in (transposed, padded):
        assert torch.equal(fake_quantize(other, policy, axis=axis, key=KEY).values, expected)


@pytest.mark.parametrize(
    ("policy", "gain", "tolerance"),
    [
        # Gains on Gaussian data: rounding 3/4-prescaled values stochastically is unbiased, clipping is not.
        (SR_PRESCALED, 1.0, None),
        (SR_PLAIN, 0.98947, 5e-4),
        (MXFP4, 0.9802, 5e-4),
    ],
)
def test_gain_overall_and_per_position_in_the_block(policy, gain, tolerance):
    x = normal(8192, 256)
    q = fake_quantize(x, policy, key=KEY)
    y = q.values.double() * q.descale
    positions, reference = y.view(-1, 32), x.double().view(-1, 32)
    noise = (positions - gain * reference) * reference
    per_position = (positions * reference).sum(0) / (reference**2).sum(0)
    error = noise.std(0) / len(positions) ** 0.5 / (reference**2).mean(0)
    assert ((per_position - gain).abs() < 5 * error + (tolerance or 0)).all()
    overall = (positions * reference).sum() / (reference**2).sum()
    assert abs(overall - gain) < 5 * error.mean() / 32**0.5 + (tolerance or 0)


def test_stochastic_noise_is_uncorrelated_over_rows_steps_layers_and_operands():
    x = normal(1, 256).expand(512, 256)
    noise = fake_quantize(x, SR_PRESCALED, key=KEY).values.double() * 4 / 3 - x
    pairs = [(noise[:-1], noise[1:])]
    for change in ({"step": 4}, {"layer": "b"}, {"operand": "dy"}, {"call": 1}, {"seed": 1}):
        fields = {"seed": 0, "layer": "a", "gemm": "wgrad", "operand": "x", "step": 3} | change
        pairs.append((noise, fake_quantize(x, SR_PRESCALED, key=Key(**fields)).values.double() * 4 / 3 - x))
    for a, b in pairs:
        r = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(r) < 5 / a.numel() ** 0.5


def test_the_same_key_gives_the_same_bits_and_any_seed_works():
    x = normal(64, 64)
    zero_seed = fake_quantize(x, SR_PRESCALED, key=KEY).values
    assert torch.equal(zero_seed, fake_quantize(x, SR_PRESCALED, key=KEY).values)
    assert not torch.equal(
        zero_seed, fake_quantize(x, OperandPolicy(format="mxfp4", scale="floor", prescale=0.75)).values
    )


def test_the_prescale_comes_after_the_exponent():
    x = torch.full((1, 32), 4.0)  # amax 4: e = 0; a prescale before amax would take e = -1
    codes, scales = quantize(x, OperandPolicy(format="mxfp4", scale="floor", prescale=0.75))
    assert scales.item() == 127
    assert formats.e2m1_decode(codes).unique().tolist() == [3.0]


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_tensor_wise_fp8(fmt):
    x = normal(32, 48) * 1e-3
    q = fake_quantize(x, OperandPolicy(format=fmt, scale="tensor"))
    assert q.values.abs().max() == formats.FP8_MAX[fmt]
    scale = torch.tensor(formats.FP8_MAX[fmt]) / x.abs().max()
    assert torch.equal(q.values.float(), formats.fp8_nearest(x * scale, fmt))
    assert q.descale == (1 / scale).item()
    empty = fake_quantize(torch.zeros(4, 4), OperandPolicy(format=fmt, scale="tensor"))
    assert empty.values.abs().max() == 0
    assert empty.descale == 1.0


@pytest.mark.parametrize(
    ("x", "policy", "axis", "key", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.float64), MXFP4, 1, None, "torch.float64 to mxfp4"),
        (torch.zeros(2, 33), MXFP4, 1, None, "32 does not divide 33"),
        (torch.zeros(16, 32), MXFP4, 0, None, "32 does not divide 16"),
        (torch.zeros(2, 2, 32), MXFP4, 1, None, "expected a matrix"),
        (torch.zeros(2, 32), SR_PLAIN, 1, None, "a key is needed"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(x, policy, axis, key, message):
    with pytest.raises(ValueError, match=message):
        fake_quantize(x, policy, axis=axis, key=key)


def test_empty_tensors_work():
    assert fake_quantize(torch.zeros(0, 32), MXFP4).values.shape == (0, 32)
