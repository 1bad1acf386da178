"""What every back end owes: the quantised bits of ``ablate.numerics``, and an fp32 product rounded once."""

import dataclasses
import shutil

import pytest
import torch

from ablate.backends import cpu_kernel, get_backend
from ablate.numerics import Key, OperandPolicy, round_operand
from ablate.recipes import block_shape

KEY = Key(seed=5, layer="blocks.1.ffn.down", gemm="wgrad", operand="dy", step=12_345, call=3)
MXFP4 = OperandPolicy(format="mxfp4", scale="floor")
STOCHASTIC = dataclasses.replace(MXFP4, rounding="stochastic", prescale=0.75)
NVFP4 = OperandPolicy(format="nvfp4")
POLICIES = [
    OperandPolicy(),
    OperandPolicy(format="fp8_e4m3"),
    OperandPolicy(format="fp8_e5m2"),
    *(
        dataclasses.replace(MXFP4, rounding=rounding, prescale=prescale, hadamard=hadamard, signs=signs)
        for rounding, prescale in (("nearest", 1.0), ("stochastic", 1.0), ("stochastic", 0.75))
        for hadamard, signs in ((0, "none"), (16, "none"), (16, "step"), (32, "none"), (32, "step"))
    ),
    *(dataclasses.replace(MXFP4, scale=scale) for scale in ("even", "rceil", "ceil", "uos", "quest")),
    *(
        OperandPolicy(format=fmt, rounding=rounding)
        for fmt in ("mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e3m0")
        for rounding in ("nearest", "stochastic")
    ),
    dataclasses.replace(MXFP4, block="32x32"),
    dataclasses.replace(STOCHASTIC, block="32x32"),
    dataclasses.replace(MXFP4, scale="even", rounding="stochastic_rocm"),
    dataclasses.replace(STOCHASTIC, undo="operand"),
    dataclasses.replace(MXFP4, scale="quest", hadamard=32, mask=True),
    dataclasses.replace(STOCHASTIC, hadamard=64, signs="call", rotated_bf16=True),
    dataclasses.replace(STOCHASTIC, hadamard=128, signs="layer", signs_after=True),
    dataclasses.replace(MXFP4, hadamard=32, signs="call", permute=True),
    dataclasses.replace(MXFP4, hadamard=256),
    dataclasses.replace(MXFP4, hadamard=16, signs="fixed"),
    NVFP4,
    dataclasses.replace(NVFP4, rounding="stochastic"),
    dataclasses.replace(NVFP4, hadamard=16, signs="fixed"),
    dataclasses.replace(NVFP4, block="16x16"),
    dataclasses.replace(NVFP4, scale="four_six"),
    dataclasses.replace(NVFP4, scale="four_six", rounding="stochastic", hadamard=64),
    *(
        dataclasses.replace(NVFP4, scale="ms_eden", hadamard=hadamard, signs="step")
        for hadamard in (16, 32, 64, 128)
    ),
    OperandPolicy(format="fp8_e4m3", rounding="stochastic", hadamard=32),
    OperandPolicy(format="fp4_e2m1"),
    OperandPolicy(format="fp4_e3m0", scale="row"),
    OperandPolicy(format="fp8_e4m3", scale="1x128"),
    OperandPolicy(hadamard=32),
    STOCHASTIC,
]


def shapes_for(policy):
    """Return shapes that the policy's groups divide, whole strips of 64 columns and others."""
    if policy.hadamard > 32 or policy.scale == "1x128":
        return ((256, 256), (256, 768), (768, 256))
    return ((32, 32), (64, 96), (96, 160), (32, 672), (128, 576))


def whole_tensor(policy):
    return policy.format in ("nvfp4", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp4_e3m0")


BACKENDS = ["reference", "emulated"]


def awkward(rows, columns, dtype):
    """Wide exponents, zeros of both signs, subnormals, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -30, 30, (rows, 1), generator=generator
    )
    x[:, 7] = -0.0
    x[: rows // 4] = x[: rows // 4].sign() * 2.0**-130
    x[rows // 2, columns // 2] = float("nan")
    x[rows // 2 + 1, 3] = float("inf")
    return x.to(dtype)


def same_bits(a, b):
    return torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantised_bits(name, policy, axis):
    backend = get_backend(name)
    for shape in shapes_for(policy):
        for dtype in (torch.bfloat16, torch.float32):
            x = awkward(*shape, dtype)
            if whole_tensor(policy):
                x = torch.nan_to_num(x, nan=0.0, posinf=1.0)
            ours = backend.quantize(x, policy, axis=axis, key=KEY)
            expected = round_operand(x, policy, axis=axis, key=KEY)
            assert same_bits(ours.values, expected.values), (shape, dtype)
            assert ours.descale == expected.descale
            assert ours.values.dtype == expected.values.dtype
            assert (ours.mask is None) == (expected.mask is None)
            assert ours.mask is None or torch.equal(ours.mask, expected.mask)


@pytest.mark.parametrize(
    "policy",
    [POLICIES[1], MXFP4, STOCHASTIC, dataclasses.replace(NVFP4, hadamard=16, signs="fixed")],
    ids=str,
)
def test_any_number_of_threads_and_any_strides(policy):
    backend = get_backend("emulated")
    x = torch.randn(1056, 544, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    strided = torch.zeros(1056, 600, dtype=torch.bfloat16)[:, :544].copy_(x)
    before = torch.get_num_threads()
    try:
        for axis in (0, 1):
            expected = round_operand(x, policy, axis=axis, key=KEY).values
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for other in (x, strided, x.t().contiguous().t()):
                    assert same_bits(backend.quantize(other, policy, axis=axis, key=KEY).values, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [33, 50, 65, 130])
def test_odd_widths_along_the_other_axis(columns):
    x = torch.randn(256, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for policy in (policy for policy in POLICIES[3:] if block_shape(policy)[0] == 1):
        ours = get_backend("emulated").quantize(x, policy, axis=0, key=KEY).values
        assert same_bits(ours, round_operand(x, policy, axis=0, key=KEY).values)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], MXFP4, POLICIES[-1]], ids=str)
def test_product_is_rounded_once_from_fp32(name, policy):
    backend = get_backend(name)
    generator = torch.Generator().manual_seed(0)
    a = backend.quantize(torch.randn(64, 96, generator=generator), policy, axis=1, key=KEY)
    b = backend.quantize(torch.randn(96, 32, generator=generator), policy, axis=0, key=KEY)
    exact = (a.values.double() @ b.values.double()) * (a.descale * b.descale)
    expected = exact.to(torch.float32).to(torch.bfloat16)
    ours = backend.multiply(a, b)
    # Another order of fp32 accumulation can move a sum over a rounding boundary of bf16, but seldom.
    assert (ours != expected).float().mean() < 0.01
    assert torch.allclose(ours.double(), exact, rtol=2**-8, atol=1e-4 * exact.abs().max())
    at = dataclasses.replace(a, values=a.values.t().contiguous())
    bt = dataclasses.replace(b, values=b.values.t().contiguous())
    assert torch.equal(backend.multiply(at, bt, a_t=True, b_t=True), ours)


def test_bad_operands_are_refused_by_every_back_end():
    for name in BACKENDS:
        with pytest.raises(ValueError, match="32 does not divide 40"):
            get_backend(name).quantize(torch.zeros(2, 40), MXFP4, axis=1, key=None)
    with pytest.raises(ValueError, match="no back end 'fast'"):
        get_backend("fast")


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_with_a_compiler_the_kernel_is_used():
    # It refuses itself where its bits are not the reference's: then this fails.
    assert cpu_kernel.availability().usable, cpu_kernel.availability().reason


def test_without_a_compiler_plain_torch_does_it(monkeypatch):
    monkeypatch.setenv("ABLATE_CPU_KERNEL", "off")
    cpu_kernel._load.cache_clear()
    try:
        assert not cpu_kernel.availability().usable
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        values = get_backend("emulated").quantize(x, MXFP4, axis=0, key=None).values
        assert torch.equal(values, round_operand(x, MXFP4, axis=0).values)
    finally:
        cpu_kernel._load.cache_clear()


def test_a_build_with_wrong_bits_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_kernel, "_bits_agree", lambda _library: False)
    cpu_kernel._load.cache_clear()
    try:
        reason = cpu_kernel.availability().reason
        assert "does not give the bits" in reason or "no C++ compiler" in reason
        assert not list(tmp_path.rglob("*.so"))
    finally:
        cpu_kernel._load.cache_clear()
