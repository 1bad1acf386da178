"""Packed operands: codes and scale bytes in the layout of FP4 and FP8 units, contraction last.

A native back end passes them from its quantiser to its GEMM. ``values`` returns the operand that emulation
would multiply, bit for bit, so that the two can be compared anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.backends.triton.policies import BLOCK
from ablate.numerics.formats import E4M3, ELEMENTS, decode, e8m0_decode

FP8 = ("fp8_e4m3", "fp8_e5m2")
"""Formats with fp32 scales, per tensor or per row."""
NAN_CODE = 0x7F
"""NaN of E4M3 and of E5M2 (any mantissa but zero)."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One operand of a GEMM, [n, k] with the contraction dimension last.

    ``codes`` are uint8: [n, k / 2] for 4-bit elements, the first of two in the low nibble, else [n, k].
    ``scales`` are uint8 [n, k / block]: E8M0, or E4M3 for NVFP4; None for FP8. ``descale`` must still be
    applied to the accumulator: a number, fp32 of one element, or fp32 [n] for one scale per row.
    ``axis`` is the contraction axis of the stored matrix.
    """

    format: str
    codes: Tensor
    scales: Tensor | None
    descale: float | Tensor
    axis: int
    mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k] in elements."""
        n, k = self.codes.shape
        return n, k * 2 if self.format in ("mxfp4", "nvfp4") else k

    @property
    def descale_on_device(self) -> Tensor:
        """``descale`` as an fp32 tensor, of one element if it is a number."""
        if isinstance(self.descale, Tensor):
            return self.descale
        return torch.full((1,), self.descale, dtype=torch.float32, device=self.codes.device)

    @property
    def values(self) -> Tensor:
        """Return the stored matrix dequantised to bf16, without ``descale``."""
        codes = unpack_nibbles(self.codes) if self.shape[1] != self.codes.shape[1] else self.codes
        element = ELEMENTS[self.format]
        values = decode(codes, element)
        if self.scales is None:
            values = torch.where((codes & NAN_CODE) == NAN_CODE, torch.nan, values)
        else:
            up = (
                torch.where(self.scales == NAN_CODE, torch.nan, decode(self.scales, E4M3))
                if self.format == "nvfp4"
                else e8m0_decode(self.scales.to(torch.int32))
            )
            values = values * up.repeat_interleave(BLOCK[self.format], dim=1)
        values = values.to(torch.bfloat16)
        return values if self.axis == 1 else values.t()


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte along k of [n, k], the first in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo ``pack_nibbles``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=2).flatten(1)
