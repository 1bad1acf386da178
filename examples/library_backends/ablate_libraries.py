"""Back ends over the GEMMs of libraries: QuTLASS and quack (Blackwell), Primus-Turbo and AITER (gfx950).

A library is imported on first use. Only its GEMM is used: the quantiser of ablate stands before it. The calls
follow the libraries' public tests and are checked against stand-ins; nobody has run them through ablate yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ablate.backends.packed import Packed, PackedBackend, packing_fault, quantisers_of
from ablate.backends.protocol import Operand, Support
from ablate.backends.scaled import swizzled

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.recipes import GemmPolicy


class _LibraryBackend(PackedBackend):
    module: ClassVar[str]
    install: ClassVar[str]
    archs: ClassVar[tuple[str, ...]]
    formats: ClassVar[tuple[str, ...]] = ("mxfp4",)
    has_alpha: ClassVar[bool] = False

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native on the library's architectures where it is installed."""
        if device.arch not in self.archs:
            return Support(
                mode="no", detail=f"{self.module} is for {', '.join(self.archs)}"
            )
        if fault := packing_fault(gemm):
            return Support(mode="no", detail=fault)
        if gemm.left.format not in self.formats:
            return Support(
                mode="no", detail=f"{self.module} has no GEMM for {gemm.left.format}"
            )
        if not self.has_alpha and gemm.left.prescale * gemm.right.prescale != 1:
            return Support(
                mode="no",
                detail=f"{self.module}'s GEMM has no factor that undoes a prescale",
            )
        if importlib.util.find_spec(self.module) is None:
            return Support(
                mode="no", detail=f"{self.module} is not installed ({self.install})"
            )
        return Support(
            mode="native", detail=f"{self.detail()}, quantised by {quantisers_of(gemm)}"
        )

    def detail(self) -> str:
        """Return one line for the run's record."""
        try:
            return f"{self.module} {version(self.module.replace('_', '-'))}"
        except PackageNotFoundError:
            return self.module

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """Multiply packed operands."""
        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        assert a.scales is not None
        assert b.scales is not None
        m, n = a.shape[0], b.shape[0]
        if not m * n * a.shape[1]:
            return a.codes.new_zeros(m, n, dtype=torch.bfloat16)
        alpha = torch.as_tensor(
            a.descale * b.descale, dtype=torch.float32, device=a.codes.device
        ).reshape(1)
        return self.gemm(a.codes, a.scales, b.codes, b.scales, alpha, a.format)[
            :m, :n
        ].contiguous()

    @abstractmethod
    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Call the library: codes [M, K / 2] and [N, K / 2], scale bytes by rows → at least [M, N] bf16."""


class QutlassBackend(_LibraryBackend):
    """QuTLASS: ``matmul_mxf4_bf16_tn`` and ``matmul_nvf4_bf16_tn``, with a factor for the accumulator."""

    name = "qutlass"
    module = "qutlass"
    install = "see github.com/IST-DASLab/qutlass"
    archs = ("sm_100", "sm_120")
    formats = ("mxfp4", "nvfp4")
    has_alpha = True

    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Scales in cuBLAS's blocked layout."""
        library = importlib.import_module(self.module)
        call = (
            library.matmul_nvf4_bf16_tn
            if fmt == "nvfp4"
            else library.matmul_mxf4_bf16_tn
        )
        dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
        out: Tensor = call(
            a, b, swizzled(a_scales).view(dtype), swizzled(b_scales).view(dtype), alpha
        )
        return out


class QuackBackend(_LibraryBackend):
    """quack: block-scaled GEMMs in CuTe, with a factor for the accumulator; for capability 10.x."""

    name = "quack"
    module = "quack"
    install = "see github.com/Dao-AILab/quack"
    archs = ("sm_100", "sm_103")
    formats = ("mxfp4", "nvfp4")
    has_alpha = True

    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Scales in cuBLAS's blocked layout, as tiles of [32, 4, 4]; rows of 16 bytes."""
        operand = importlib.import_module(f"{self.module}.blockscaled.operand")
        interface = importlib.import_module(f"{self.module}.gemm_interface")
        block = 16 if fmt == "nvfp4" else 32
        dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
        a, a_scales, b, b_scales = _filled(
            a, a_scales, b, b_scales, rows=16, k=128, block=block
        )

        def wrapped(codes: Tensor, scales: Tensor) -> Any:
            tiles = swizzled(scales).view(-(-len(scales) // 128), -1, 32, 4, 4)
            return operand.BlockScaledOperand.from_parts(
                codes.view(torch.float4_e2m1fn_x2), tiles.view(dtype), fmt
            )

        right = wrapped(b, b_scales).mT
        out: Tensor = interface.gemm(
            wrapped(a, a_scales),
            right,
            alpha=alpha,
            out_dtype=torch.bfloat16,
            tuned=False,
        )
        return out


class PrimusTurboBackend(_LibraryBackend):
    """Primus-Turbo: hipBLASLt's MXFP4 GEMM; the recipe of its own linear layer is not used."""

    name = "primus_turbo"
    module = "primus_turbo"
    install = "see github.com/AMD-AGI/Primus-Turbo"
    archs = ("gfx950",)

    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Plain rows of scales; dimensions are filled up with zeros to what hipBLASLt takes."""
        del alpha, fmt  # ``support`` refuses a factor; MXFP4 is all there is
        importlib.import_module(f"{self.module}.pytorch")
        a, a_scales, b, b_scales = _filled(a, a_scales, b, b_scales, rows=16, k=128)
        call: Any = torch.ops.primus_turbo_cpp_extension.hipblaslt_gemm_fp4
        out: Tensor = call(
            a.view(torch.float4_e2m1fn_x2), a_scales.view(torch.float8_e8m0fnu),
            b.view(torch.float4_e2m1fn_x2), b_scales.view(torch.float8_e8m0fnu),
            torch.bfloat16, False, True, False, "MX_BLOCKWISE",
        )  # fmt: skip
        return out


class PrimusTurboFlydslBackend(PrimusTurboBackend):
    """Primus-Turbo's second MXFP4 GEMM, written in FlyDSL; its third is AITER's."""

    name = "primus_turbo_flydsl"

    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Plain rows of scales; M, N and K are filled up with zeros to multiples of 256."""
        del alpha, fmt
        call = importlib.import_module(
            f"{self.module}.flydsl.gemm.gemm_mxfp4_kernel"
        ).gemm_mxfp4_flydsl_kernel
        a, a_scales, b, b_scales = _filled(a, a_scales, b, b_scales, rows=256, k=256)
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
        out: Tensor = call(
            a, a_scales.view(torch.float8_e8m0fnu), b, b_scales.view(torch.float8_e8m0fnu),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
        return out


class AiterBackend(_LibraryBackend):
    """AITER: ``gemm_a4w4`` over operands in its own shuffled layout."""

    name = "aiter"
    module = "aiter"
    install = "see github.com/ROCm/aiter"
    archs = ("gfx950",)

    def gemm(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        alpha: Tensor,
        fmt: str,
    ) -> Tensor:
        """Its ``bpreshuffle`` path: both scales and the right codes shuffled by its own functions."""
        del alpha, fmt
        library = importlib.import_module(self.module)
        shuffle_weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight
        e8m0_shuffle = importlib.import_module("aiter.utility.fp4_utils").e8m0_shuffle
        a, a_scales, b, b_scales = _filled(a, a_scales, b, b_scales, rows=32, k=256)
        out: Tensor = library.gemm_a4w4(
            a.view(library.dtypes.fp4x2),
            shuffle_weight(b, layout=(16, 16)).view(library.dtypes.fp4x2),
            e8m0_shuffle(a_scales).view(library.dtypes.fp8_e8m0),
            e8m0_shuffle(b_scales).view(library.dtypes.fp8_e8m0),
            dtype=torch.bfloat16,
            bpreshuffle=True,
        )
        return out


def _filled(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    *,
    rows: int,
    k: int,
    block: int = 32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put zeros after the last row and element, up to multiples of ``rows`` and ``k`` elements.

    ``block``: the elements of a scale.
    """

    def fill(x: Tensor, multiple: int) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % multiple, 0, -x.shape[0] % rows))

    return (
        fill(a, k // 2),
        fill(a_scales, k // block),
        fill(b, k // 2),
        fill(b_scales, k // block),
    )
