"""Element and scale formats, bit for bit: minifloats from E2M1 to E5M2, and E8M0 block scales.

A minifloat with ``mantissa_bits`` m and smallest exponent ``min_exponent`` has magnitudes that are multiples
of 2^(max(floor(log2 a), min_exponent) − m), up to ``max``; there is no Inf, and NaN stays NaN. E2M1
(OCP MX v1.0): 0, .5, 1, 1.5, 2, 3, 4, 6. E3M0: 0, .25, .5, 1, 2, 4, 8, 16. E8M0: 2^(b − 127) for b = 0…254;
255 is NaN. All functions are elementwise over fp32 tensors of any shape and on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class Element:
    """One minifloat: mantissa bits, exponents of its smallest and largest normal, and its largest value."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max: float


E2M1 = Element(mantissa_bits=1, min_exponent=0, max_exponent=2, max=6.0)
E3M0 = Element(mantissa_bits=0, min_exponent=-2, max_exponent=4, max=16.0)
INT4 = Element(mantissa_bits=2, min_exponent=2, max_exponent=2, max=7.0)
"""Whole numbers from −7 to 7: below its only exponent a minifloat has equal steps. Codes have a sign bit."""
E4M3 = Element(mantissa_bits=3, min_exponent=-6, max_exponent=8, max=448.0)
E5M2 = Element(mantissa_bits=2, min_exponent=-14, max_exponent=15, max=57344.0)
UE5M3 = Element(mantissa_bits=3, min_exponent=-14, max_exponent=16, max=114688.0)
"""A scale without a sign: codes up to 0xFE; 0xFF is NaN."""

ELEMENTS: dict[str, Element] = {
    "mxfp4": E2M1,
    "nvfp4": E2M1,
    "nvint4": INT4,
    "if4": E2M1,
    "fp4_e2m1": E2M1,
    "fp4_e3m0": E3M0,
    "mxfp8": E4M3,
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
}
"""The element of each quantised format of a policy."""


SCALE_ADD: dict[str, Callable[[Element], int]] = {
    "floor": lambda _element: 0,
    "even": lambda element: 1 << (22 - element.mantissa_bits),
    # The 23 mantissa bits of the largest value are subtracted.
    "rceil": lambda element: (
        0x7FFFFF - round((element.max / 2.0**element.max_exponent - 1) * 2**23)
    ),
}
"""E8M0 scale rules: the number added to the bits of a block's largest magnitude before reading its exponent.

With amax = m·2^f, 1 ≤ m < 2, a carry into the exponent raises the scale by one: for m ≥ 2 − 2^−(mantissa bits
+ 1) under even, m above the mantissa of the largest element under rceil (for E2M1: 1.75 and 1.5), never under
floor.
"""


def rounded(
    v: Tensor, element: Element, rounding: str = "nearest", words: Tensor | None = None
) -> Tensor:
    """Round fp32 to the element's grid, saturating; the sign of zero is kept.

    A value lies p steps above its lower neighbour. ``nearest`` gives ties to the even code, ``nearest_away``
    away from zero, ``nearest_toward_zero`` toward it. ``stochastic`` goes up when p > u, u the top 24 bits of
    ``words`` (int64 in [0, 2^32)) over 2^24: the same bits on any device, unlike floor(v / step + u).
    ``stochastic_8bit`` goes up when p + u ≥ 1, u the top 8 bits over 2^8, so with probability
    floor(256 p) / 256: the software form of ``cvt.rs`` in TransformerEngine (#3281, common/util/ptx.cuh).
    ``stochastic_rocm``, for study only, rounds as AMD's host emulation of its conversion (composable_kernel's
    ``convert_to_type_sr``): add a word's top 22 bits below the last bit, truncate. Its ``words`` come from
    the public kernel of ROCm's TransformerEngine: one for four elements, shifted right by 16 for the last
    two, which are therefore truncated toward zero.
    """
    magnitude = v.abs().clamp(max=element.max)
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=127 + element.min_exponent)
    step = ((exponent - element.mantissa_bits) << 23).view(torch.float32)
    in_steps = magnitude / step  # exact: a step is a power of two
    if rounding == "nearest":
        whole = in_steps.round()  # ties to even, which is the even code
        if not element.mantissa_bits:  # here it is that of the even exponent
            is_odd = (exponent - 127 - element.min_exponent) % 2 == 1
            whole = torch.where((in_steps == 1.5) & is_odd, 1.0, whole)
    else:
        low = torch.floor(in_steps)
        p = in_steps - low
        if rounding == "nearest_away":
            up = p >= 0.5
        elif rounding == "nearest_toward_zero":
            up = p > 0.5
        else:
            assert words is not None
            if rounding == "stochastic":
                up = p > (words >> 8).to(torch.float32) * 2.0**-24
            else:  # exact sums
                bits = 8 if rounding == "stochastic_8bit" else 22
                added = (words >> 32 - bits).to(torch.float32)
                up = torch.floor(p * 2**bits) + added >= 2**bits
        whole = low + up
    return torch.copysign(whole * step, v)


def encode(values: Tensor, element: Element, nan_code: int = 0) -> Tensor:
    """Return the codes (uint8, sign above the magnitude) of values on the grid; a NaN's has no sign."""
    magnitude = values.abs()
    m = element.mantissa_bits
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    subnormal = (magnitude * 2.0 ** (m - element.min_exponent)).to(torch.int32)
    mantissa = (magnitude.view(torch.int32) >> (23 - m)) & ((1 << m) - 1)
    normal = ((exponent - element.min_exponent + 1) << m) + mantissa
    code = torch.where(exponent < element.min_exponent, subnormal, normal)
    code = code + torch.signbit(values).to(torch.int32) * (encode_max(element) + 1)
    return torch.where(values.isnan(), nan_code, code).to(torch.uint8)


def encode_max(element: Element) -> int:
    """Return the largest magnitude code: all bits but the sign are ones (even if that code is a NaN)."""
    exponents = element.max_exponent - element.min_exponent + 1
    return (1 << (exponents.bit_length() + element.mantissa_bits)) - 1


def decode(codes: Tensor, element: Element) -> Tensor:
    """Return the fp32 values of codes (any integer dtype); a NaN code gives a number."""
    sign_bit = encode_max(element) + 1
    code = codes.to(torch.int32) & (sign_bit - 1)
    m = element.mantissa_bits
    field = code >> m
    mantissa = (code & ((1 << m) - 1)).to(torch.float32) * 2.0**-m
    power = ((field + (126 + element.min_exponent)) << 23).view(torch.float32)
    normal = (1 + mantissa) * power
    magnitude = torch.where(field == 0, mantissa * 2.0**element.min_exponent, normal)
    return torch.where((codes.to(torch.int32) & sign_bit) != 0, -magnitude, magnitude)


def e8m0_byte(amax_bits: Tensor, add: int, max_exponent: int) -> Tensor:
    """Return the E8M0 byte (int32) of a scale rule for the bit patterns of block maxima.

    The exponent is read from its field, never from a float logarithm. Below the range it is clamped (gradual
    underflow; a zero block has byte 0); a block with NaN or Inf has byte 255.
    """
    byte = (((amax_bits + add) >> 23) - max_exponent).clamp(min=0)
    return torch.where(amax_bits >= 0x7F800000, 255, byte)


def e8m0_decode(byte: Tensor) -> Tensor:
    """Return 2^(byte − 127) in fp32; byte 0 is the subnormal 2^−127, byte 255 NaN."""
    bits = torch.where(
        byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, byte << 23)
    )
    return bits.to(torch.int32).view(torch.float32)
