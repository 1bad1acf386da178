"""The numbers that must divide a layer's dimensions: those of blocks, square tiles and Hadamard groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.recipes.policy import CONTRACTED, other_dimension

if TYPE_CHECKING:
    from ablate.recipes.policy import Gemm, LayerRecipe, OperandPolicy


def block_shape(policy: OperandPolicy) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale, columns along the contraction axis; else (1, 1)."""
    shape = policy.block if policy.block != "none" else policy.scale
    if shape[0].isdigit():
        rows, columns = shape.removesuffix("_pow2").split("x")
        return int(rows), int(columns)
    return 1, 1


def scale_columns(policy: OperandPolicy) -> int:
    """Return the values along the contraction axis that share the coarsest of their block scales."""
    return 128 if policy.scale == "two_level_1x128" else block_shape(policy)[1]


def group_size(policy: OperandPolicy) -> int:
    """Return the size that must divide the contraction dimension under this policy."""
    return max(scale_columns(policy), policy.hadamard)  # both are powers of two


def token_group(recipe: LayerRecipe) -> int:
    """Return the number to whose multiples a layer's tokens are filled up with zeros.

    A block, tile or Hadamard group with such zeros has the same scale, but for ``quest``, whose standard
    deviation counts them; the zeros add nothing to a product.
    """
    groups = [1]
    for gemm, operand, policy in recipe.operands():
        if operand != "w":
            groups.append(group_size(policy) if CONTRACTED[gemm] == "M" else block_shape(policy)[0])
    return max(groups)


def features_fault(recipe: LayerRecipe, name: str, *, inputs: int, outputs: int) -> str | None:
    """Say which features of a layer a block, tile or Hadamard group does not divide; None if all fit."""
    if (found := unfit_features(recipe, inputs=inputs, outputs=outputs)) is None:
        return None
    side, size, divisor, gemm = found
    return f"{side} {size} of layer {name} is not a multiple of {divisor}, as {gemm.capitalize()} needs it"


def unfit_features(recipe: LayerRecipe, *, inputs: int, outputs: int) -> tuple[str, int, int, Gemm] | None:
    """Return the first features that a block, tile or Hadamard group does not divide, its size and GEMM."""
    sizes = {"K": (inputs, "in-features"), "N": (outputs, "out-features")}
    for gemm, operand, policy in recipe.operands():
        needs = {CONTRACTED[gemm]: group_size(policy), other_dimension(gemm, operand): block_shape(policy)[0]}
        for letter, (size, side) in sizes.items():
            if size % (divisor := needs.get(letter, 1)):
                return side, size, divisor, gemm
    return None


def row_group(recipe: LayerRecipe) -> int:
    """Return the number that must divide a layer's rows: the largest block or group of its operands."""
    return max(max(block_shape(policy)[0], group_size(policy)) for _, _, policy in recipe.operands())
