"""What contradicts itself in a policy, a GEMM or a layer's recipe, in words; torch-free and without state.

Silence would let an arm be another one under a false name, so each fault names both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.recipes.policy import GemmPolicy, LayerRecipe, OperandPolicy

_E8M0 = ("floor", "even", "rceil", "ceil", "quest")
_FP32 = ("tensor", "delayed", "row", "1x128", "128x128")
SCALES: dict[str, tuple[str, ...]] = {
    "bf16": ("none",),
    "fp16": ("none",),
    "fp8_e4m3": _FP32,
    "fp8_e5m2": _FP32,
    "mxfp8": _E8M0[:4],
    "mxfp6_e3m2": _E8M0[:4],
    "mxfp6_e2m3": _E8M0[:4],
    "mxfp4": (*_E8M0, "uos"),
    "mxfp4_e3m0": _E8M0[:4],
    "nvfp4": ("two_level", "four_six", "ms_eden"),
    "fp4_e2m1": ("tensor", "row", "searched"),
    "fp4_e3m0": ("tensor", "row", "searched"),
}
"""The scale rules that each format can take; the first is its default."""

DEFAULT_SCALE = {name: scales[0] for name, scales in SCALES.items()}
BLOCKS: dict[str, tuple[str, ...]] = {
    **{name: ("1x32", "32x32") for name in SCALES if name.startswith("mx")},
    "nvfp4": ("1x16", "16x16"),
}
"""The block layouts of each format that has block scales; the first is its default."""
DEFAULT_BLOCK = {name: blocks[0] for name, blocks in BLOCKS.items()}


def operand_fault(policy: OperandPolicy) -> str | None:
    """Return what contradicts itself in one operand's policy, or None."""
    p = policy
    if p.scale not in SCALES[p.format]:
        return f"scale '{p.scale}' on {p.format} (it takes {', '.join(SCALES[p.format])})"
    blocks = BLOCKS.get(p.format, ("none",))
    if p.block not in blocks:
        return f"block '{p.block}' on {p.format} (it takes {', '.join(blocks)})"
    plain = p.format in ("bf16", "fp16")
    if plain and (p.rounding != "nearest" or p.prescale != 1.0 or p.mask or p.source != "high_precision"):
        return f"rounding, prescale, mask or source on {p.format}, which is high precision"
    if not 0 < p.prescale <= 1:
        return f"prescale {p.prescale} (above 0, at most 1)"
    if p.prescale != 1.0 and p.rounding == "nearest":
        return f"prescale {p.prescale} with nearest rounding (it keeps stochastic rounding from clipping)"
    if p.undo == "operand" and p.prescale == 1.0:
        return "undo 'operand' without a prescale to undo"
    if p.rounding == "stochastic_rocm" and p.format != "mxfp4":
        return f"rounding 'stochastic_rocm' on {p.format} (it is that of a kernel for mxfp4)"
    if p.scale == "ms_eden" and (p.rounding != "nearest" or not p.hadamard or p.block != "1x16"):
        return "scale 'ms_eden' needs a Hadamard, nearest elements (its scales are stochastic) and block 1x16"
    if p.scale == "delayed" and p.hadamard:
        return "scale 'delayed' under a Hadamard (its history is of values that are not rotated)"
    if p.scale == "quest" and p.block == "32x32":
        return "scale 'quest' on block 32x32 (it is of one row)"
    if not p.hadamard:
        parts = {"signs": p.signs != "none", "permute": p.permute, "rotated_bf16": p.rotated_bf16}
        for name in (name for name, given in parts.items() if given):
            return f"{name} without a Hadamard"
    if p.permute and p.signs == "none":
        return "permute without signs (a permutation is drawn with them)"
    if p.signs_after and p.signs == "none":
        return "signs_after without signs"
    if p.mask and p.format != "mxfp4":
        return f"mask on {p.format} (it is that of a clipped mxfp4 forward operand)"
    return None


def gemm_fault(policy: GemmPolicy) -> str | None:
    """Return what contradicts itself between the two operands of a GEMM, or None."""
    left, right = policy.left, policy.right
    for name in ("hadamard", "signs", "signs_after", "permute"):
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            return f"{name} {a} on one operand and {b} on the other: the rotation would not cancel"
    return None


def layer_fault(recipe: LayerRecipe) -> str | None:
    """Return what contradicts itself between the GEMMs of a layer, or None."""
    forward, backward = recipe.fprop.right, recipe.dgrad.right
    square = ("32x32", "16x16", "128x128")
    shared = forward.block in square or forward.scale in square
    same_tile = shared and (backward.block, backward.scale) == (forward.block, forward.scale)
    if same_tile and (forward.hadamard or backward.hadamard):
        return (
            "a square weight tile under a Hadamard: Fprop rotates it along in-features and Dgrad along "
            "out-features, so one tile cannot serve both"
        )
    for gemm, operand, policy in recipe.operands():
        masked = policy.mask
        doubly = policy.source == "forward"
        if masked and gemm != "fprop":
            return f"mask on {gemm}.{operand} (it is of forward operands)"
        if doubly and (gemm, operand) not in (("dgrad", "w"), ("wgrad", "x")):
            return f"source 'forward' on {gemm}.{operand}, which the forward GEMM does not use"
        if doubly:
            source = recipe.fprop.right if operand == "w" else recipe.fprop.left
            if source.format in ("bf16", "fp16"):
                return f"source 'forward' on {gemm}.{operand}, but Fprop's {operand} is in {source.format}"
    for forward, backward, name in (
        (recipe.fprop.left, recipe.wgrad.right, "x"),
        (recipe.fprop.right, recipe.dgrad.right, "w"),
    ):
        if forward.mask and forward.hadamard and backward.source != "forward":
            return f"mask on fprop.{name} under a Hadamard needs source 'forward' on its backward operand"
    return None
