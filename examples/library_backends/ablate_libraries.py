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

_FP4 = torch.float4_e2m1fn_x2
_SCALE = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


class _LibraryBackend(PackedBackend):
    module: ClassVar[str]
    home: ClassVar[str]
    archs: ClassVar[tuple[str, ...]]
    formats: ClassVar[tuple[str, ...]] = ("mxfp4",)
    has_alpha: ClassVar[bool] = False

    def support(self, gemm: GemmPolicy, device: Device) -> Support:
        """Native on the library's architectures where it is installed."""
        fault = self._fault(gemm, device)
        if fault is not None:
            return Support(mode="no", detail=fault)
        detail = f"{self.detail()}, quantised by {quantisers_of(gemm)}"
        return Support(mode="native", detail=detail)

    def _fault(self, gemm: GemmPolicy, device: Device) -> str | None:
        fmt = gemm.left.format
        if device.arch not in self.archs:
            return f"{self.module} is for {', '.join(self.archs)}"
        if fault := packing_fault(gemm):
            return fault
        if fmt not in self.formats:
            return f"{self.module} has no GEMM for {fmt}"
        if not self.has_alpha and gemm.left.prescale * gemm.right.prescale != 1:
            return f"{self.module}'s GEMM has no factor that undoes a prescale"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed (see github.com/{self.home})"
        return None

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
        m, k = a.shape
        n = b.shape[0]
        if not m * n * k:
            return a.codes.new_zeros(m, n, dtype=torch.bfloat16)
        alpha = torch.as_tensor(
            a.descale * b.descale, dtype=torch.float32, device=a.codes.device
        )
        return self.gemm(a, b, alpha.reshape(1))[:m, :n].contiguous()

    @abstractmethod
    def gemm(self, a: Packed, b: Packed, alpha: Tensor) -> Tensor:
        """Call the library: codes [M, K / 2] and [N, K / 2], scale bytes by rows → at least [M, N] bf16."""


class QutlassBackend(_LibraryBackend):
    """QuTLASS: ``matmul_mxf4_bf16_tn`` and ``matmul_nvf4_bf16_tn``, with a factor for the accumulator."""

    name = "qutlass"
    module = "qutlass"
    home = "IST-DASLab/qutlass"
    archs = ("sm_100", "sm_120")
    formats = ("mxfp4", "nvfp4")
    has_alpha = True

    def gemm(self, a: Packed, b: Packed, alpha: Tensor) -> Tensor:
        """Scales in cuBLAS's blocked layout."""
        library = importlib.import_module(self.module)
        call: Any = library.matmul_mxf4_bf16_tn
        if a.format == "nvfp4":
            call = library.matmul_nvf4_bf16_tn
        scales = [swizzled(operand.scales).view(_SCALE[a.format]) for operand in (a, b)]
        return call(a.codes, b.codes, *scales, alpha)


class QuackBackend(_LibraryBackend):
    """quack: block-scaled GEMMs in CuTe, with a factor for the accumulator; for capability 10.x."""

    name = "quack"
    module = "quack"
    home = "Dao-AILab/quack"
    archs = ("sm_100", "sm_103")
    formats = ("mxfp4", "nvfp4")
    has_alpha = True

    def gemm(self, a: Packed, b: Packed, alpha: Tensor) -> Tensor:
        """Scales in cuBLAS's blocked layout, as tiles of [32, 4, 4]; rows of 16 bytes."""
        operand = importlib.import_module("quack.blockscaled.operand")
        interface = importlib.import_module("quack.gemm_interface")
        sides = []
        for packed in (a, b):
            codes, scales = _filled(packed, rows=16, k=128)
            tiles = swizzled(scales).view(-(-len(scales) // 128), -1, 32, 4, 4)
            sides.append(
                operand.BlockScaledOperand.from_parts(
                    codes.view(_FP4), tiles.view(_SCALE[a.format]), a.format
                )
            )
        left, right = sides
        return interface.gemm(
            left, right.mT, alpha=alpha, out_dtype=torch.bfloat16, tuned=False
        )


class PrimusTurboBackend(_LibraryBackend):
    """Primus-Turbo: hipBLASLt's MXFP4 GEMM; the recipe of its own linear layer is not used."""

    name = "primus_turbo"
    module = "primus_turbo"
    home = "AMD-AGI/Primus-Turbo"
    archs = ("gfx950",)

    def gemm(self, a: Packed, b: Packed, _alpha: Tensor) -> Tensor:
        """Plain rows of scales; dimensions are filled up with zeros to what hipBLASLt takes."""
        importlib.import_module("primus_turbo.pytorch")
        call = torch.ops.primus_turbo_cpp_extension.hipblaslt_gemm_fp4
        operands = (*_typed(a, rows=16, k=128), *_typed(b, rows=16, k=128))
        return call(*operands, torch.bfloat16, False, True, False, "MX_BLOCKWISE")


class PrimusTurboFlydslBackend(PrimusTurboBackend):
    """Primus-Turbo's second MXFP4 GEMM, written in FlyDSL; its third is AITER's."""

    name = "primus_turbo_flydsl"

    def gemm(self, a: Packed, b: Packed, _alpha: Tensor) -> Tensor:
        """Plain rows of scales; M, N and K are filled up with zeros to multiples of 256."""
        place = "primus_turbo.flydsl.gemm.gemm_mxfp4_kernel"
        call = importlib.import_module(place).gemm_mxfp4_flydsl_kernel
        left, left_scales = _typed(a, rows=256, k=256)
        right, right_scales = _typed(b, rows=256, k=256)
        return call(left, left_scales, right, right_scales, out_dtype=torch.bfloat16)


class AiterBackend(_LibraryBackend):
    """AITER: ``gemm_a4w4`` over operands in its own shuffled layout."""

    name = "aiter"
    module = "aiter"
    home = "ROCm/aiter"
    archs = ("gfx950",)

    def gemm(self, a: Packed, b: Packed, _alpha: Tensor) -> Tensor:
        """Its ``bpreshuffle`` path: both scales and the right codes shuffled by its own functions."""
        library = importlib.import_module("aiter")
        weights = importlib.import_module("aiter.ops.shuffle")
        utils = importlib.import_module("aiter.utility.fp4_utils")
        codes = library.dtypes.fp4x2
        scales = library.dtypes.fp8_e8m0
        left, left_scales = _filled(a, rows=32, k=256)
        right, right_scales = _filled(b, rows=32, k=256)
        return library.gemm_a4w4(
            left.view(codes),
            weights.shuffle_weight(right, layout=(16, 16)).view(codes),
            utils.e8m0_shuffle(left_scales).view(scales),
            utils.e8m0_shuffle(right_scales).view(scales),
            dtype=torch.bfloat16,
            bpreshuffle=True,
        )


def _filled(operand: Packed, *, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Put zeros after the last row and element, up to multiples of ``rows`` and ``k`` elements."""
    block = 16 if operand.format == "nvfp4" else 32

    def fill(x: Tensor, multiple: int) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % multiple, 0, -x.shape[0] % rows))

    return fill(operand.codes, k // 2), fill(operand.scales, k // block)


def _typed(operand: Packed, *, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Fill up an operand in MXFP4 and give its bytes torch's types."""
    codes, scales = _filled(operand, rows=rows, k=k)
    return codes.view(_FP4), scales.view(_SCALE["mxfp4"])
