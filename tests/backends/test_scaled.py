"""``F.scaled_mm`` where it runs (FP8 on the CPU), and its arguments where it does not."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import SwizzleType
from torch.utils._pytree import tree_map_only

from ablate.backends.device import device_of_arch
from ablate.backends.packed import Packed
from ablate.backends.protocol import Draw, dequantised
from ablate.backends.scaled import scaled_mm_arguments, swizzled
from ablate.backends.select import load_backend
from ablate.backends.testing.inputs import label, policies_of
from ablate.backends.testing.suite import both, quantised_bits
from ablate.recipes import OperandPolicy
from tests.golden import rows_of
from tests.numerics.strategies import normal

BACKEND = load_backend("torch")


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (33, 9)])
def test_the_swizzle_is_cublas_definition(shape):
    scales = torch.arange(shape[0] * shape[1]).remainder(251).to(torch.uint8)
    scales = scales.view(shape)
    tiles_across = -(-shape[1] // 4)
    out = torch.zeros(-(-shape[0] // 128) * tiles_across * 512, dtype=torch.uint8)
    for row, column in itertools.product(*map(range, shape)):
        tile = row // 128 * tiles_across + column // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        out[place] = scales[row, column]
    assert torch.equal(swizzled(scales), out)


def arguments(fmt, m, n, k, *, hip=False):
    per_byte = 1 if fmt == "mxfp8" else 2
    block = 16 if fmt == "nvfp4" else 32
    sides = (
        Packed(
            format=fmt, codes=torch.ones(rows, k // per_byte, dtype=torch.uint8),
            scales=torch.full((rows, k // block), 120, dtype=torch.uint8), descale=0.5, axis=1,
        )
        for rows in (m, n)
    )  # fmt: skip
    return scaled_mm_arguments(*sides, hip=hip)


@pytest.mark.parametrize(
    ("version", "arch", "mode", "why"),
    rows_of("""
2.9.1        | sm_90 | no       | torch 2.9.1 has no F.scaled_mm on sm_90 (needs 2.10)
2.11.0+cu130 | sm_90 | native   | F.scaled_mm, quantised by
2.11.0       | cpu   | no       | torch 2.11.0 has no F.scaled_mm on cpu (needs 2.13)
2.13.0+cpu   | cpu   | emulated | F.scaled_mm of FP8 codes on the CPU
"""),
)
def test_an_older_torch_is_refused_where_it_has_no_scaled_mm(
    monkeypatch, version, arch, mode, why
):
    monkeypatch.setattr(torch, "__version__", version)
    support = BACKEND.support(
        both(OperandPolicy(format="fp8_e4m3")), device_of_arch(arch)
    )
    assert (support.mode, support.detail[: len(why)]) == (mode, why)


@pytest.mark.parametrize(("fmt", "per_byte"), [("mxfp4", 2), ("mxfp8", 1)])
def test_arguments_on_gfx950(fmt, per_byte):
    call = arguments(fmt, 7, 33, 96, hip=True)
    codes = call["mat_a"].view(torch.uint8)
    assert codes.shape == (32, 128 // per_byte)  # whole tiles: M and N by 32, K by 64
    assert call["mat_b"].shape == (128 // per_byte, 64)
    assert [call[name][0].shape for name in ("scale_a", "scale_b")] == [
        (32, 4),
        (64, 4),
    ]
    assert call["swizzle_a"] == [SwizzleType.NO_SWIZZLE]
    assert codes[:7, : 96 // per_byte].eq(1).all()
    assert int(codes.sum()) == 7 * 96 // per_byte  # padding adds codes of zero


@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 512), (7, 33, 96), (300, 17, 160)]
)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "nvfp4"])
def test_torchs_own_checks_take_the_arguments_on_blackwell(fmt, m, n, k):
    call = arguments(fmt, m, n, k)
    # Torch checks types, recipes and the number of scales before it asks what the device can do.
    with pytest.raises(ValueError, match="CPU does not support swizzle"):
        F.scaled_mm(**call)
    short = [scale[:-1] if scale.numel() > 1 else scale for scale in call["scale_b"]]
    with pytest.raises(ValueError, match="scale_b should have"):
        F.scaled_mm(**call | {"scale_b": short})
    # Without data it checks the shapes. It checks strides on a GPU alone.
    shapes = tree_map_only(
        torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), call
    )
    assert F.scaled_mm(**shapes).shape == (m, -(-n // 16) * 16)
    assert call["scale_a"][1:] == ([0.5] if fmt == "nvfp4" else [])
    assert call["mat_a"].is_contiguous()
    assert call["mat_b"].t().is_contiguous()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 48, 96), (33, 47, 50), (1, 1, 1), (0, 4, 8), (4, 8, 0)]
)
@pytest.mark.parametrize("scale", ["tensor", "row"])
def test_fp8_of_any_shape(m, n, k, scale):
    sides = []
    for rows, fmt in ((m, "fp8_e4m3"), (n, "fp8_e5m2")):
        draw = Draw(policy=OperandPolicy(format=fmt, scale=scale))
        sides.append(BACKEND.quantize(normal(rows, k, seed=rows), draw, axis=1))
    out = BACKEND.multiply(*sides)
    a, b = (dequantised(side).double() for side in sides)
    exact = a @ b.t()
    assert (out.shape, out.is_contiguous()) == ((m, n), True)
    bound = exact.abs() * 2.0**-8 + (a.abs() @ b.abs().t()) * 2.0**-20
    assert bool(((out.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    "policy",
    policies_of(
        "mxfp4 quest H32 mask\nmxfp4 stochastic 0.75\nmxfp8 32x32\nnvfp4 four_six\nfp8_e5m2\nfp8_e4m3 row"
    ),
    ids=label,
)
def test_what_is_packed_in_plain_torch_has_the_references_bits_and_mask_along_both_axes(
    policy,
):
    assert quantised_bits(BACKEND, "cpu", policy)
