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
    EDEN_CLIP,
    TWO_LEVEL,
    four_six_divisor,
    fp32,
    fp32_scale,
    searched_scale,
    tensor_scale,
)
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.backends.protocol import Draw
    from ablate.numerics.philox import Key
    from ablate.recipes import OperandPolicy

_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this size a thread costs more than it saves."""
_IN_TILES = ("groups", "searched")
"""Families of scale rules with fp32 scales beside the elements."""
_OF_ALL_ELEMENTS = ("nearest", "stochastic", "stochastic_8bit")
"""Roundings that are compiled for every element, not for E2M1 alone."""
LARGEST_HADAMARD = 128
_PAIR = 32
_SMALLEST = 2.0**-126
_LARGEST = 2.0**127
"""Between these a product of two scales loses no bits and does not overflow."""
_TYPES: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}


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
        of_rows = self.scales.repeat_interleave(rows // self.scales.shape[0], dim=0)
        return self.elements.float() * of_rows.repeat_interleave(
            columns // of_rows.shape[1], dim=1
        )


def supports(policy: OperandPolicy) -> bool:
    """Whether the kernel can quantise by this policy; plain torch takes all others."""
    rule = policy.scale_rule
    if (
        "cpp" not in rule.kernels
        or policy.format == "if4"
        or policy.hadamard > LARGEST_HADAMARD
    ):
        return False
    if policy.rounding not in _OF_ALL_ELEMENTS and ELEMENTS[policy.format] != E2M1:
        return False
    if policy.hadamard and rule.family in _IN_TILES:
        return False
    is_square = policy.block in ("32x32", "16x16")
    return not is_square or (
        rule.family != "four_six" and policy.hadamard < LARGEST_HADAMARD
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
        header = sources["job.h"].decode()
        self._rules = enumerators("Rule", header)
        self._roundings = enumerators("Rounding", header)
        self._job = _structure("Job", header)
        self._product = _structure("Product", sources["product.h"].decode())
        self.multiplies = multiplies_bf16() and bool(self._library.ablate_multiplies())
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        with suppress(OSError, AttributeError):  # no /proc, or without GNU's functions
            for line in (
                Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            ):
                library = line.split(maxsplit=5)[-1]
                # torch's own
                if Path(library).name.startswith(("libgomp", "libiomp5", "libomp")):
                    runtime = ctypes.CDLL(library)
                    threads = (
                        ctypes.cast(runtime[name], ctypes.c_void_p) for name in names
                    )
                    self._library.ablate_use_threads_of(*threads)
                    break

    def _run(self, function: str, job: Any) -> int:
        """Call a function of the library on a job, on torch's number of threads, or on one if it is small."""
        if job.rows * job.cols >= _THREADING_MIN_ELEMENTS:
            threads = torch.get_num_threads()
        else:
            threads = 1
        result: int = getattr(self._library, f"ablate_{function}")(
            ctypes.byref(job), threads
        )
        return result

    def quantize(
        self, x: Tensor, draw: Draw, *, axis: int, factor: float = 1.0
    ) -> Quantized | BlockScaled:
        """Quantise as ``round_operand``, with the same bits and errors.

        ``factor`` multiplies a bf16 matrix first, in fp32; for source ``forward_bf16`` the product is rounded
        to bf16.
        """
        policy = draw.policy
        check_operand(x, policy, axis, draw.key)
        axis %= 2
        x = x if x.stride(1) == 1 else x.contiguous()
        signs, order = _of_groups(policy, draw.key, axis)
        job = self._job_of(x, draw, axis=axis, factor=factor)
        job.signs = _address(signs)
        job.order = _address(order)
        if policy.scale_rule.family in _IN_TILES:
            return self._in_tiles(job, x, policy, axis)
        decode = 1.0
        if policy.has_tensor_scale:
            amax = draw.amax_number
            if amax is None:
                amax = struct.unpack(
                    "<f", struct.pack("<I", self._run("amax_bits", job))
                )[0]
            decode = _set_tensor_scale(job, amax, policy)
        descale = decode / policy.prescale
        if policy.format in TWO_LEVEL:
            descale = fp32(descale)
        if policy.undo == "operand":
            job.undo = 1.0 / policy.prescale
            descale = decode
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        mask = torch.empty(x.shape, dtype=torch.bool) if policy.mask else None
        job.dst = out.data_ptr()
        job.mask = _address(mask)
        self._run("quantise", job)
        return Quantized(values=out, descale=descale, mask=mask, axis=axis)

    def _job_of(self, x: Tensor, draw: Draw, *, axis: int, factor: float) -> Any:
        """Describe a quantisation, but for its memory and the scale of its tensor."""
        policy = draw.policy
        rule = policy.scale_rule
        element = ELEMENTS[policy.format]
        rows, columns = block_shape(policy)
        if axis == 0 and policy.hadamard:
            # a group is processed in chunks of rows, whatever shares a scale
            columns = max(columns, 16)
        job = self._job(
            src=x.data_ptr(),
            rows=x.shape[0],
            cols=x.shape[1],
            src_stride=x.stride(0),
            src_bf16=x.dtype == torch.bfloat16,
            product_bf16=policy.source == "forward_bf16",
            factor=factor,
            axis=axis,
            block=columns,
            square=rows > 1,
            hadamard=policy.hadamard,
            norm=_norm(policy),
            rotated_bf16=policy.rotated_bf16,
            rule=self._rules[rule.family.upper()],
            rounding=self._roundings[policy.rounding.upper()],
            mantissa_bits=element.mantissa_bits,
            min_exponent=element.min_exponent,
            element_max=element.max,
            scale_emax=element.max_exponent,
            prescale=policy.prescale,
            undo=1.0,
            magnitudes=rule.measure == "mae",
            unscaled=rule.measure == "unscaled",
            tensor_scale=1.0,
            tensor_descale=1.0,
        )
        if rule.family == "e8m0":
            job.scale_add = SCALE_ADD[policy.scale](element)
        if draw.key is not None:
            job.key0, job.key1 = draw.key.words()
            job.step = draw.key.step & 0xFFFFFFFF
            job.call = draw.key.call & 0xFFFFFFFF
        return job

    def _in_tiles(
        self, job: Any, x: Tensor, policy: OperandPolicy, axis: int
    ) -> BlockScaled:
        """Quantise with one fp32 scale for each row, 128 neighbours or tile."""
        rule = policy.scale_rule
        tile = (1, x.shape[axis]) if rule.outer == "row" else block_shape(policy)
        job.tile_rows, job.tile_cols = tile if axis == 1 else tile[::-1]
        if rule.family == "searched":
            rows = turned(x, axis).float() * job.factor
            if job.product_bf16 and job.src_bf16:
                rows = rows.to(torch.bfloat16).float()
            scales = turned(searched_scale(rows, policy), axis)
            scales_before = scales
        else:
            amax = torch.empty(x.shape[0] // job.tile_rows, x.shape[1] // job.tile_cols)
            job.dst = amax.data_ptr()
            self._run("tile_amax_bits", job)
            scale = fp32_scale(amax, policy)
            scales_before = scale.down
            scales = scale.up
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        job.dst = out.data_ptr()
        job.scales = scales_before.data_ptr()
        self._run("quantise", job)
        return BlockScaled(elements=out, scales=scales, axis=axis)

    quantize_both = Backend.quantize_both

    def gradient_through(
        self,
        grad: Tensor,
        policy: OperandPolicy,
        *,
        key: Key | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Do what ``Backend.gradient_through`` does, with the same bits."""
        grad = grad.contiguous()
        if mask is not None:
            mask = mask.contiguous()
        signs, order = _of_groups(policy, key, 1, inverse=True)
        out = torch.empty_like(grad)
        job = self._job(
            src=grad.data_ptr(),
            dst=out.data_ptr(),
            mask=_address(mask),
            signs=_address(signs),
            order=_address(order),
            rows=grad.shape[0],
            cols=grad.shape[1],
            src_stride=grad.shape[1],
            src_bf16=True,
            factor=1.0,
            hadamard=policy.hadamard,
            norm=_norm(policy),
        )
        self._run("way_back", job)
        return out

    def multiply(self, a: BlockScaled, b: BlockScaled) -> Tensor | None:
        """Return A Bᵀ [m, n] in bf16; None if this CPU cannot, or if products of scales are not exact."""
        least = float(a.scales.amin()) * float(b.scales.amin())
        most = float(a.scales.amax()) * float(b.scales.amax())
        # also for a NaN
        if not (self.multiplies and least >= _SMALLEST and most <= _LARGEST):
            return None
        blocks = max(side.scales.shape[side.axis] for side in (a, b))
        sizes = []
        scales = []
        for side in (a, b):
            n = side.elements.shape[1 - side.axis]
            of_rows = turned(side.scales, side.axis)
            of_rows = of_rows.repeat_interleave(n // of_rows.shape[0], dim=0)
            scales.append(of_rows.t().expand(blocks, -1).contiguous())
            sizes.append(n)
        out = torch.empty(sizes, dtype=torch.bfloat16)
        job = self._product(
            a=a.elements.data_ptr(),
            b=b.elements.data_ptr(),
            a_scales=scales[0].data_ptr(),
            b_scales=scales[1].data_ptr(),
            dst=out.data_ptr(),
            m=sizes[0],
            n=sizes[1],
            k=a.elements.shape[a.axis],
            a_stride=a.elements.shape[1],
            b_stride=b.elements.shape[1],
            scales=blocks,
            a_transposed=a.axis == 0,
            b_transposed=b.axis == 0,
        )
        self._library.ablate_multiply(ctypes.byref(job), torch.get_num_threads())
        return out


def _set_tensor_scale(job: Any, amax: float, policy: OperandPolicy) -> float:
    """Set the scale of a whole tensor; return what multiplies its elements back."""
    encode, decode = tensor_scale(amax, policy)
    family = policy.scale_rule.family
    job.tensor_scale = encode
    job.tensor_descale = decode
    job.block_multiplier = encode
    if family == "two_level" and ELEMENTS[policy.format] == E2M1:
        job.folded = True
        job.block_multiplier = fp32(encode * fp32(1 / 6))
    elif family == "four_six":
        job.tensor_scale = amax
        job.error_divisor = four_six_divisor(policy)
    elif family == "ms_eden":
        job.tensor_scale = EDEN_CLIP
    return decode


def _norm(policy: OperandPolicy) -> float:
    return 1.0 / math.sqrt(policy.hadamard or 1)


def enumerators(name: str, header: str) -> dict[str, int]:
    """Read the names of an enumeration in a header, and their numbers."""
    declared = re.search(rf"enum {name} : int {{(.*?)}};", header, re.DOTALL)
    assert declared is not None
    return {word.strip(): number for number, word in enumerate(declared[1].split(","))}


def _structure(name: str, header: str) -> type[ctypes.Structure]:
    """Make a ctypes structure from its declaration in a header."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", header, re.DOTALL)
    assert body is not None
    fields = []
    for kind, declared in re.findall(
        r"(?:const )?(\w+)([^;]+);", re.sub("//.*", "", body[1])
    ):
        field_type = ctypes.c_void_p if "*" in declared else _TYPES[kind]
        fields += [(field.strip(" *"), field_type) for field in declared.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _of_groups(
    policy: OperandPolicy,
    key: Key | None,
    axis: int,
    *,
    inverse: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the signs (fp32) and the permutation or its inverse (int32) as the kernel reads them.

    For axis 1 they are repeated for the 128 elements that a rotation handles at a time, with even elements
    before odd ones in each 32.
    """
    signs = signs_of(policy, key)
    order = permutation_of(policy, key)
    if order is not None and inverse:
        order = order.argsort()
    if axis == 1 and signs is not None:
        signs = _even_first(signs.repeat(LARGEST_HADAMARD // len(signs)))
    if axis == 1 and order is not None:
        places = torch.arange(LARGEST_HADAMARD)
        element_at = _even_first(places[:])
        order = element_at.argsort()[
            _even_first(places.view(-1, len(order))[:, order].reshape(-1))
        ]
    return signs, None if order is None else order.to(torch.int32)


def _even_first(of_elements: Tensor) -> Tensor:
    return of_elements.view(-1, _PAIR // 2, 2).transpose(1, 2).reshape(-1).contiguous()
