"""Every Triton kernel against the reference, bit for bit, in Triton's interpreter.

Each kernel is compared in the usual tests with few policies; all policies, shapes and types are exhaustive.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.backends.device import device_of
from ablate.backends.packed import Packed, pack_nibbles, packed_by_torch, unpack_nibbles
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection, load_backend
from ablate.backends.testing.inputs import POLICIES, QUICK, awkward, label, policies_of
from ablate.backends.testing.suite import KEY, both, checks, same_bits
from ablate.backends.triton import launch, policies
from ablate.layers.linear import QuantLinear
from ablate.numerics import OperandPolicy, RecipeState, round_operand
from ablate.recipes import RecipeSpec, resolve
from tests.backends.near_ties import near_ties
from tests.exhaustive import rest_exhaustive

BACKEND = load_backend("triton")
MXFP4, NVFP4 = OperandPolicy(format="mxfp4"), OperandPolicy(format="nvfp4")
FOUR_SIX = ("four_six", "four_six_mae", "four_six_max", "four_six_448", "four_six_mae_448")
# What the suite leaves out.
MORE = policies_of("""
mxfp4 nearest_away
mxfp4 nearest_toward_zero
mxfp8 nearest_away
mxfp8 nearest_toward_zero
fp8_e5m2 nearest_away
fp8_e5m2 nearest_toward_zero
nvfp4 16x16 stochastic H16 step
nvfp4 four_six
nvfp4 four_six 16x16
nvfp4 four_six_mae
nvfp4 four_six_mae 16x16
nvfp4 four_six_max
nvfp4 four_six_max 16x16
nvfp4 four_six_448
nvfp4 four_six_448 16x16
nvfp4 four_six_mae_448
nvfp4 four_six_mae_448 16x16
nvfp4 four_six stochastic 16/17
mxfp4 quest mask
mxfp4 32x32 stochastic 0.75 mask
mxfp4 stochastic_rocm H16 step
mxfp4 H32 permute
nvfp4 H64 call permute
nvfp4 ms_eden nearest_away H16 step
nvfp4 ms_eden_unscaled H128 step permute
""")
CLAIMED = [policy for policy in (*POLICIES, *MORE) if policies.refusal(policy) is None]
CHECKS = list(checks(BACKEND, "cpu"))
FULL = dataclasses.replace(MXFP4, rounding="stochastic", prescale=0.75, hadamard=16, signs="step")
assert FULL in QUICK


USUAL_CHECKS = {*(f"quantised bits: {label(policy)}" for policy in (MXFP4, FULL)), "exact probe: mxfp4"}


@pytest.mark.parametrize(
    "check", rest_exhaustive(CHECKS, lambda check: check.name in USUAL_CHECKS, lambda check: check.name)
)
def test_conformance(check):
    assert check.run()


def test_what_the_kernel_claims():
    # Formats, rules, roundings and rotations that the kernel must not lose without notice.
    assert {policy.format for policy in CLAIMED} == {
        "mxfp4", "mxfp4_e3m0", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4", "fp8_e4m3", "fp8_e5m2",
    }  # fmt: skip
    assert {policy.scale for policy in CLAIMED} == {
        "floor", "even", "rceil", "ceil", "uos", "quest", "two_level", "tensor",
        "ms_eden", "ms_eden_unscaled", *FOUR_SIX,
    }  # fmt: skip
    assert {policy.hadamard for policy in CLAIMED} == {0, 16, 32, 64, 128}
    assert {policy.rounding for policy in CLAIMED} == {
        "nearest", "nearest_away", "nearest_toward_zero", "stochastic", "stochastic_rocm",
    }  # fmt: skip
    assert {policy.block for policy in CLAIMED} == {"none", "1x16", "16x16", "1x32", "32x32"}
    assert [label(policy) for policy in MORE if policy not in CLAIMED] == []


def same_mask(ours, theirs):
    if ours.mask is None or theirs.mask is None:
        return ours.mask is theirs.mask
    return torch.equal(ours.mask, theirs.mask)


def check_dequantised_values(policy, axis, dtypes):
    shape = (256, 256) if policy.hadamard > 32 else (96, 160)
    for dtype in dtypes:
        x = awkward(*shape, torch.float32).clamp(-60000, 60000).to(dtype)
        if policy.format in ("nvfp4", "fp8_e4m3", "fp8_e5m2"):
            x = torch.nan_to_num(x, nan=0.0)
        expected = round_operand(x, policy, axis=axis, key=KEY)
        ours = launch.quantise_values(x, Draw(policy=policy, key=KEY), axis)
        assert same_bits(ours.values, expected.values), dtype
        assert same_mask(ours, expected), dtype
        assert float(ours.descale) == expected.descale


@pytest.mark.parametrize(
    "policy",
    rest_exhaustive(
        [one for one in MORE if one.scale in FOUR_SIX and one.block == "1x16"],
        lambda policy: policy.scale == "four_six",
        label,
    ),
)
@pytest.mark.parametrize("axis", [0, 1])
def test_four_or_six_where_only_roundings_tell_the_errors_apart(policy, axis):
    for x in near_ties(4, axis):
        expected = round_operand(x, policy, axis=axis, key=KEY)
        assert same_bits(
            launch.quantise_values(x, Draw(policy=policy, key=KEY), axis).values, expected.values
        )


@pytest.mark.parametrize(
    "policy", [*QUICK, *(one for one in MORE if one.scale not in FOUR_SIX[1:])], ids=label
)
def test_dequantised_values(policy):
    for axis, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        check_dequantised_values(policy, axis, [dtype])


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (OperandPolicy(format="nvfp4", rounding="stochastic", prescale=16 / 17), 1.0),  # not exact in fp32
        (OperandPolicy(format="mxfp8"), 2.0**-125),  # its smallest elements are rounded to bf16
        (dataclasses.replace(MXFP4, scale="quest", mask=True), 2.0**66),  # squares overflow, also of means
        (dataclasses.replace(NVFP4, scale="four_six"), 2.0**-146),  # its scale is the largest number
        (dataclasses.replace(NVFP4, scale="ms_eden", hadamard=16), 2.0**-146),  # the tensor's scale is zero
    ],
    ids=lambda value: label(value) if isinstance(value, OperandPolicy) else "",
)
def test_what_fp32_or_bf16_does_not_hold(policy, factor):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * factor
    expected = round_operand(x, policy, axis=1, key=KEY)
    ours = launch.quantise_values(x, Draw(policy=policy, key=KEY), 1)
    assert same_bits(ours.values, expected.values)
    assert float(ours.descale) == expected.descale
    if policy.format == "nvfp4":
        packed = packed_by_torch(x, Draw(policy=policy, key=KEY), axis=1)
        assert float(packed.descale_on_device) == float(packed.descale) == expected.descale


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", CLAIMED, ids=label)
@pytest.mark.parametrize("axis", [0, 1])
def test_dequantised_values_of_every_policy(policy, axis):
    check_dequantised_values(policy, axis, [torch.bfloat16, torch.float16, torch.float32])


PACKED = [policy for policy in CLAIMED if policy.format in ("mxfp4", "mxfp8", "nvfp4")]


@pytest.mark.parametrize(
    "policy", rest_exhaustive(PACKED, lambda policy: policy in (*QUICK, *MORE[-7:]), label)
)
def test_codes_and_scale_bytes(policy):
    shape = (256, 256) if policy.hadamard > 32 else (64, 96)
    x = awkward(*shape, torch.bfloat16)
    if policy.format == "nvfp4":
        x = torch.nan_to_num(x, nan=0.0, posinf=1.0)
    for axis in (0, 1):
        ours = BACKEND.quantize(x, Draw(policy=policy, key=KEY), axis=axis)
        theirs = packed_by_torch(x, Draw(policy=policy, key=KEY), axis=axis)
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales, theirs.scales)
        assert same_mask(ours, theirs)
        assert float(ours.descale) == pytest.approx(float(theirs.descale), rel=0, abs=0)


def test_delayed_scales_take_the_amax_they_are_given():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    policy = OperandPolicy(format="fp8_e4m3", scale="delayed")
    expected = round_operand(x, policy, axis=1, amax=2.0)
    ours = BACKEND.quantize(x, Draw(policy=policy, amax=2.0), axis=1)
    assert same_bits(ours.values, expected.values)
    assert float(ours.descale) == expected.descale


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (1, 32), (1, 64), (33, 32), (130, 96)])
def test_empty_and_odd_shapes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = BACKEND.quantize(x, Draw(policy=FULL, key=KEY), axis=1)
    assert ours.shape == shape
    assert same_bits(ours.values, round_operand(x, FULL, axis=1, key=KEY).values)


@settings(max_examples=5)
@given(st.data())
def test_any_bits(data):
    check_any_bits(data)


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(st.data())
def test_any_bits_of_many(data):
    check_any_bits(data)


def check_any_bits(data):
    policy = data.draw(
        st.sampled_from([p for p in CLAIMED if p.format.startswith("mx") and p.hadamard <= 32])
    )
    bits = data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=96))
    x = (
        torch.tensor((bits * 64)[: 32 * 64], dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(32, 64)
    )
    key = dataclasses.replace(KEY, step=data.draw(st.integers(0, 2**32 - 1)))
    for axis in (0, 1):
        expected = round_operand(x, policy, axis=axis, key=key)
        ours = launch.quantise_values(x, Draw(policy=policy, key=key), axis)
        assert same_bits(ours.values, expected.values)
        assert same_mask(ours, expected)


def test_nibbles_come_first_in_low_bits():
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert pack_nibbles(codes)[0, 0] == 0x10
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize(
    "shape",
    rest_exhaustive(
        [(1, 1, 32), (65, 33, 96), (128, 128, 256), (129, 257, 288), (0, 8, 32)],
        lambda shape: max(shape) < 128,
    ),
)
def test_gemm_shapes(shape):
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).float() for rows in (m, n))
    left, right = (
        BACKEND.quantize(one, Draw(policy=OperandPolicy(format="mxfp8")), axis=1) for one in (a, b)
    )
    assert torch.equal(BACKEND.multiply(left, right), (a @ b.t()).to(torch.bfloat16))  # exact in MXFP8


def test_no_elements_to_sum_over_is_zero():
    left, right = (
        Packed(format="mxfp4", codes=torch.zeros(n, 0, dtype=torch.uint8),
               scales=torch.zeros(n, 0, dtype=torch.uint8), descale=1.0, axis=1)
        for n in (3, 5)
    )  # fmt: skip
    assert torch.equal(BACKEND.multiply(left, right), torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize(("k", "at"), [(64, 40), (288, 0), (288, 287)])
def test_a_nan_block_makes_its_row_nan_and_no_other(k, at):
    x = torch.ones(4, k)
    x[2, at] = float("nan")
    left, right = (BACKEND.quantize(one, Draw(policy=MXFP4), axis=1) for one in (x, torch.ones(3, k)))
    for product in (BACKEND.multiply(left, right), BACKEND.multiply(right, left).t()):
        assert product.isnan().any(dim=1).tolist() == [False, False, True, False]


def e4m3_scale_to_fp32(handle, compute_type):
    """Read an E4M3 scale as what it is: Triton 3.9's interpreter takes every scale byte for E8M0."""
    from triton import language as tl

    if handle.dtype != tl.float8e4nv:
        return ORIGINAL_SCALE(handle, compute_type)
    return torch.from_numpy(handle.data.view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()


from triton.runtime import interpreter  # noqa: E402

ORIGINAL_SCALE = interpreter._dot_scaled_scale_to_f32


def test_nvfp4_products(monkeypatch):
    assert BACKEND.support(both(OperandPolicy(format="nvfp4")), device_of("cpu")).mode == "no"
    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", e4m3_scale_to_fp32)
    generator = torch.Generator().manual_seed(2)
    policy = OperandPolicy(format="nvfp4", hadamard=16, signs="fixed")
    for m, n, k in ((64, 48, 256), (33, 17, 80)):
        a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
        left, right = (BACKEND.quantize(one, Draw(policy=policy), axis=1) for one in (a, b))
        ours = BACKEND.multiply(left, right)
        exact = left.values.double() @ right.values.double().t() * float(left.descale) * float(right.descale)
        assert torch.allclose(ours.double(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item())


RECIPES = {
    "mxfp4, SR and RHT": {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"},
    "mxfp4, H16 on Wgrad": {"gemms": ["fprop", "dgrad", "wgrad"], "wgrad": {"stabiliser": "dht"}},
    "mxfp8": "mxfp8",
    "quartet": {"preset": "quartet", "layers": []},
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "shape", rest_exhaustive([(64, 96, 64), (128, 64, 160)], lambda shape: shape[0] == 64)
)
def test_a_linear_layer_with_all_three_gemms(name, shape):
    tokens, inputs, outputs = shape
    spec = RECIPES[name]
    recipe = resolve(RecipeSpec(**spec) if isinstance(spec, dict) else RecipeSpec(preset=spec))
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.1
    x = torch.randn(tokens, inputs, generator=generator).to(torch.bfloat16)
    dy = torch.randn(tokens, outputs, generator=generator).to(torch.bfloat16)
    results = {}
    for backend in ("triton", "reference"):
        state = RecipeState(recipe=recipe, backend=Selection(backend), seed=3, step=7)
        seen = {}
        state.watch = lambda _layer, gemm, operand, done, seen=seen: seen.setdefault(
            (gemm, operand), done.values.float()
        )
        layer = QuantLinear(inputs, outputs, name="l", state=state, weight=torch.nn.Parameter(weight.clone()))
        given_x = x.clone().requires_grad_()
        y = layer(given_x)
        y.backward(dy)
        results[backend] = (seen, y.detach(), given_x.grad, layer.weight.grad)
    ours, theirs = results["triton"], results["reference"]
    assert ours[0].keys() == theirs[0].keys()
    for which, values in ours[0].items():
        assert same_bits(values, theirs[0][which]), which
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        # Accumulated in another order: a sum may fall on the other side of a rounding boundary.
        apart = (mine.float() != other.float()).float().mean().item()
        assert apart < 0.01
        assert torch.allclose(mine.float(), other.float(), rtol=2**-7, atol=1e-5 * other.abs().max().item())


COPIED = [MXFP4, FULL, OperandPolicy(format="mxfp8"), OperandPolicy(format="nvfp4")]


def test_both_copies_of_two_policies_in_one_read():
    x = torch.randn(160, 192, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for left, right in itertools.pairwise([*COPIED, *COPIED[:1]]):
        check_both_copies(x, left, right)


@pytest.mark.exhaustive
def test_both_copies_of_any_two_policies_in_one_read():
    x = torch.randn(160, 192, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for left, right in itertools.permutations(COPIED, 2):
        check_both_copies(x, left, right)


def check_both_copies(x, left, right):
    other = dataclasses.replace(KEY, gemm="dgrad")
    rows, columns = BACKEND.quantize_both(x, Draw(policy=left, key=KEY), Draw(policy=right, key=other))
    assert same_bits(rows.values, round_operand(x, left, axis=1, key=KEY).values)
    assert same_bits(columns.values, round_operand(x, right, axis=0, key=other).values)
