"""fp32 scales within a tensor on a CPU: elements in bf16 beside their scales, and the product of two such.

The product of elements is summed over 128 neighbours of the contraction axis, multiplied there by both
scales, and added in fp32. Multiplying every value by its scale first, as the reference does, differs from it
by the rounding of those values to fp32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.recipes import block_shape

if TYPE_CHECKING:
    from ablate.recipes import OperandPolicy

BLOCK = 128
"""Contracted elements whose products are summed before they are scaled."""
RULES = ("row", "1x128", "128x128", "searched")
"""The scale rules that the kernel supports."""
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""Between these a product of two scales loses no bits and does not overflow."""


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

    @property
    def contraction_last(self) -> Tensor:
        """The values as [n, k], contraction last: a view."""
        return self.values if self.axis == 1 else self.values.t()

    def scales_of_rows(self, blocks: int) -> Tensor:
        """Return the scales as [blocks of the contraction axis, n], contiguous."""
        last = self.scales if self.axis == 1 else self.scales.t()
        last = last.repeat_interleave(self.elements.shape[1 - self.axis] // last.shape[0], dim=0)
        return last.t().expand(blocks, -1).contiguous()


class _Product(ctypes.Structure):
    """``struct Product`` of kernel/product.h, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("a", "b", "a_scales", "b_scales", "dst")],
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "a_stride", "b_stride", "scales")],
        *[(name, ctypes.c_int32) for name in ("a_transposed", "b_transposed")],
    ]


def declare(library: ctypes.CDLL, job: type[ctypes.Structure]) -> None:
    """Declare the functions of the kernel that this module calls."""
    library.ablate_tile_amax_bits.argtypes = [ctypes.POINTER(job), ctypes.c_int]
    library.ablate_tile_amax_bits.restype = None
    library.ablate_multiplies.argtypes = []
    library.ablate_multiplies.restype = ctypes.c_int
    library.ablate_multiply.argtypes = [ctypes.POINTER(_Product), ctypes.c_int]
    library.ablate_multiply.restype = None


def tile_of(x: Tensor, policy: OperandPolicy, axis: int) -> tuple[int, int]:
    """Return the rows and columns of the stored matrix that share a scale."""
    shape = (1, x.shape[axis]) if policy.scale in ("row", "searched") else block_shape(policy)
    return shape if axis == 1 else (shape[1], shape[0])


def tile_amax(library: ctypes.CDLL, job: ctypes.Structure, threads: int) -> Tensor:
    """Return the largest magnitudes of a job's tiles, fp32 [rows / tile rows, columns / tile columns]."""
    out = torch.empty(job.rows // job.tile_rows, job.cols // job.tile_cols, dtype=torch.float32)
    job.dst = out.data_ptr()
    library.ablate_tile_amax_bits(ctypes.byref(job), threads)
    return out


def multiply(library: ctypes.CDLL, a: BlockScaled, b: BlockScaled) -> Tensor | None:
    """Return A Bᵀ [m, n] in bf16, or None where this CPU or these scales need another way."""
    least, most = (float(of(a.scales)) * float(of(b.scales)) for of in (torch.amin, torch.amax))
    if not (library.ablate_multiplies() and least >= _SMALLEST and most <= _LARGEST):  # so with a NaN
        return None
    (m, k), n = _last(a), _last(b)[0]
    blocks = max(side.scales.shape[side.axis] for side in (a, b))
    scales = [side.scales_of_rows(blocks) for side in (a, b)]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    job = _Product(
        a=a.elements.data_ptr(), b=b.elements.data_ptr(),
        a_scales=scales[0].data_ptr(), b_scales=scales[1].data_ptr(), dst=out.data_ptr(), m=m, n=n, k=k,
        a_stride=a.elements.shape[1], b_stride=b.elements.shape[1], scales=blocks,
        a_transposed=a.axis == 0, b_transposed=b.axis == 0,
    )  # fmt: skip
    library.ablate_multiply(ctypes.byref(job), torch.get_num_threads())
    return out


def _last(side: BlockScaled) -> tuple[int, int]:
    """Return the shape [n, k] of an operand, contraction last."""
    rows, columns = side.elements.shape
    return (rows, columns) if side.axis == 1 else (columns, rows)
