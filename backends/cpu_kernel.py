"""The compiled CPU quantiser: turn a policy into a job of ``kernel/``. The bits are the reference's.

fp32 scales within a tensor stay beside their elements. The product of two such operands is summed over 128
neighbours of the contraction axis, multiplied there by both scales, and added in fp32. The reference
multiplies every value by its scale first; the results differ by the rounding of those values to fp32.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.backends.cpu_bf16 import multiplies_bf16
from ablate.backends.protocol import Backend
from ablate.numerics.formats import E2M1, ELEMENTS, SCALE_ADD
from ablate.numerics.quantiser import Quantized, check_operand, turned
from ablate.numerics.rotate import permutation_of, signs_of
from ablate.numerics.scales import (
    four_six_divisor,
    four_six_measure,
    fp32,
    fp32_scale,
    searched_scale,
    tensor_scale,
)
from ablate.recipes import block_shape
from ablate.recipes.policy import FOUR_SIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.backends.protocol import Draw
    from ablate.numerics.philox import Key
    from ablate.recipes import OperandPolicy

_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this size a thread costs more than it saves."""
_IN_TILES = ("row", "1x128", "128x128", "searched")
_RULES = {
    "quest": 1, "tensor": 2, "delayed": 2, "two_level": 3, "ue5m3": 5, "two_level_ue5m3": 5,
    **dict.fromkeys((one for one in FOUR_SIX if one != "four_six_max"), 6),
    "ms_eden": 7, "ms_eden_unscaled": 8, "row": 9, "1x128": 9, "128x128": 9, "searched": 10,
}  # fmt: skip
"""Numbers of ``enum Rule`` in ``kernel/job.h``; every other scale is E8M0, number 0."""
_TENSOR, _TWO_LEVEL, _DIVIDED_LEVEL, _FOUR_SIX = 2, 3, 4, 6
_ROUNDINGS = (
    "nearest", "stochastic", "stochastic_8bit", "stochastic_rocm", "nearest_away", "nearest_toward_zero"
)  # fmt: skip
LARGEST_HADAMARD = 128
_PAIR = 32
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""Between these a product of two scales loses no bits and does not overflow."""
_TYPES: dict[str, Any] = {
    "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockScaled:
    """An operand in its stored shape: ``elements`` (bf16, exact) and ``scales``, fp32, one for each tile.

    ``scales`` is [rows / tile rows, columns / tile columns]. ``axis`` is the contraction axis. There is no
    factor left for the accumulator, and no mask.
    """

    elements: Tensor
    scales: Tensor
    axis: int
    descale: float = 1.0
    mask: None = None

    @property
    def values(self) -> Tensor:
        """The stored matrix, dequantised: fp32."""
        rows, columns = self.elements.shape
        found = self.scales.repeat_interleave(rows // self.scales.shape[0], dim=0)
        return self.elements.float() * found.repeat_interleave(columns // found.shape[1], dim=1)


def supports(policy: OperandPolicy) -> bool:
    """Whether the kernel can quantise by this policy; plain torch takes all others."""
    square = policy.block in ("32x32", "16x16")
    return (
        policy.format in ELEMENTS
        and policy.format != "if4"
        and (policy.scale in SCALE_ADD or policy.scale in _RULES)
        and (policy.rounding in _ROUNDINGS[:3] or ELEMENTS[policy.format] == E2M1)
        and not (square and (policy.scale in ("quest", *FOUR_SIX) or policy.hadamard == LARGEST_HADAMARD))
        and policy.hadamard <= LARGEST_HADAMARD
        and not (policy.hadamard and policy.scale in _IN_TILES)
    )


class Kernel:
    """The functions of the compiled library.

    Args:
        path: the library.
        sources: the files of ``kernel/`` by name; two headers declare the library's structures.
    """

    def __init__(self, path: Path, sources: Mapping[str, bytes]) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.ablate_amax_bits.restype = ctypes.c_uint32
        self._job = _structure("Job", sources["job.h"].decode())
        self._product = _structure("Product", sources["product.h"].decode())
        self.multiplies = multiplies_bf16() and bool(self._library.ablate_multiplies())
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        with suppress(OSError, AttributeError):  # no /proc, or without GNU's functions
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
                where = line.split(maxsplit=5)[-1]
                if Path(where).name.startswith(("libgomp", "libiomp5", "libomp")):  # torch's own
                    runtime = ctypes.CDLL(where)
                    threads = (ctypes.cast(runtime[name], ctypes.c_void_p) for name in names)
                    self._library.ablate_use_threads_of(*threads)
                    break

    def _run(self, function: str, job: Any) -> int:
        """Call a function of the library on a job, on torch's number of threads, or on one if it is small."""
        threads = torch.get_num_threads() if job.rows * job.cols >= _THREADING_MIN_ELEMENTS else 1
        found: int = getattr(self._library, f"ablate_{function}")(ctypes.byref(job), threads)
        return found

    def quantize(self, x: Tensor, draw: Draw, *, axis: int, factor: float = 1.0) -> Quantized | BlockScaled:
        """Quantise as ``round_operand``, with the same bits and errors.

        ``factor`` multiplies a bf16 matrix first, in fp32; for source ``forward_bf16`` the product is rounded
        to bf16.
        """
        policy, amax, key = draw.policy, draw.amax_number, draw.key
        check_operand(x, policy, axis, key)
        axis %= 2
        x = x if x.stride(1) == 1 else x.contiguous()
        signs, order = _of_groups(policy, key, axis)
        element, (tile_rows, columns) = ELEMENTS[policy.format], block_shape(policy)
        words = key.words() if key else (0, 0)
        job = self._job(
            src=x.data_ptr(), rows=x.shape[0], cols=x.shape[1], src_stride=x.stride(0),
            src_bf16=x.dtype == torch.bfloat16, product_bf16=policy.source == "forward_bf16", factor=factor,
            # A group rotated along the rows is processed in chunks of rows, whatever shares a scale.
            axis=axis, block=max(columns, 16) if axis == 0 and policy.hadamard else columns,
            square=tile_rows > 1,
            hadamard=policy.hadamard, norm=1.0 / math.sqrt(policy.hadamard or 1), signs=_address(signs),
            order=_address(order), rotated_bf16=policy.rotated_bf16,
            rule=_DIVIDED_LEVEL if policy.format == "nvint4" else _RULES.get(policy.scale, 0),
            rounding=_ROUNDINGS.index(policy.rounding),
            mantissa_bits=element.mantissa_bits, min_exponent=element.min_exponent, element_max=element.max,
            scale_add=SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
            scale_emax=element.max_exponent, prescale=policy.prescale, undo=1.0, key0=words[0], key1=words[1],
            step=key.step & 0xFFFFFFFF if key else 0, call=key.call & 0xFFFFFFFF if key else 0,
        )  # fmt: skip
        if policy.scale in _IN_TILES:
            return self._in_tiles(job, x, policy, axis)
        descale = 1.0 / policy.prescale
        if job.rule >= _TENSOR:
            if amax is None and policy.has_tensor_scale:
                bits = self._run("amax_bits", job)
                amax = struct.unpack("<f", struct.pack("<I", bits))[0]
            encode, decode = (1.0, 1.0) if amax is None else tensor_scale(amax, policy)
            job.tensor_scale, job.tensor_descale, job.block_multiplier = encode, decode, encode
            if job.rule == _TWO_LEVEL:
                job.block_multiplier = fp32(encode * fp32(1 / 6))
            elif job.rule == _FOUR_SIX:
                job.tensor_scale, job.error_divisor = amax, four_six_divisor(policy)
                job.magnitudes = four_six_measure(policy) == "mae"
            descale = fp32(decode / policy.prescale)
        if policy.undo == "operand":
            job.undo, descale = 1.0 / policy.prescale, 1.0
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        mask = torch.empty(x.shape, dtype=torch.bool) if policy.mask else None
        job.dst, job.mask = out.data_ptr(), _address(mask)
        self._run("quantise", job)
        return Quantized(values=out, descale=descale, mask=mask, axis=axis)

    def _in_tiles(self, job: Any, x: Tensor, policy: OperandPolicy, axis: int) -> BlockScaled:
        """Quantise with one fp32 scale for each row, 128 neighbours or tile."""
        tile = (1, x.shape[axis]) if policy.scale in ("row", "searched") else block_shape(policy)
        job.tile_rows, job.tile_cols = tile if axis == 1 else tile[::-1]
        if policy.scale == "searched":
            rows = turned(x, axis).float() * job.factor
            if job.product_bf16 and job.src_bf16:
                rows = rows.to(torch.bfloat16).float()
            given = scales = turned(searched_scale(rows, policy), axis)
        else:
            amax = torch.empty(x.shape[0] // job.tile_rows, x.shape[1] // job.tile_cols)
            job.dst = amax.data_ptr()
            self._run("tile_amax_bits", job)
            scale = fp32_scale(amax, policy)
            given, scales = scale.down, scale.up
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        job.dst, job.scales = out.data_ptr(), given.data_ptr()
        self._run("quantise", job)
        return BlockScaled(elements=out, scales=scales, axis=axis)

    quantize_both = Backend.quantize_both

    def gradient_through(
        self, grad: Tensor, policy: OperandPolicy, *, key: Key | None, mask: Tensor | None
    ) -> Tensor:
        """Do what ``Backend.gradient_through`` does, with the same bits."""
        grad, mask = grad.contiguous(), None if mask is None else mask.contiguous()
        signs, order = _of_groups(policy, key, 1, inverse=True)
        out = torch.empty_like(grad)
        job = self._job(
            src=grad.data_ptr(), dst=out.data_ptr(), mask=_address(mask), signs=_address(signs),
            order=_address(order), rows=grad.shape[0], cols=grad.shape[1], src_stride=grad.shape[1],
            src_bf16=True, factor=1.0, hadamard=policy.hadamard, norm=1.0 / math.sqrt(policy.hadamard or 1),
        )  # fmt: skip
        self._run("way_back", job)
        return out

    def multiply(self, a: BlockScaled, b: BlockScaled) -> Tensor | None:
        """Return A Bᵀ [m, n] in bf16; None if this CPU cannot, or if products of scales are not exact."""
        least, most = (float(of(a.scales)) * float(of(b.scales)) for of in (torch.amin, torch.amax))
        if not (self.multiplies and least >= _SMALLEST and most <= _LARGEST):  # also for a NaN
            return None
        blocks = max(side.scales.shape[side.axis] for side in (a, b))
        sizes, scales = [], []
        for side in (a, b):
            n = side.elements.shape[1 - side.axis]
            last = turned(side.scales, side.axis)
            last = last.repeat_interleave(n // last.shape[0], dim=0)
            scales.append(last.t().expand(blocks, -1).contiguous())
            sizes.append(n)
        out = torch.empty(sizes, dtype=torch.bfloat16)
        job = self._product(
            a=a.elements.data_ptr(), b=b.elements.data_ptr(), a_scales=scales[0].data_ptr(),
            b_scales=scales[1].data_ptr(), dst=out.data_ptr(), m=sizes[0], n=sizes[1],
            k=a.elements.shape[a.axis], a_stride=a.elements.shape[1], b_stride=b.elements.shape[1],
            scales=blocks, a_transposed=a.axis == 0, b_transposed=b.axis == 0,
        )  # fmt: skip
        self._library.ablate_multiply(ctypes.byref(job), torch.get_num_threads())
        return out


def _structure(name: str, header: str) -> type[ctypes.Structure]:
    """Make a ctypes structure from its declaration in a header."""
    found = re.search(rf"struct {name} {{(.*?)\n}};", header, re.DOTALL)
    assert found is not None
    fields = [
        (one.strip(" *"), ctypes.c_void_p if "*" in declared else _TYPES[kind])
        for kind, declared in re.findall(r"(?:const )?(\w+)([^;]+);", re.sub("//.*", "", found[1]))
        for one in declared.split(",")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _of_groups(
    policy: OperandPolicy, key: Key | None, axis: int, *, inverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the signs (fp32) and the permutation or its inverse (int32) as the kernel reads them.

    For axis 1 they are repeated for the 128 elements that a rotation handles at a time, with even elements
    before odd ones in each 32.
    """
    signs, order = signs_of(policy, key), permutation_of(policy, key)
    if order is not None and inverse:
        order = order.argsort()
    if axis == 1 and signs is not None:
        signs = _even_first(signs.repeat(LARGEST_HADAMARD // len(signs)))
    if axis == 1 and order is not None:
        places = torch.arange(LARGEST_HADAMARD)
        element_at = _even_first(places[:])
        order = element_at.argsort()[_even_first(places.view(-1, len(order))[:, order].reshape(-1))]
    return signs, None if order is None else order.to(torch.int32)


def _even_first(of_elements: Tensor) -> Tensor:
    return of_elements.view(-1, _PAIR // 2, 2).transpose(1, 2).reshape(-1).contiguous()
