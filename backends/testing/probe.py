"""The exact probe: whether a device accumulates in fp32, in any order, and if not, with how many bits.

Random codes with block scales 2^−1…2^1 and K ≤ 4096 keep every partial sum of products a multiple of 2^−4
below 2^20: 24 bits. So every true fp32 accumulation, in any order, gives the exact sum, and one rounding to
bf16 gives known bits. An accumulator with fewer bits gives differences; the result of 2^p + 1 − 2^p shows
how many bits it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.protocol import Draw
from ablate.recipes import OperandPolicy

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend
    from ablate.recipes import Format

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_K = 4096
_GAPS = (32, 128, 1024)
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
    for k in (32, 416, _LARGEST_K):
        a, b = (_codes(rows, k, fmt, seed) for rows, seed in ((64, k), (64, k + 1)))
        policy = OperandPolicy(format=fmt)
        left, right = (backend.quantize(one.to(where), Draw(policy=policy), axis=1) for one in (a, b))
        ours = backend.multiply(left, right).cpu()
        values = [one.values.cpu().double() for one in (left, right)]
        descale = float(left.descale) * float(right.descale)
        exact = (values[0] @ values[1].t()).to(torch.float32) * descale
        expected = exact.to(torch.float32).to(torch.bfloat16)
        different += int((ours != expected).sum())
        compared += ours.numel()
    assert not different, (
        f"{different} of {compared} products are not those of an fp32 accumulator; "
        "its width is under 'accumulator'"
    )
    return f"{compared} products equal to the bit"


def _codes(rows: int, k: int, fmt: Format, seed: int) -> Tensor:
    """Return bf16 values that quantising leaves unchanged."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor(_E2M1)
    values = grid[torch.randint(0, 8, (rows, k), generator=generator)]
    values *= 1 - 2.0 * torch.randint(0, 2, (rows, k), generator=generator)
    values[:, ::16] = 6.0
    scales = 2.0 ** torch.randint(-1, 2, (rows, k // 32), generator=generator)
    if fmt == "nvfp4":
        scales[:, 0] = 2.0  # the tensor's largest value, the same in every tensor
    return (values * scales.repeat_interleave(32, dim=1)).to(torch.bfloat16)


def accumulator_bits(backend: Backend, where: str, fmt: Format) -> str:
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
    return f"sums keep {bits} bits" + ("" if bits >= _FP32_BITS else ", fewer than the 24 of fp32")
