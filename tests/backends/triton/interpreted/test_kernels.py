"""Every Triton kernel against the reference, bit for bit, in Triton's interpreter."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from ablate.backends.device import device_of
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.packed import packed_by_torch
from ablate.backends.protocol import Draw, dequantised
from ablate.backends.select import load_backend
from ablate.backends.testing.inputs import POLICIES, QUICK, awkward, label, policies_of
from ablate.backends.testing.suite import (
    KEY,
    both,
    checks,
    difference,
    quantised_bits,
    same_bits,
)
from ablate.backends.triton import launch, policies
from ablate.check import Setup, training
from ablate.numerics import round_operand
from ablate.run.config import ModelConfig
from tests.backends.near_ties import near_ties
from tests.numerics.strategies import normal, whole

BACKEND = load_backend("triton")
COPIED = MXFP4, FULL, MXFP8, NVFP4 = policies_of(
    "mxfp4\nmxfp4 stochastic 0.75 H16 step\nmxfp8\nnvfp4"
)
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


def each_word(policies):
    """Yield the policies that bring a new word: other tests here meet every policy."""
    known = set()
    for policy in policies:
        words = set(label(policy).split())
        if words - known:
            yield policy
        known |= words


class OnGpu(EmulatedBackend):
    """Emulation as on a GPU: the kernel quantises to values."""

    def quantize(self, x, draw, *, axis):
        return launch.quantise_values(x, {axis: draw})[axis]

    def quantize_both(self, x, rows, columns):
        quantized = launch.quantise_values(x, {1: rows, 0: columns})
        return quantized[1], quantized[0]


def quantised(x, policy):
    return BACKEND.quantize(x, Draw(policy=policy, key=KEY), axis=1)


def quantised_by(draw, x, axis=1):
    return OnGpu().quantize(x, draw, axis=axis)


def check_values(x, policy, axis, key=KEY, **draw):
    actual = quantised_by(Draw(policy=policy, key=KEY, **draw), x, axis)
    assert difference(actual, round_operand(x, policy, axis=axis, key=key)) is None


def check_codes(x, policy, axis):
    draw = Draw(policy=policy, key=KEY)
    actual = BACKEND.quantize(x, draw, axis=axis)
    reference = packed_by_torch(x, draw, axis=axis)
    assert torch.equal(actual.codes, reference.codes)
    assert torch.equal(actual.scales, reference.scales)
    # a mask may lack on either side
    assert difference(actual, reference) is difference(reference, actual) is None


@pytest.mark.parametrize(
    "check",
    checks(BACKEND, "cpu", tuple(each_word(POLICIES))),
    ids=lambda check: check.name,
)
def test_conformance(check):
    assert check.run()


@pytest.mark.parametrize("policy", QUICK, ids=label)
@pytest.mark.parametrize("backend", [BACKEND, OnGpu()], ids=["codes", "values"])
def test_short_form(backend, policy):
    """For other Tritons: in the oldest unary minus is 0 − x, as on GPUs, which newer interpreters do not show."""
    assert quantised_bits(backend, "cpu", policy)


def test_what_the_kernel_leaves_to_plain_torch():
    assert {label(policy) for policy in (*POLICIES, *MORE)} - {label(policy) for policy in CLAIMED} == {
        "bf16", "bf16 H32", "mxfp4 H256", "mxfp4 stochastic 0.75 operand", "nvfp4 ue5m3 16x16", "nvint4",
        "nvfp4 two_level_ue5m3 stochastic 0.9411764705882353", "nvint4 stochastic H16", "fp8_e4m3 row",
        "fp8_e4m3 1x128", "fp8_e4m3 128x128", "fp4_e2m1", "fp4_e3m0 row", "fp4_e2m1 searched",
    }  # fmt: skip


def awkward_values(policy, dtype):
    shape = (256, 256) if policy.hadamard > 32 else (96, 160)
    x = awkward(*shape, torch.float32).clamp(-60000, 60000).to(dtype)
    return torch.nan_to_num(x, nan=0.0) if policy.has_tensor_scale else x


@pytest.mark.parametrize("policy", CLAIMED, ids=label)
@pytest.mark.parametrize("axis", [0, 1])
def test_dequantised_values(policy, axis):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_values(awkward_values(policy, dtype), policy, axis)


@pytest.mark.parametrize(
    "policy",
    [
        policy
        for policy in MORE
        if policy.scale.startswith("four_six") and policy.block == "1x16"
    ],
    ids=label,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_four_or_six_where_only_roundings_tell_the_errors_apart(policy, axis):
    for x in near_ties(4, axis):
        check_values(x, policy, axis)


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("nvfp4 stochastic 16/17", 1.0),  # not exact in fp32
        ("mxfp8", 2.0**-125),  # its smallest elements are rounded to bf16
        ("mxfp4 quest mask", 2.0**66),  # squares overflow, also of means
        ("nvfp4 four_six", 2.0**-146),  # its scale is the largest number
        ("nvfp4 ms_eden H16", 2.0**-146),  # the tensor's scale is zero
    ],
)
def test_what_fp32_or_bf16_does_not_hold(text, factor):
    (policy,) = policies_of(text)
    x = normal(64, 128) * factor
    check_values(x, policy, 1)
    if policy.format == "nvfp4":
        packed = packed_by_torch(x, Draw(policy=policy, key=KEY), axis=1)
        descale = round_operand(x, policy, axis=1, key=KEY).descale
        assert float(packed.descale_on_device) == float(packed.descale) == descale


@pytest.mark.parametrize(
    "policy",
    [policy for policy in CLAIMED if policy.format in ("mxfp4", "mxfp8", "nvfp4")],
    ids=label,
)
def test_codes_and_scale_bytes(policy):
    for axis in (0, 1):
        check_codes(awkward_values(policy, torch.bfloat16), policy, axis)


@pytest.mark.parametrize(
    "text",
    ["fp8_e4m3", "nvfp4 H16 fixed", "nvfp4 stochastic 16/17", "nvfp4 ms_eden H16"],
)
@pytest.mark.parametrize("shape", [(32, 64), (0, 64), (700, 1536)])
def test_a_tensors_largest_magnitude(text, shape):
    (policy,) = policies_of(text)
    x = normal(*shape)

    def scales():
        return launch.tensor_scales(x, {1: Draw(policy=policy, key=KEY)})[1]

    expected = round_operand(x, policy, axis=1, key=KEY)
    assert float(scales()[3]) == expected.descale
    for value in (torch.nan, torch.inf):
        if x.numel():
            x[-1, -1] = value
            assert scales()[:2].isnan().all()


def test_delayed_scales_take_the_amax_they_are_given():
    (policy,) = policies_of("fp8_e4m3 delayed")
    x = normal(32, 64)
    for amax in (2.0, torch.tensor([2.0]), torch.tensor(2.0)):
        actual = BACKEND.quantize(x, Draw(policy=policy, amax=amax), axis=1)
        assert difference(actual, round_operand(x, policy, axis=1, amax=2.0)) is None


@pytest.mark.parametrize(
    "text", ["mxfp4 stochastic 0.75 H16 call permute", "mxfp4 stochastic H32 layer"]
)
def test_step_and_call_are_read_from_the_position(text):
    (policy,) = policies_of(text)
    x = normal(64, 64)
    other = dataclasses.replace(KEY, step=2**40 + 7, call=1)
    position = torch.tensor([other.step, other.call])
    check_values(x, policy, 1, key=other, position=position)


@pytest.mark.parametrize(
    "text",
    ["mxfp4", "mxfp4 stochastic 0.75 H16 step permute", "fp8_e4m3", "nvfp4 H16 fixed"],
)
def test_a_launch_brings_nothing_from_the_cpu(text, monkeypatch):
    (policy,) = policies_of(text)
    x = normal(64, 64)
    names = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    draw = Draw(policy=policy, key=KEY)
    monkeypatch.setattr(launch, "quantise_kernel", Nothing())
    monkeypatch.setattr(launch, "scale_kernel", Nothing())
    # what is the same in each launch is prepared once
    launch.quantise_values(x, {1: draw, 0: draw})
    launch.quantise(x, {1: draw, 0: draw}, "codes")
    with Record():
        launch.quantise_values(x, {1: draw, 0: draw})
        launch.quantise(x, {1: draw, 0: draw}, "codes")
    assert set(names) <= {"empty", "new_empty", "slice", "linalg_vector_norm"}


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


@pytest.mark.parametrize(
    "shape", [(0, 32), (32, 0), (1, 32), (1, 64), (33, 32), (130, 96)]
)
def test_empty_and_odd_shapes(shape):
    x = normal(*shape)
    actual = quantised(x, FULL)
    assert actual.shape == shape
    assert same_bits(actual.values, round_operand(x, FULL, axis=1, key=KEY).values)


def test_matrices_beyond_the_grid_and_31_bits(monkeypatch):
    monkeypatch.setattr(launch, "_LARGEST_GRID", 2)
    monkeypatch.setattr(launch, "_WIDE", 0)
    (policy,) = policies_of("nvfp4 stochastic H16 step")
    for x in (normal(640, 192), normal(192, 640).t()):
        for axis in (0, 1):
            check_values(x, policy, axis)
            check_codes(x, policy, axis)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 32), (65, 33, 96), (128, 128, 256), (129, 257, 288), (0, 8, 32), (3, 5, 0)],
    ids=str,
)
def test_gemm_shapes(shape):
    m, n, k = shape
    a, b = (whole(4, rows, k, seed=rows).float() for rows in (m, n))
    product = BACKEND.multiply(*(quantised(side, MXFP8) for side in (a, b)))
    assert torch.equal(product, (a @ b.t()).to(torch.bfloat16))  # exact in MXFP8


@pytest.mark.parametrize(("k", "at"), [(64, 40), (288, 0), (288, 287)])
def test_a_nan_block_makes_its_row_nan_and_no_other(k, at):
    x = torch.ones(4, k)
    x[2, at] = float("nan")
    left, right = (quantised(side, MXFP4) for side in (x, torch.ones(3, k)))
    for product in (BACKEND.multiply(left, right), BACKEND.multiply(right, left).t()):
        assert product.isnan().any(dim=1).tolist() == [False, False, True, False]


def test_nvfp4_products(monkeypatch):
    def e4m3_scale_to_fp32(scale, *_):
        """Read E4M3 scales as what they are: Triton's interpreter takes every scale byte for E8M0."""
        codes = scale if isinstance(scale, np.ndarray) else scale.data
        codes = torch.from_numpy(codes.view(np.uint8))
        return codes.view(torch.float8_e4m3fn).float().numpy()

    assert BACKEND.support(both(NVFP4), device_of("cpu")).mode == "no"
    in_triton_3_9 = hasattr(interpreter, "_dot_scaled_scale_to_f32")
    name = "_dot_scaled_scale_to_f32" if in_triton_3_9 else "_e8m0_to_f32"
    monkeypatch.setattr(interpreter, name, e4m3_scale_to_fp32)
    policy = dataclasses.replace(NVFP4, hadamard=16, signs="fixed")
    for m, n, k in ((64, 48, 256), (33, 17, 80)):
        left, right = (quantised(normal(rows, k, seed=rows), policy) for rows in (m, n))
        exact = dequantised(left).double() @ dequantised(right).double().t()
        actual = BACKEND.multiply(left, right).double()
        atol = 1e-5 * exact.abs().max().item()
        assert torch.allclose(actual, exact, rtol=2**-8, atol=atol)


LAYERS = Setup(where="cpu", device=device_of("cpu"), backends={"triton": BACKEND})


@pytest.mark.parametrize(
    "check", training.training(LAYERS), ids=lambda check: check.name
)
def test_layers_with_all_three_gemms(monkeypatch, check):
    monkeypatch.setattr(
        training,
        "_MODEL",
        ModelConfig(width=32, layers=1, heads=1, ffn=32, tied_head=False),
    )
    monkeypatch.setattr(training, "_STEPS", 2)
    assert check.run()


@pytest.mark.parametrize(
    ("left", "right"), itertools.permutations(COPIED, 2), ids=label
)
def test_both_copies_of_two_policies_in_one_read(left, right):
    x = normal(160, 192, seed=5).to(torch.bfloat16)
    other = dataclasses.replace(KEY, gemm="dgrad")
    rows, columns = BACKEND.quantize_both(
        x, Draw(policy=left, key=KEY), Draw(policy=right, key=other)
    )
    assert same_bits(rows.values, round_operand(x, left, axis=1, key=KEY).values)
    assert same_bits(columns.values, round_operand(x, right, axis=0, key=other).values)
