"""What the kernels support, and their constants: plain data, without Triton.

The GEMM has tiles where an architecture has a native instruction. Each was compiled ahead of time and
checked (``ablate check backends sm_100``); none has been timed on FP4 hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.backends.device import interpreting
from ablate.numerics.formats import E4M3, ELEMENTS, SCALE_ADD
from ablate.numerics.rotate import FIXED_16, redrawn
from ablate.numerics.scales import four_six_divisor, largest_of
from ablate.recipes import OperandPolicy, block_shape

if TYPE_CHECKING:
    from ablate.numerics.formats import Element
    from ablate.recipes.scale_rules import Family

_LARGEST_HADAMARD = 128
BLOCK = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
"""Elements along K that share a scale byte, for packed formats with block scales."""
BITS = {"mxfp4": 4, "nvfp4": 4}
"""Bits of elements that have fewer than 8."""
FP8 = ("fp8_e4m3", "fp8_e5m2")
"""Formats with fp32 scales, per tensor or per row."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side of the kernel is compiled for: a policy's rules, and what is written.

    ``output``: off (nothing), amax (the largest magnitude), codes (with scale bytes, contraction last) or
    values (dequantised bf16). ``rows`` × ``block`` elements share a scale. ``family`` and ``measure`` are
    those of the scale rule, ``scale_add`` that of an E8M0 rule. ``error_divisor`` divides element × block
    scale × amax to give the dequantised value. ``draws``: whether random words are needed. ``of_scales``: the
    grid of NVFP4's block scales. ``signs`` of a rotation: none, fixed (minus where ``sign_bits`` has a one,
    the first in its lowest bit) or drawn; ``permute`` says whether a permutation is drawn; ``each_step`` and
    ``each_call``, whether anew each time.
    """

    output: str
    family: Family
    rows: int
    block: int
    scale_add: int
    element: Element
    bits: int
    rounding: str
    prescale: float
    measure: str | None
    error_divisor: float
    hadamard: int
    norm: float
    rotated_bf16: bool
    mask: bool
    draws: bool
    signs: str
    sign_bits: int
    permute: bool
    each_step: bool
    each_call: bool
    of_scales: Element = E4M3


class Tile(NamedTuple):
    """The tile of one program and its launch settings."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int = 3


FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"ELEMENT": "e2m1", "PER_BYTE": 2, "BLOCK": 32},
    "nvfp4": {"ELEMENT": "e2m1", "PER_BYTE": 2, "BLOCK": 16},
    "mxfp8": {"ELEMENT": "e4m3", "PER_BYTE": 1, "BLOCK": 32},
}
"""The GEMM's constants for a format: dot_scaled's name, elements per byte, elements that share a scale."""

TILES: dict[tuple[str, str], tuple[Tile, ...]] = {
    ("gfx950", "mxfp4"): (
        Tile(256, 128, 256, warps=8, stages=2),
        Tile(128, 128, 256, warps=4, stages=2),
    ),
    ("gfx950", "mxfp8"): (
        Tile(256, 128, 128, warps=8, stages=2),
        Tile(128, 128, 128, warps=4, stages=2),
    ),
}
"""(architecture, format) → tiles, the largest first. Missing entries have no native instruction."""
for _format in FORMATS:
    for _arch in ("sm_90", "sm_120"):
        TILES[_arch, _format] = (Tile(128, 128, 128, warps=8),)
    for _arch in ("sm_100", "sm_103"):
        _small = (128, 128, 128, 8) if _format == "mxfp8" else (128, 128, 256, 4)
        TILES[_arch, _format] = (Tile(128, 256, 128, warps=8), Tile(*_small))

INTERPRETED = Tile(128, 128, 256, warps=4)


def refusal(policy: OperandPolicy) -> str | None:
    """Say why the kernel does not support this policy; None if it does."""
    if policy.format not in (*BLOCK, *FP8):
        return f"format '{policy.format}'"
    if "triton" not in policy.scale_rule.kernels:
        return f"scale '{policy.scale}'"
    if policy.undo == "operand":
        return "undo 'operand'"
    if policy.hadamard > _LARGEST_HADAMARD:
        return f"hadamard {policy.hadamard}"
    return None


@lru_cache(maxsize=512)
def side_of(policy: OperandPolicy | None, output: str) -> Side:
    """Turn a policy into the compile-time constants of one side of the kernel; None: the side is off."""
    if policy is None:
        policy = OperandPolicy(format="mxfp4")
        output = "off"
    element = ELEMENTS[policy.format]
    rule = policy.scale_rule
    signs = "none"
    if policy.signs == "fixed" and policy.hadamard == len(FIXED_16):
        signs = "fixed"
    elif policy.signs != "none":
        signs = "drawn"
    each_step, each_call = redrawn(policy)
    return Side(
        output=output,
        family=rule.family,
        rows=block_shape(policy)[0],
        block=BLOCK.get(policy.format, 32),
        scale_add=SCALE_ADD[policy.scale](element) if rule.family == "e8m0" else 0,
        element=element,
        bits=BITS.get(policy.format, 8),
        rounding=policy.rounding,
        prescale=policy.prescale,
        measure=rule.measure,
        error_divisor=four_six_divisor(policy),
        hadamard=policy.hadamard,
        norm=1.0 / math.sqrt(policy.hadamard or 1),
        rotated_bf16=policy.rotated_bf16,
        mask=policy.mask,
        draws=policy.is_stochastic or rule.is_stochastic,
        signs=signs,
        sign_bits=sum(1 << place for place, sign in enumerate(FIXED_16) if sign < 0),
        permute=policy.permute,
        each_step=each_step,
        each_call=each_call,
    )


@lru_cache(maxsize=512)
def scale_constants(policy: OperandPolicy) -> dict[str, Any]:
    """Return the compile-time constants of the kernel that computes a tensor's scale."""
    return {
        "LARGEST": largest_of(policy),
        "PRESCALE": policy.prescale,
        "EDEN": policy.scale_rule.family == "ms_eden",
    }


_H200: dict[str, dict[str, tuple[int, int, int]]] = {
    "nearest": {"rows": (16, 64, 2), "columns": (32, 64, 2), "both": (32, 64, 2)},
    "drawn": {"rows": (64, 64, 4), "columns": (32, 64, 2), "both": (32, 64, 4)},
    "errors": {"rows": (16, 64, 4), "columns": (32, 64, 4)},
    "tensor": {"rows": (32, 64, 4), "columns": (64, 64, 4)},
}
"""Kind of policy → axis → the fastest (rows, columns, warps) of those timed on an H200 with torch 2.11 and
Triton 3.6, 8192 × 4096 bf16 to values."""


_KINDS = ("errors", "drawn", "tensor", "nearest")
"""The kinds of work; the slower one of two sides decides."""


def _kind(policy: OperandPolicy) -> str:
    """Name the kind of work on which a tile's speed depends."""
    family = policy.scale_rule.family
    if family in ("four_six", "ms_eden"):
        return "errors"
    if policy.is_stochastic or policy.hadamard:
        return "drawn"
    return "tensor" if family == "tensor" else "nearest"


def tile(
    rows: OperandPolicy | None, columns: OperandPolicy | None, arch: str
) -> tuple[int, int, int]:
    """Choose (rows, columns, warps) of one program's tile: whole groups along both axes."""
    if interpreting():  # a program costs milliseconds there, whatever its size
        return 128, 128, 4
    sides = [policy for policy in (rows, columns) if policy]
    axis = "both"
    if rows is None:
        axis = "columns"
    elif columns is None:
        axis = "rows"
    kind = min(map(_kind, sides), key=_KINDS.index)
    # 64 columns are one round of the random stream's layout.
    tall, wide, warps = (32 if axis == "rows" else 64, 64, 0)
    if arch == "sm_90" and axis in _H200[kind]:
        tall, wide, warps = _H200[kind][axis]
    for policy in sides:
        tall = max(tall, block_shape(policy)[0])
    if columns:
        tall = max(tall, columns.hadamard)
    if rows:
        wide = max(wide, rows.hadamard)
    # 32 elements a thread on NVIDIA, 16 for rules that hold more values of each: no spills.
    if not warps or tall * wide > 64 * 64:
        warps = min(max(tall * wide // (512 if kind == "errors" else 1024), 4), 8)
    return tall, wide, warps


def choose_tile(arch: str, fmt: str, m: int, n: int, processors: int) -> Tile:
    """Choose the largest tile that gives every processor of the device a program, else the smallest."""
    sizes = TILES[arch, fmt]
    for size in sizes:
        if -(-m // size.bm) * -(-n // size.bn) >= processors:
            return size
    return sizes[-1]
