"""What the kernels support, and their constants: plain data, without Triton.

The GEMM has tiles where an architecture has a native instruction. Each was compiled ahead of time and
checked (``python -m ablate.backends.testing.ahead``); none has been timed on FP4 hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ablate.backends.device import interpreting
from ablate.backends.quantisers.packed import BLOCK
from ablate.numerics.formats import ELEMENTS, SCALE_ADD
from ablate.recipes import OperandPolicy

OFF, CODES, VALUES = 0, 1, 2
"""Output of one side of the kernel: nothing; codes and scale bytes, contraction last; dequantised bf16."""
E8M0, TWO_LEVEL, TENSOR = 0, 1, 2
"""Scales: E8M0 per block; NVFP4's E4M3 per block and fp32 for the tensor; fp32 for the tensor."""

_LARGEST_HADAMARD = 128
_TILE = 64
BITS = {"mxfp4": 4, "mxfp4_e3m0": 4, "nvfp4": 4, "mxfp6_e3m2": 6, "mxfp6_e2m3": 6}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile of one program and its launch settings."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int = 3


FORMATS = {
    "mxfp4": {"ELEMENT": "e2m1", "PER_BYTE": 2, "BLOCK": 32},
    "nvfp4": {"ELEMENT": "e2m1", "PER_BYTE": 2, "BLOCK": 16},
    "mxfp8": {"ELEMENT": "e4m3", "PER_BYTE": 1, "BLOCK": 32},
}
"""The GEMM's constants for a format: dot_scaled's name, elements per byte, elements that share a scale."""

_BLACKWELL_FP4 = (Tile(bm=128, bn=256, bk=128, warps=8), Tile(bm=128, bn=128, bk=256, warps=4))
_BLACKWELL_FP8 = (Tile(bm=128, bn=256, bk=128, warps=8), Tile(bm=128, bn=128, bk=128, warps=8))
_ONE_SIZE = (Tile(bm=128, bn=128, bk=128, warps=8),)
TILES: dict[tuple[str, str], tuple[Tile, ...]] = {
    **{("sm_90", fmt): _ONE_SIZE for fmt in FORMATS},
    **{(arch, fmt): _BLACKWELL_FP4 for arch in ("sm_100", "sm_103") for fmt in ("mxfp4", "nvfp4")},
    **{(arch, "mxfp8"): _BLACKWELL_FP8 for arch in ("sm_100", "sm_103")},
    **{("sm_120", fmt): _ONE_SIZE for fmt in FORMATS},
    **{
        ("gfx950", fmt): tuple(
            Tile(bm=bm, bn=128, bk=bk, warps=warps, stages=2) for bm, warps in ((256, 8), (128, 4))
        )
        for fmt, bk in (("mxfp4", 256), ("mxfp8", 128))
    },
}
"""(architecture, format) → tiles, the largest first. Missing entries have no native instruction."""

INTERPRETED = Tile(bm=128, bn=128, bk=256, warps=4)


def refusal(policy: OperandPolicy) -> str | None:
    """Return why the kernel does not support this policy, or None if it does."""
    if policy.format not in ELEMENTS or policy.format.startswith("fp4_"):
        return f"format '{policy.format}'"
    if policy.scale not in (*SCALE_ADD, "two_level", "tensor", "delayed"):
        return f"scale '{policy.scale}'"
    if policy.block in ("32x32", "16x16"):
        return f"block '{policy.block}'"
    if policy.rounding == "stochastic_rocm":
        return "rounding 'stochastic_rocm'"
    for option in ("permute", "mask"):
        if getattr(policy, option):
            return f"'{option}'"
    if policy.undo == "operand":
        return "undo 'operand'"
    if policy.hadamard > _LARGEST_HADAMARD:
        return f"hadamard {policy.hadamard}"
    return None


@lru_cache(maxsize=512)
def constants(policy: OperandPolicy | None, output: int) -> dict[str, Any]:
    """Return the compile-time constants of one side of the kernel; None means that the side is off."""
    if policy is None:
        policy, output = OperandPolicy(format="mxfp4"), OFF
    element = ELEMENTS[policy.format]
    rules = {"two_level": TWO_LEVEL, "tensor": TENSOR, "delayed": TENSOR}
    return {
        "OUTPUT": output, "RULE": rules.get(policy.scale, E8M0), "BLOCK": BLOCK.get(policy.format, 32),
        "SCALE_ADD": SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
        "MANTISSA": element.mantissa_bits, "E_MIN": element.min_exponent, "E_MAX": element.max_exponent,
        "MAX": element.max, "BITS": BITS.get(policy.format, 8), "STOCHASTIC": policy.rounding == "stochastic",
        "PRESCALE": policy.prescale, "HADAMARD": policy.hadamard,
        "NORM": 1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0,
        "ROTATED_BF16": policy.rotated_bf16,
    }  # fmt: skip


def tile(rows: OperandPolicy | None, columns: OperandPolicy | None) -> tuple[int, int]:
    """Return (rows, columns) of one program's tile: whole groups along both axes."""
    if interpreting():  # a program costs milliseconds there, whatever its size
        return 128, 128
    # 64 columns are one round of the random stream's layout; a side that is off has no constraints.
    wide = max(_TILE, rows.hadamard if rows else 0)
    tall = max(32 if rows and not columns else _TILE, columns.hadamard if columns else 0)
    return tall, wide


def choose_tile(arch: str, fmt: str, m: int, n: int, processors: int) -> Tile:
    """Return the largest tile that gives every processor of the device a program, else the smallest."""
    tiles = TILES[arch, fmt]
    for tile in tiles[:-1]:
        if -(-m // tile.bm) * -(-n // tile.bn) >= processors:
            return tile
    return tiles[-1]
