"""The block-scaled GEMM: C[M, N] = A[M, K] · B[N, K]ᵀ over packed operands, fp32 accumulation, bf16 out.

``tl.dot_scaled`` becomes a native instruction only for certain tiles; for others Triton silently widens to
bf16 or compiles a kernel that only traps: see ``ablate.backends.triton.policies``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ablate.backends.device import device_of, interpreting
from ablate.backends.triton.functions import exact_bf16, round_to_bf16
from ablate.backends.triton.launch import on_device
from ablate.backends.triton.policies import FORMATS, INTERPRETED, choose_tile

if TYPE_CHECKING:
    from ablate.backends.packed import Packed

GROUP = 8


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """Load, with zeros outside; EVEN: all is inside."""
    if EVEN:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0)
    return values


@triton.jit
def gemm_kernel(
    a,
    a_scales,
    b,
    b_scales,
    c,
    M,
    N,
    K,
    alpha,
    a_descale,
    b_descale,
    ELEMENT: tl.constexpr,
    PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile of C per program. ``alpha``, or the product of the descales, scales the accumulator."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    # Tiles in groups of rows, so that consecutive programs share operands in the cache.
    per_group = GROUP * tiles_n
    group = tl.program_id(0) // per_group
    in_group = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (tl.program_id(0) % per_group) % in_group
    tile_n = (tl.program_id(0) % per_group) // in_group
    m = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.arange(0, BK // PER_BYTE)
    s = tl.arange(0, BK // BLOCK)
    row_bytes = K // PER_BYTE
    row_scales = K // BLOCK
    a_at = a + m[:, None] * row_bytes + k[None, :]
    b_at = b + n[None, :] * row_bytes + k[:, None]
    a_scales_at = a_scales + m[:, None] * row_scales + s[None, :]
    b_scales_at = b_scales + n[:, None] * row_scales + s[None, :]
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, K, BK):
        bytes_left = row_bytes - first // PER_BYTE
        scales_left = row_scales - first // BLOCK
        a_codes = _load(a_at, (m[:, None] < M) & (k[None, :] < bytes_left), EVEN)
        b_codes = _load(b_at, (n[None, :] < N) & (k[:, None] < bytes_left), EVEN)
        a_scale = _load(
            a_scales_at, (m[:, None] < M) & (s[None, :] < scales_left), EVEN
        )
        b_scale = _load(
            b_scales_at, (n[:, None] < N) & (s[None, :] < scales_left), EVEN
        )
        if BLOCK == 16:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        accumulator = tl.dot_scaled(
            a_codes, a_scale, ELEMENT, b_codes, b_scale, ELEMENT, accumulator
        )
        a_at += BK // PER_BYTE
        b_at += BK // PER_BYTE
        a_scales_at += BK // BLOCK
        b_scales_at += BK // BLOCK
    if a_descale is not None:
        alpha = tl.load(a_descale) * tl.load(b_descale)
    accumulator *= alpha
    c_at = c + m[:, None] * N + n[None, :]
    result = exact_bf16(round_to_bf16(accumulator))
    if EVEN:
        tl.store(c_at, result)
    else:
        tl.store(c_at, result, mask=(m[:, None] < M) & (n[None, :] < N))


def launch_gemm(a: Packed, b: Packed) -> Tensor:
    """Multiply packed operands A [M, K] and B [N, K] with scale bytes; return A Bᵀ [M, N] in bf16."""
    m, k = a.shape
    n = b.shape[0]
    out = a.codes.new_empty(m, n, dtype=torch.bfloat16)
    if not out.numel():
        return out
    if not k:
        return out.zero_()
    alpha = 1.0
    descales: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(a.descale, Tensor) or isinstance(b.descale, Tensor):
        descales = (a.descale_on_device, b.descale_on_device)
    else:
        alpha = a.descale * b.descale
    if interpreting():
        tile = INTERPRETED
    else:
        device = device_of(str(out.device))
        tile = choose_tile(device.arch, a.format, m, n, device.processors)
    even = m % tile.bm == 0 and n % tile.bn == 0 and k % tile.bk == 0
    with on_device(out):
        gemm_kernel[(triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn),)](
            a.codes,
            a.scales,
            b.codes,
            b.scales,
            out,
            m,
            n,
            k,
            alpha,
            *descales,
            **FORMATS[a.format],
            BM=tile.bm,
            BN=tile.bn,
            BK=tile.bk,
            GROUP=GROUP,
            EVEN=even,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out
