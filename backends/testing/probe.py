"""The exact probe: whether a device accumulates in fp32, in any order, with how many bits, rounded which way.

Random codes with block scales 2^−1…2^1 and K ≤ 4096 keep every partial sum of products a multiple of 2^−4
below 2^20: 24 bits. So every true fp32 accumulation, in any order and
rounded any way, gives the exact sum, and one rounding to
bf16 gives known bits. An accumulator with fewer bits gives differences; the result of 2^p + 1 − 2^p shows
how many bits it has, and that of three quarters of a last place added to a sum which way it is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.protocol import Draw
from ablate.backends.testing.check import FaultError, Told
from ablate.backends.testing.inputs import grid_of
from ablate.numerics.formats import E2M1
from ablate.recipes import OperandPolicy

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend
    from ablate.recipes import Format

_LARGEST_K = 4096
_GAPS = (32, 128, 1024)
_GROUP_GAPS = (64, 128, 1024)
_FP32_BITS = 24


def product(backend: Backend, where: str, draw: Draw, a: Tensor, b: Tensor) -> Tensor:
    """Return A Bᵀ on the CPU, quantised and multiplied by a back end on a torch device."""
    left, right = (backend.quantize(one.to(where), draw, axis=1) for one in (a, b))
    return backend.multiply(left, right).cpu()


def exact_product(backend: Backend, where: str, fmt: Format) -> str:
    """Multiply operands that fp32 accumulates exactly; raise ``AssertionError`` if a product is not exact.

    Elements are E2M1 values in every format, which MXFP8 and NVFP4 can hold too. Each block of 16 has a 6,
    which gives it the intended scale.
    """
    different = compared = 0
    shows: dict[str, Tensor] = {}
    for k in (32, 416, _LARGEST_K):
        a, b = (_codes(64, k, fmt, seed) for seed in (k, k + 1))
        left, right = (
            backend.quantize(one.to(where), Draw(policy=OperandPolicy(format=fmt)), axis=1) for one in (a, b)
        )
        values = [one.values.cpu().double() for one in (left, right)]
        descale = float(left.descale) * float(right.descale)
        exact = (values[0] @ values[1].t()).to(torch.float32) * descale
        wrong = int((backend.multiply(left, right).cpu() != exact.to(torch.float32).to(torch.bfloat16)).sum())
        if wrong and not shows:
            shows = {"a": a, "b": b}
        different += wrong
        compared += exact.numel()
    if not different:
        return f"{compared} products equal to the bit"
    what = f"{different} of {compared} products are not those of an fp32 accumulator"
    raise FaultError(f"{what}; its width is under 'accumulator'", shows, format=fmt)


def _codes(rows: int, k: int, fmt: Format, seed: int) -> Tensor:
    """Return bf16 values that quantising leaves unchanged."""
    generator = torch.Generator().manual_seed(seed)
    grid = grid_of(E2M1)
    values = grid[torch.randint(0, 8, (rows, k), generator=generator)]
    values *= 1 - 2.0 * torch.randint(0, 2, (rows, k), generator=generator)
    values[:, ::16] = 6.0
    scales = 2.0 ** torch.randint(-1, 2, (rows, k // 32), generator=generator)
    if fmt == "nvfp4":
        scales[:, 0] = 2.0  # the tensor's largest value, the same in every tensor
    return (values * scales.repeat_interleave(32, dim=1)).to(torch.bfloat16)


def accumulator_bits(backend: Backend, where: str, fmt: Format) -> Told:
    """Tell the number of bits that sums keep: the smallest p with 2^p + 1 − 2^p ≠ 1, at most 24.

    The three terms are 32, 128 or 1,024 elements apart, within one instruction and across many. A narrower
    accumulator is a property of the hardware (Hopper's FP8): told, not a kernel's fault.
    """
    fp8 = fmt.startswith("fp8")
    # FP8 has one scale for the tensor: a 448 opposite a 0 makes it 1. Both sides share the ratio of the
    # terms, since E4M3 alone spans only 18 powers of two.
    powers = range(8 if fp8 else 1, _FP32_BITS)
    bits = _FP32_BITS
    for gap in _GAPS:
        a, b = torch.zeros(len(powers), 4 * gap), torch.zeros(16, 4 * gap)
        for row, p in enumerate(powers):
            large = 2.0 ** (p - 17) if fp8 else 2.0**p
            a[row, 0], a[row, gap], a[row, 2 * gap] = large, 1.0, -large
        b[:, 0] = b[:, 2 * gap] = 2.0**8 if fp8 else 1.0
        b[:, gap] = 2.0**-9 if fp8 else 1.0
        if fp8:
            a[:, 3 * gap] = b[:, 3 * gap + 1] = 448.0
        draw = Draw(policy=OperandPolicy(format=fmt))
        ours = product(backend, where, draw, a.to(torch.bfloat16), b.to(torch.bfloat16)).float()[:, 0]
        expected = 2.0**-9 if fp8 else 1.0
        lost = [p for row, p in enumerate(powers) if float(ours[row]) != expected]
        bits = min([bits, *lost])
    fewer = "" if bits >= _FP32_BITS else ", fewer than the 24 of fp32"
    return Told(detail=f"sums keep {bits} bits{fewer}")


_DIRECTIONS = {
    (1.0, -1.0, 1.0, -1.0): "to nearest",
    (0.0, -1.0, 1.0, 0.0): "toward zero",
    (0.0, -1.0, 0.0, -1.0): "down",
    (1.0, 0.0, 1.0, 0.0): "up",
    (0.75, -0.75, 0.75, -0.75): "not at all here (more than 24 bits, or another order)",
    (0.0, 0.0, 0.0, 0.0): "small terms cut off",
}
"""What is left, in last places, of ±1.5·2^16 ± three quarters of its last place ∓ 1.5·2^16."""


def sum_rounding(backend: Backend, where: str, fmt: Format) -> Told:
    """Tell which way sums are rounded: Blackwell's NVFP4 is published to add groups of 64 toward zero.

    The three terms lie 64, 128 or 1,024 elements apart, each in a group of its own. A direction is a property
    of the hardware: told, not a fault.
    """
    found: dict[str, list[int]] = {}
    for gap in _GROUP_GAPS:
        a, b = torch.zeros(4, 4 * gap), torch.zeros(16, 4 * gap)
        for row, (first, small) in enumerate(((1, 1), (1, -1), (-1, 1), (-1, -1))):
            a[row, 0], a[row, gap], a[row, 2 * gap] = first * 384.0, small * 2.0**-4 * 1.5, -first * 384.0
        # Opposite a zero, what gives the block of b, and the whole tensor, the scale that holds the rest.
        b[:, 0] = b[:, 2 * gap] = 256.0
        b[:, 1] = b[:, 2 * gap + 1] = 384.0
        b[:, gap], b[:, gap + 1] = 2.0**-4, 2.0**-4 * 1.5
        a[:, 3 * gap] = b[:, 3 * gap + 1] = {"nvfp4": 448.0 * 6, "fp8_e4m3": 448.0}.get(fmt, 0.0)
        draw = Draw(policy=OperandPolicy(format=fmt))
        ours = product(backend, where, draw, a.to(torch.bfloat16), b.to(torch.bfloat16)).float()
        left = tuple((ours[:, 0] * 2.0**7).tolist())
        found.setdefault(_DIRECTIONS.get(left, f"unknown, {left} last places"), []).append(gap)
    parts = [
        how if len(found) == 1 else f"{how} {', '.join(map(str, gaps))} apart" for how, gaps in found.items()
    ]
    return Told(detail=f"between groups of products: {'; '.join(parts)}")
