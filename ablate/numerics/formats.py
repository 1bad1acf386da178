"""Element and scale formats, bit for bit: E2M1 (FP4), E8M0 block scales, E4M3 and E5M2.

E2M1 (OCP MX v1.0): magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 for the codes 0–7, sign in bit 3, no Inf, no NaN.
E8M0: 2^(b − 127) for b = 0…254; 255 is NaN.
All functions are elementwise over fp32 tensors and take any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
E2M1_EMAX = 2
FP8_MAX = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_FP8_DTYPE = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_MAGIC = 1.5 * 2.0**23
"""x + m·step − m·step rounds x to a multiple of step, ties to even, for |x| < 2^22 step."""


def e2m1_nearest(v: Tensor) -> Tensor:
    """Round fp32 to E2M1 values: nearest, ties to even code, saturating at ±6; the sign of zero is kept."""
    magnitude = v.abs().clamp_(max=E2M1_MAX)
    magic = torch.where(magnitude < 2, 0.5 * _MAGIC, torch.where(magnitude < 4, _MAGIC, 2.0 * _MAGIC))
    return torch.copysign((magnitude + magic) - magic, v)


def e2m1_stochastic(v: Tensor, words: Tensor) -> Tensor:
    """Round fp32 to one of the two E2M1 neighbours: up when p > u, u the top 24 bits of ``words`` over 2^24.

    Comparing p with u is bit-reproducible on any device, unlike floor(v / step + u).
    """
    magnitude = v.abs().clamp_(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    low = torch.floor(magnitude / step) * step  # exact: step is a power of two
    p = (magnitude - low) / step
    u = (words >> 8).to(torch.float32) * 2.0**-24
    return torch.copysign(torch.where(p > u, low + step, low), v)


def e2m1_encode(values: Tensor) -> Tensor:
    """Return the 4-bit codes (uint8) of values that lie on the E2M1 grid."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
    code = torch.bucketize(values.abs().contiguous(), grid)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of 4-bit codes."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    magnitude = grid[(codes & 7).long()]
    return torch.where((codes & 8) != 0, -magnitude, magnitude)


def floor_scale_byte(amax: Tensor) -> Tensor:
    """Return the E8M0 byte (int32) of the OCP floor rule for block maxima: floor(log2 amax) − 2, clamped.

    floor(log2) is read from the exponent field, never from a float logarithm. A zero block has byte 0, a
    block with NaN or Inf byte 255.
    """
    field = (amax.view(torch.int32) >> 23) & 0xFF
    return torch.where(field == 255, 255, (field - E2M1_EMAX).clamp(min=0))


def e8m0_decode(byte: Tensor) -> Tensor:
    """Return 2^(byte − 127) in fp32; byte 0 is the subnormal 2^−127, byte 255 NaN."""
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """Return 2^(127 − byte) in fp32, NaN for byte 255. Exact for every byte that a rule can give (≤ 253)."""
    bits = torch.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return bits.to(torch.int32).view(torch.float32)


def fp8_nearest(v: Tensor, fmt: str) -> Tensor:
    """Round fp32 to E4M3 or E5M2 values (nearest even, saturating; NaN stays), returned in fp32."""
    limit = FP8_MAX[fmt]
    return v.clamp(-limit, limit).to(_FP8_DTYPE[fmt]).to(torch.float32)
