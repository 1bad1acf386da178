"""The policies that the Triton quantiser supports, and their constants: plain data, without Triton."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ablate.backends.availability import interpreting
from ablate.backends.quantisers.packed import BLOCK
from ablate.numerics.formats import ELEMENTS, SCALE_ADD

if TYPE_CHECKING:
    from ablate.recipes import OperandPolicy

OFF, CODES, VALUES = 0, 1, 2
"""Output of one side of the kernel: nothing; codes and scale bytes, contraction last; dequantised bf16."""
E8M0, TWO_LEVEL, TENSOR = 0, 1, 2
"""Scales: E8M0 per block; NVFP4's E4M3 per block and fp32 for the tensor; fp32 for the tensor."""

_LARGEST_HADAMARD = 128
_TILE = 64
BITS = {"mxfp4": 4, "mxfp4_e3m0": 4, "nvfp4": 4, "mxfp6_e3m2": 6, "mxfp6_e2m3": 6}


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
        return {
            "OUTPUT": 0, "RULE": 0, "BLOCK": 32, "SCALE_ADD": 0, "MANTISSA": 1, "E_MIN": 0, "E_MAX": 2,
            "MAX": 6.0, "BITS": 4, "STOCHASTIC": False, "PRESCALE": 1.0, "HADAMARD": 0, "NORM": 1.0,
            "ROTATED_BF16": False,
        }  # fmt: skip
    element = ELEMENTS[policy.format]
    rules = {"two_level": TWO_LEVEL}
    rules |= dict.fromkeys(("tensor", "delayed"), TENSOR)
    return {
        "OUTPUT": output,
        "RULE": rules.get(policy.scale, E8M0),
        "BLOCK": BLOCK.get(policy.format, 32),
        "SCALE_ADD": SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
        "MANTISSA": element.mantissa_bits,
        "E_MIN": element.min_exponent,
        "E_MAX": element.max_exponent,
        "MAX": element.max,
        "BITS": BITS.get(policy.format, 8),
        "STOCHASTIC": policy.rounding == "stochastic",
        "PRESCALE": policy.prescale,
        "HADAMARD": policy.hadamard,
        "NORM": 1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0,
        "ROTATED_BF16": policy.rotated_bf16,
    }


def tile(policies: list[OperandPolicy | None]) -> tuple[int, int]:
    """Return (rows, columns) of one program's tile: whole groups along both axes."""
    rows, columns = policies
    if interpreting():  # a program costs milliseconds there, whatever its size
        return 128, 128
    # 64 columns are one round of the random stream's layout; a side that is off has no constraints.
    wide = max(_TILE, rows.hadamard if rows else 0)
    tall = max(32 if rows and not columns else _TILE, columns.hadamard if columns else 0)
    return tall, wide
