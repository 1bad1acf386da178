"""The back ends with a native GEMM on packed operands: ``torch`` and ``triton``.

``torch`` is ``torch.nn.functional.scaled_mm`` (cuBLASLt, hipBLASLt). Support in torch 2.13: FP8 with one
scale per tensor or row on the CPU, Hopper, Blackwell B200/B300 and gfx950; MXFP8 and MXFP4 on B200/B300 with
scales in blocks of 32×4×4 (cuBLAS: block scaling factors layout) and on gfx950 with plain rows; NVFP4 on
B200/B300. On RTX 50: FP8 per tensor (per row fails, pytorch#192707), MXFP8 and NVFP4 where both operands have
the contraction last, as here (pytorch#198126).

``triton`` is our own GEMM by ``tl.dot_scaled``, native on Blackwell and MI355X. On Hopper it widens codes to
bf16 before it multiplies (*upcast*). Its results equal those of hardware with FP4 units except for how
products are added; its speed does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ablate.backends.device import (
    OLDEST_TO_INTERPRET,
    OLDEST_TO_WIDEN_NVFP4,
    interpreting,
    release,
    triton_fault,
    triton_version,
)
from ablate.backends.packed import Packed, PackedBackend, packing_fault, quantisers_of
from ablate.backends.protocol import Mode, Operand, Support
from ablate.backends.triton.policies import BLOCK, FP8, TILES

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy

_OLDEST = (2, 10)
_OLDEST_ON_CPU = (2, 13)
_NATIVE: dict[str, tuple[str, ...]] = {
    "cpu": FP8,
    "sm_90": FP8,
    "sm_100": (*FP8, "mxfp8", "mxfp4", "nvfp4"),
    "sm_103": (*FP8, "mxfp8", "mxfp4", "nvfp4"),
    "sm_120": (*FP8, "mxfp8", "nvfp4"),
    "gfx950": (*FP8, "mxfp8", "mxfp4"),
}
"""What ``F.scaled_mm`` takes; on gfx942 nothing: its FP8 formats are FNUZ, with other codes and values."""
_NOT_BY_ROW = ("sm_120",)
_ALIGNED = 16
"""cuBLASLt and hipBLASLt require dimensions divisible by 16; others are padded with zeros at the end."""


class TritonBackend(PackedBackend):
    """Codes from the quantise kernel, products by ``tl.dot_scaled``."""

    name = "triton"

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native if the tile table has the architecture and format; upcast on Hopper, emulated on a CPU."""
        fault = triton_fault() or packing_fault(gemm)
        fault = fault or _triton_fault(gemm.left.format, device)
        if fault is not None:
            return Support(mode="no", detail=fault)
        if device.kind == "cpu":
            return Support(mode="emulated", detail="Triton's interpreter")
        mode: Mode = "upcast" if device.arch == "sm_90" else "native"
        detail = f"tl.dot_scaled, quantised by {quantisers_of(gemm)}"
        return Support(mode=mode, detail=detail)

    def detail(self) -> str:
        """Name Triton's version for the run's record, or say why its kernels cannot run."""
        installed = triton_version()
        if installed:
            return f"Triton {'.'.join(map(str, installed))}"
        return str(triton_fault())

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply packed operands of one format."""
        from ablate.backends.triton.gemm import launch_gemm

        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        return launch_gemm(a, b)


def _triton_fault(fmt: str, device: Device) -> str | None:
    if fmt not in BLOCK:
        return f"no tl.dot_scaled for {fmt} with scales in fp32"
    if device.kind == "cpu":
        if not interpreting():
            return "needs a GPU"
        if (triton_version() or ()) < OLDEST_TO_INTERPRET:
            return "tl.dot_scaled is interpreted from Triton 3.8 on"
        if fmt == "nvfp4":
            return "Triton's interpreter reads E4M3 scales as E8M0"
        return None
    if (device.arch, fmt) not in TILES:
        known = sorted({arch for arch, with_fmt in TILES if with_fmt == fmt})
        return f"no {fmt} tiles for {device.arch} (has {', '.join(known)})"
    is_old = (triton_version() or ()) < OLDEST_TO_WIDEN_NVFP4
    if (device.arch, fmt) == ("sm_90", "nvfp4") and is_old:
        return "NVFP4 is widened from Triton 3.8 on"
    return None


class TorchBackend(PackedBackend):
    """``F.scaled_mm`` on codes from our quantiser."""

    name = "torch"

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native as in the module's list; FP8 on the CPU is not native, for lack of an FP8 unit."""
        fault = packing_fault(gemm) or _torch_fault(gemm, device)
        if fault is not None:
            return Support(mode="no", detail=fault)
        if device.kind == "cpu":
            detail = "F.scaled_mm of FP8 codes on the CPU"
            return Support(mode="emulated", detail=detail)
        detail = f"F.scaled_mm, quantised by {quantisers_of(gemm)}"
        return Support(mode="native", detail=detail)

    def detail(self) -> str:
        """Name torch's version for the run's record."""
        return f"torch {torch.__version__}"

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply packed operands; pad them where the library needs it."""
        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        m, k = a.shape
        n = b.shape[0]
        if not m * n * k:
            return a.codes.new_zeros(m, n, dtype=torch.bfloat16)
        call = scaled_mm_arguments(a, b, hip=bool(torch.version.hip))
        return F.scaled_mm(**call)[:m, :n].contiguous()


def _torch_fault(gemm: GemmPolicy, device: Device) -> str | None:
    left = gemm.left
    right = gemm.right
    native = _NATIVE.get(device.arch, ())
    if left.format.startswith("mx") and left.prescale * right.prescale != 1:
        return "F.scaled_mm has no factor that undoes a prescale in fp32"
    oldest = _OLDEST_ON_CPU if device.kind == "cpu" else _OLDEST
    if release(torch.__version__) < oldest:
        needs = ".".join(map(str, oldest))
        return f"torch {torch.__version__} has no F.scaled_mm on {device.arch} (needs {needs})"
    if left.format not in native or right.format not in native:
        listed = ", ".join(native) or "none of ours"
        return f"no F.scaled_mm for {left.format} on {device.arch} (has {listed})"
    if left.scale == "row" and device.arch in _NOT_BY_ROW:
        return f"no F.scaled_mm for FP8 with a scale per row on {device.arch}"
    return None


def swizzled(scales: Tensor) -> Tensor:
    """Arrange scale bytes [n, blocks] in cuBLAS's layout: tiles of 128 rows × 4 columns, flat.

    Within a tile the byte of (row, column) is at (row % 32) × 16 + (row // 32) × 4 + column. Tiles follow
    row by row; the edges are padded with 0 (cuBLAS documentation, 1D block scaling factors layout).
    """
    padded = _padded(scales, -len(scales) % 128, -scales.shape[1] % 4)
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad with so many rows and columns of zeros at the end; zero codes add nothing to a product."""
    if rows or columns:
        return F.pad(x, (0, columns, 0, rows))
    return x.contiguous()


_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "mxfp8": torch.float8_e4m3fn,
    "mxfp4": torch.float4_e2m1fn_x2,
    "nvfp4": torch.float4_e2m1fn_x2,
}


def scaled_mm_arguments(a: Packed, b: Packed, *, hip: bool) -> dict[str, Any]:
    """Prepare the arguments of ``F.scaled_mm`` for packed operands: pad and lay them out, do not call it."""
    is_by_row = any(side.descale_on_device.numel() > 1 for side in (a, b))
    # hipBLASLt requires tiles of 32 rows and 64 along K.
    is_tiled = hip and a.format in BLOCK
    call: dict[str, Any] = {"output_dtype": torch.bfloat16}
    for name, side in (("a", a), ("b", b)):
        n, k = side.shape
        if is_tiled:
            rows = -n % 32
            columns = -k % 64
        else:
            rows = -n % _ALIGNED if name == "b" else 0
            columns = -k % (32 if a.format in BLOCK else _ALIGNED)
        per_code = k // side.codes.shape[1]
        codes = _padded(side.codes, rows, columns // per_code).view(
            _DTYPES[side.format]
        )
        call[f"mat_{name}"] = codes if name == "a" else codes.t()
        scalings = _scalings(
            side, rows, columns, is_by_row=is_by_row, is_left=name == "a", hip=hip
        )
        call[f"scale_{name}"] = [scaling[0] for scaling in scalings]
        call[f"scale_recipe_{name}"] = [scaling[1] for scaling in scalings]
        call[f"swizzle_{name}"] = [scaling[2] for scaling in scalings]
    return call


def _scalings(
    side: Packed,
    rows: int,
    columns: int,
    *,
    is_by_row: bool,
    is_left: bool,
    hip: bool,
) -> list[tuple[Tensor, Any, Any]]:
    """Return the scales of an operand that is padded by so many rows and columns, each with its layout."""
    plain = F.SwizzleType.NO_SWIZZLE
    descale = side.descale_on_device
    if side.scales is None:
        if not is_by_row:
            return [(descale, F.ScalingType.TensorWise, plain)]
        of_rows = F.pad(descale.expand(side.shape[0]), (0, rows)).contiguous()
        of_rows = of_rows[:, None] if is_left else of_rows[None]
        return [(of_rows, F.ScalingType.RowWise, plain)]
    scales = _padded(side.scales, rows, columns // BLOCK[side.format])
    order = plain
    if not hip:
        scales = swizzled(scales)
        order = F.SwizzleType.SWIZZLE_32_4_4
    if side.format != "nvfp4":
        return [(scales.view(torch.float8_e8m0fnu), F.ScalingType.BlockWise1x32, order)]
    of_blocks = scales.view(torch.float8_e4m3fn)
    return [
        (of_blocks, F.ScalingType.BlockWise1x16, order),
        (descale, F.ScalingType.TensorWise, plain),
    ]
