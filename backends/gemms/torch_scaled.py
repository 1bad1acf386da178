"""The ``torch`` back end: ``torch.nn.functional.scaled_mm`` (cuBLASLt, hipBLASLt) on our packed operands.

Support in torch 2.13: FP8 with one scale per tensor or row on the CPU, Hopper, Blackwell B200/B300 and
gfx950; MXFP8 and MXFP4 on B200/B300 with scales in blocks of 32×4×4 (cuBLAS: block scaling factors layout)
and on gfx950 with plain rows; NVFP4 on B200/B300.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ablate.backends.protocol import Operand, Support
from ablate.backends.quantisers.packed import FP8, Packed
from ablate.backends.quantisers.packing import (
    PackedBackend,
    packing_fault,
    product_by_shape,
    quantiser_of,
)

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy

_OLDEST = (2, 10)
_NATIVE: dict[str, tuple[str, ...]] = {
    "sm_90": FP8,
    "sm_100": (*FP8, "mxfp8", "mxfp4", "nvfp4"),
    "sm_103": (*FP8, "mxfp8", "mxfp4", "nvfp4"),
    "gfx950": (*FP8, "mxfp8", "mxfp4"),
}
_ALIGNED = 16
"""cuBLASLt and hipBLASLt require dimensions divisible by 16; others are padded with zeros at the end."""
_SWIZZLED_ROWS, _SWIZZLED_COLUMNS = 128, 4


class TorchBackend(PackedBackend):
    """``F.scaled_mm`` on codes from our quantiser."""

    name = "torch"

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native as in the module's list; FP8 on the CPU is not native, for lack of an FP8 unit."""
        if fault := packing_fault(gemm):
            return Support(mode="no", detail=fault)
        if gemm.left.format.startswith("mx") and gemm.left.prescale * gemm.right.prescale != 1:
            return Support(mode="no", detail="F.scaled_mm has no factor that undoes a prescale in fp32")
        found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if found < _OLDEST:
            return Support(mode="no", detail=f"torch {torch.__version__} has no F.scaled_mm (needs 2.10)")
        formats = {gemm.left.format, gemm.right.format}
        if device.kind == "cpu":
            if formats <= set(FP8):
                return Support(mode="emulated", detail="F.scaled_mm of FP8 codes on the CPU")
            return Support(mode="no", detail=f"no F.scaled_mm for {gemm.left.format} on the CPU")
        has = _NATIVE.get(device.arch, ())
        if not formats <= set(has):
            other = f"has {', '.join(has)}" if has else "an architecture without FP8 here"
            return Support(
                mode="no", detail=f"no F.scaled_mm for {gemm.left.format} on {device.arch} ({other})"
            )
        quantisers = sorted({quantiser_of(gemm.left), quantiser_of(gemm.right)})
        return Support(mode="native", detail=f"F.scaled_mm, quantised by {' and '.join(quantisers)}")

    def detail(self) -> str:
        """Return one line for the run's record."""
        return f"torch {torch.__version__}"

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply packed operands."""
        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        if a.format in FP8:
            out: Tensor = fp8_gemm(a.codes, _fp32(a), b.codes, _fp32(b), a.format, b.format)
            return out
        assert a.scales is not None
        assert b.scales is not None
        two_level = a.format == "nvfp4"
        descales = (_fp32(a), _fp32(b)) if two_level else (None, None)
        out = mx_gemm(a.codes, a.scales, b.codes, b.scales, a.format, *descales)
        return out  # noqa: RET504  gives torch's untyped result its type


def _fp32(operand: Packed) -> Tensor:
    descale = operand.descale
    if isinstance(descale, Tensor):
        return descale
    return torch.full((1,), descale, dtype=torch.float32, device=operand.codes.device)


def swizzled(scales: Tensor) -> Tensor:
    """Arrange scale bytes [n, blocks] in cuBLAS's layout: tiles of 128 rows × 4 columns, flat.

    Within a tile the byte of (row, column) lies at (row % 32) × 16 + (row // 32) × 4 + column. Tiles follow
    row by row; the edges are padded with 0 (cuBLAS documentation, 1D block scaling factors layout).
    """
    n, blocks = scales.shape
    down, across = -(-n // _SWIZZLED_ROWS), -(-blocks // _SWIZZLED_COLUMNS)
    padded = _padded(scales, down * _SWIZZLED_ROWS, across * _SWIZZLED_COLUMNS)
    tiles = padded.view(down, 4, 32, across, _SWIZZLED_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad with zeros after the last row and column; zero codes add nothing to a product."""
    missing = (0, columns - x.shape[1], 0, rows - x.shape[0])
    return F.pad(x, missing) if any(missing) else x.contiguous()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@torch.library.custom_op("ablate::fp8_gemm", mutates_args=())
def fp8_gemm(
    a: Tensor, a_descale: Tensor, b: Tensor, b_descale: Tensor, a_format: str, b_format: str
) -> Tensor:
    """Return A Bᵀ [M, N] bf16 for FP8 codes [M, K], [N, K] and descales, fp32 [1], or [M] and [N]."""
    from torch.nn.functional import ScalingType

    (m, k), n = a.shape, b.shape[0]
    if not m * n * k:
        return a.new_zeros(m, n, dtype=torch.bfloat16)
    by_row = a_descale.numel() > 1 or b_descale.numel() > 1
    k_up, n_up = _up(k, _ALIGNED), _up(n, _ALIGNED)
    left, right = _padded(a, m, k_up), _padded(b, n_up, k_up)
    if by_row:
        a_scale = a_descale.expand(m).reshape(m, 1).contiguous()
        b_scale = F.pad(b_descale.expand(n), (0, n_up - n)).reshape(1, n_up).contiguous()
    else:
        a_scale, b_scale = a_descale.reshape(1), b_descale.reshape(1)
    recipe = ScalingType.RowWise if by_row else ScalingType.TensorWise
    out = F.scaled_mm(
        left.view(_FP8_DTYPES[a_format]), right.view(_FP8_DTYPES[b_format]).t(),
        a_scale, recipe, b_scale, recipe, output_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip
    return out[:, :n].contiguous()


fp8_gemm.register_fake(product_by_shape)


@torch.library.custom_op("ablate::mx_gemm", mutates_args=())
def mx_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    fmt: str,
    a_descale: Tensor | None,
    b_descale: Tensor | None,
) -> Tensor:
    """Return A Bᵀ [M, N] bf16 for MXFP4, MXFP8 or NVFP4 codes and scale bytes; descales are NVFP4's."""
    call = scaled_mm_arguments(
        a, a_scales, b, b_scales, fmt, a_descale, b_descale, hip=bool(torch.version.hip)
    )
    if not a.shape[0] * b.shape[0] * a.shape[1]:
        return a.new_zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    out = F.scaled_mm(**call)
    return out[: a.shape[0], : b.shape[0]].contiguous()


mx_gemm.register_fake(product_by_shape)


def scaled_mm_arguments(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    fmt: str,
    a_descale: Tensor | None,
    b_descale: Tensor | None,
    *,
    hip: bool,
) -> dict[str, Any]:
    """Return the arguments of ``F.scaled_mm`` for packed operands: only shapes and layouts, no launch."""
    from torch.nn.functional import ScalingType, SwizzleType

    per_byte = 1 if fmt == "mxfp8" else 2
    block = 16 if fmt == "nvfp4" else 32
    k = a.shape[1] * per_byte
    # hipBLASLt requires tiles of 32 rows and 64 along K; cuBLASLt 16 columns of the output.
    m_up = _up(a.shape[0], 32) if hip else a.shape[0]
    n_up = _up(b.shape[0], 32 if hip else _ALIGNED)
    k_up = _up(k, 64 if hip else 32)
    dtype = torch.float8_e4m3fn if fmt == "mxfp8" else torch.float4_e2m1fn_x2
    scale_dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
    left, right = _padded(a, m_up, k_up // per_byte), _padded(b, n_up, k_up // per_byte)
    scales = [_padded(a_scales, m_up, k_up // block), _padded(b_scales, n_up, k_up // block)]
    if not hip:
        scales = [swizzled(one) for one in scales]
    recipe = [ScalingType.BlockWise1x16 if fmt == "nvfp4" else ScalingType.BlockWise1x32]
    swizzle = [SwizzleType.NO_SWIZZLE if hip else SwizzleType.SWIZZLE_32_4_4]
    scale_a, scale_b = ([one.view(scale_dtype)] for one in scales)
    if a_descale is not None and b_descale is not None:
        recipe, swizzle = [*recipe, ScalingType.TensorWise], [*swizzle, SwizzleType.NO_SWIZZLE]
        scale_a, scale_b = [*scale_a, a_descale.reshape(1)], [*scale_b, b_descale.reshape(1)]
    return {
        "mat_a": left.view(dtype), "mat_b": right.view(dtype).t(),
        "scale_a": scale_a, "scale_recipe_a": recipe, "swizzle_a": swizzle,
        "scale_b": scale_b, "scale_recipe_b": recipe, "swizzle_b": swizzle,
        "output_dtype": torch.bfloat16,
    }  # fmt: skip
