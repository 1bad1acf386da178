"""``F.scaled_mm`` where it runs (FP8 on the CPU), and its arguments where it does not."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from ablate.backends import torch_scaled
from ablate.backends.device import device_of_arch
from ablate.backends.packed import Packed
from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.backends.testing.suite import both
from ablate.backends.torch_scaled import scaled_mm_arguments, swizzled
from ablate.recipes import OperandPolicy

BACKEND = load_backend("torch")


def written_out(scales):
    """The definition in cuBLAS's documentation, byte by byte."""
    rows, columns = scales.shape
    tiles_down, tiles_across = -(-rows // 128), -(-columns // 4)
    out = torch.zeros(tiles_down * tiles_across * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * tiles_across + column // 4
            inner, outer = column % 4, row % 128
            out[tile * 512 + outer % 32 * 16 + outer // 32 * 4 + inner] = scales[row, column]
    return out


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (33, 9)])
def test_the_swizzle_is_its_definition(shape):
    scales = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swizzled(scales), written_out(scales))


def test_the_swizzle_is_torchaos():
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(0, 255, (200, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(swizzled(scales), to_blocked(scales, use_triton_kernel=False).flatten())


def arguments(fmt, m, n, k, *, hip=False):
    per_byte, block = (1 if fmt == "mxfp8" else 2), (16 if fmt == "nvfp4" else 32)
    a, b = (torch.ones(rows, k // per_byte, dtype=torch.uint8) for rows in (m, n))
    a_scales, b_scales = (torch.full((rows, k // block), 120, dtype=torch.uint8) for rows in (m, n))
    left = Packed(format=fmt, codes=a, scales=a_scales, descale=1.0, axis=1)
    right = Packed(format=fmt, codes=b, scales=b_scales, descale=1.0, axis=1)
    return scaled_mm_arguments(left, right, hip=hip)


def test_the_mi300x_has_other_fp8_formats():
    support = BACKEND.support(both(OperandPolicy(format="fp8_e4m3")), device_of_arch("gfx942"))
    assert (support.mode, "FNUZ" in support.detail) == ("no", True)


@pytest.mark.parametrize(
    ("version", "arch", "mode", "why"),
    [
        ("2.9.1", "sm_90", "no", "torch 2.9.1 has no F.scaled_mm (needs 2.10)"),
        ("2.11.0+cu130", "sm_90", "native", "F.scaled_mm, quantised by"),
        ("2.11.0", "cpu", "no", "torch 2.11.0 has no F.scaled_mm on the CPU (needs 2.13)"),
        ("2.13.0+cpu", "cpu", "emulated", "F.scaled_mm of FP8 codes on the CPU"),
    ],
)
def test_an_older_torch_is_refused_where_it_has_no_scaled_mm(monkeypatch, version, arch, mode, why):
    monkeypatch.setattr(torch, "__version__", version)
    support = BACKEND.support(both(OperandPolicy(format="fp8_e4m3")), device_of_arch(arch))
    assert support.mode == mode
    assert support.detail.startswith(why)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 512), (7, 33, 96), (300, 17, 160)])
def test_arguments_on_blackwell(fmt, m, n, k):
    call = arguments(fmt, m, n, k)
    per_byte, block = (1 if fmt == "mxfp8" else 2), (16 if fmt == "nvfp4" else 32)
    n_up = -(-n // 16) * 16
    element = torch.float8_e4m3fn if fmt == "mxfp8" else torch.float4_e2m1fn_x2
    assert call["mat_a"].dtype == call["mat_b"].dtype == element
    assert call["mat_a"].shape == (m, k // per_byte)
    assert call["mat_b"].shape == (k // per_byte, n_up)
    assert call["mat_a"].stride() == (k // per_byte, 1)  # row-major
    assert call["mat_b"].stride() == (1, k // per_byte)  # column-major: "TN"
    for scales, rows in ((call["scale_a"], m), (call["scale_b"], n_up)):
        expected = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
        assert scales[0].dtype == expected
        assert scales[0].shape == (-(-rows // 128) * 128 * -(-(k // block) // 4) * 4,)
        assert scales[0].is_contiguous()
        assert len(scales) == (2 if fmt == "nvfp4" else 1)
    block_type = ScalingType.BlockWise1x16 if fmt == "nvfp4" else ScalingType.BlockWise1x32
    two_level = [block_type, ScalingType.TensorWise] if fmt == "nvfp4" else [block_type]
    assert call["scale_recipe_a"] == call["scale_recipe_b"] == two_level
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(two_level)]
    assert call["swizzle_a"] == call["swizzle_b"] == swizzles
    assert call["output_dtype"] == torch.bfloat16


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_arguments_on_gfx950(fmt):
    call = arguments(fmt, 7, 33, 96, hip=True)
    per_byte = 1 if fmt == "mxfp8" else 2
    assert call["mat_a"].shape == (32, 128 // per_byte)  # whole tiles: M and N by 32, K by 64
    assert call["mat_b"].shape == (128 // per_byte, 64)
    assert call["scale_a"][0].shape == (32, 4)
    assert call["scale_b"][0].shape == (64, 4)
    assert call["swizzle_a"] == [SwizzleType.NO_SWIZZLE]


def test_padding_adds_codes_of_zero():
    call = arguments("mxfp4", 7, 33, 96, hip=True)
    codes = call["mat_a"].view(torch.uint8)
    assert codes[:7, :48].eq(1).all()
    assert codes[7:].eq(0).all()
    assert codes[:, 48:].eq(0).all()


def test_torchs_own_checks_take_the_arguments():
    # Torch 2.13 checks MXFP8 and two-level NVFP4 rightly on fake tensors of a GPU; MXFP4 it does not (its K).
    def on_gpu(value):
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return [on_gpu(one) for one in value] if isinstance(value, list) else value

    for fmt in ("mxfp8", "nvfp4"):
        call = arguments(fmt, 128, 256, 512)
        with FakeTensorMode():
            there = {name: on_gpu(value) for name, value in call.items()}
            assert F.scaled_mm(**there).shape == (128, 256)
            wrong = torch.empty(call["mat_b"].shape, dtype=call["mat_b"].dtype, device="cuda")
            with pytest.raises(RuntimeError, match="col_major"):
                F.scaled_mm(**there | {"mat_b": wrong})


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "nvfp4"])
def test_the_call_reaches_scaled_mm_and_is_cut_back(fmt, monkeypatch):
    seen = {}

    def scaled_mm(**call):
        seen.update(call)
        return torch.ones(call["mat_a"].shape[0], call["mat_b"].shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch_scaled.F, "scaled_mm", scaled_mm)
    x, w = torch.randn(10, 96), torch.randn(5, 96)
    left, right = (BACKEND.quantize(one, Draw(policy=OperandPolicy(format=fmt)), axis=1) for one in (x, w))
    out = BACKEND.multiply(left, right)
    assert out.shape == (10, 5)
    assert out.is_contiguous()
    if fmt == "nvfp4":
        assert float(seen["scale_a"][1]) == float(left.descale)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 48, 96), (33, 47, 50), (1, 1, 1), (0, 4, 8), (4, 8, 0)])
@pytest.mark.parametrize("scale", ["tensor", "row"])
def test_fp8_of_any_shape(m, n, k, scale):
    generator = torch.Generator().manual_seed(m + n + k)
    policy = OperandPolicy(format="fp8_e4m3", scale=scale)
    other = OperandPolicy(format="fp8_e5m2", scale=scale)
    left = BACKEND.quantize(torch.randn(m, k, generator=generator), Draw(policy=policy), axis=1)
    right = BACKEND.quantize(torch.randn(n, k, generator=generator), Draw(policy=other), axis=1)
    out = BACKEND.multiply(left, right)
    a, b = (
        one.values.double() * torch.as_tensor(one.descale).double().reshape(-1, 1) for one in (left, right)
    )
    exact = a @ b.t()
    assert out.shape == (m, n)
    bound = exact.abs() * 2.0**-8 + (a.abs() @ b.abs().t()) * 2.0**-20
    assert bool(((out.double() - exact).abs() <= bound).all())


def test_a_prescale_is_refused_by_name_where_there_is_no_factor_for_it():
    policy = OperandPolicy(format="mxfp4", rounding="stochastic", prescale=0.75)
    blackwell = device_of_arch("sm_100")
    support = BACKEND.support(both(policy), blackwell)
    assert support.mode == "no"
    assert "prescale" in support.detail
    plain = dataclasses.replace(policy, prescale=1.0)
    assert BACKEND.support(both(plain), blackwell).mode == "native"
    assert load_backend("triton").support(both(policy), blackwell).mode == "native"
