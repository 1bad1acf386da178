"""The ``triton`` back end: our quantise kernel and a ``tl.dot_scaled`` GEMM, native on Blackwell and MI355X.

On Hopper the same GEMM widens codes to bf16 before it multiplies (*upcast*). Its results equal those of
hardware with FP4 units except for how products are added; its speed does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.backends.device import (
    OLDEST_TO_INTERPRET,
    OLDEST_TO_WIDEN_NVFP4,
    interpreting,
    triton_fault,
    triton_version,
)
from ablate.backends.packed import Packed
from ablate.backends.packing import PackedBackend, packing_fault, quantisers_of
from ablate.backends.protocol import Mode, Operand, Support
from ablate.backends.triton.policies import BLOCK, TILES

if TYPE_CHECKING:
    from torch import Tensor

    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy


class TritonBackend(PackedBackend):
    """Codes from the quantise kernel, products by ``tl.dot_scaled``."""

    name = "triton"

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native if the tile table has the architecture and format; upcast on Hopper."""
        if fault := triton_fault() or packing_fault(gemm):
            return Support(mode="no", detail=fault)
        fmt = gemm.left.format
        if fmt not in BLOCK:
            return Support(mode="no", detail=f"no tl.dot_scaled for {fmt} with scales in fp32")
        found = triton_version() or ()
        if device.kind == "cpu":
            if not interpreting():
                return Support(mode="no", detail="needs a GPU")
            if found < OLDEST_TO_INTERPRET:
                return Support(mode="no", detail="tl.dot_scaled is interpreted from Triton 3.8 on")
            if fmt == "nvfp4":
                return Support(mode="no", detail="Triton's interpreter reads E4M3 scales as E8M0")
            return Support(mode="emulated", detail="Triton's interpreter")
        if (device.arch, fmt) not in TILES:
            known = sorted({arch for arch, with_fmt in TILES if with_fmt == fmt})
            return Support(mode="no", detail=f"no {fmt} tiles for {device.arch} (has {', '.join(known)})")
        if device.arch == "sm_90" and fmt == "nvfp4" and found < OLDEST_TO_WIDEN_NVFP4:
            return Support(mode="no", detail="NVFP4 is widened from Triton 3.8 on")
        mode: Mode = "upcast" if device.arch == "sm_90" else "native"
        return Support(mode=mode, detail=f"tl.dot_scaled, quantised by {quantisers_of(gemm)}")

    def detail(self) -> str:
        """Return one line for the run's record."""
        found = triton_version()
        return f"Triton {'.'.join(map(str, found))}" if found else str(triton_fault())

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply packed operands of one format."""
        from ablate.backends.triton.gemm import launch_gemm

        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        return launch_gemm(a, b)
