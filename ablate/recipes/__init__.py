"""Recipes: the policies of all six operands, and the short forms that study files use."""

from ablate.recipes.build import SenselessRecipe
from ablate.recipes.describe import describe, describe_gemm, describe_layer
from ablate.recipes.policy import (
    GEMMS,
    OPERANDS,
    Format,
    Gemm,
    GemmPolicy,
    LayerRecipe,
    LayerRule,
    OperandPolicy,
    Phase,
    Recipe,
    block_shape,
    group_size,
    row_group,
)
from ablate.recipes.presets import PRESETS, Preset
from ablate.recipes.short import (
    SHORT_RECIPES,
    LayerRecipeSpec,
    RecipeSpec,
    RecipeWord,
    expand_word,
    resolve,
)

__all__ = [
    "GEMMS",
    "OPERANDS",
    "PRESETS",
    "SHORT_RECIPES",
    "Format",
    "Gemm",
    "GemmPolicy",
    "LayerRecipe",
    "LayerRecipeSpec",
    "LayerRule",
    "OperandPolicy",
    "Phase",
    "Preset",
    "Recipe",
    "RecipeSpec",
    "RecipeWord",
    "SenselessRecipe",
    "block_shape",
    "describe",
    "describe_gemm",
    "describe_layer",
    "expand_word",
    "group_size",
    "resolve",
    "row_group",
]
