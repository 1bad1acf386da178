"""Recipes: the policies of all six operands, and the short forms that study files use."""

from ablate.recipes.describe import describe, describe_gemm, describe_layer
from ablate.recipes.place import (
    block_shape,
    features_fault,
    group_size,
    row_group,
    token_group,
)
from ablate.recipes.policy import (
    GEMMS,
    OPERANDS,
    Deoscillate,
    Format,
    Gemm,
    GemmPolicy,
    LayerRecipe,
    LayerRule,
    OperandPolicy,
    Phase,
    Recipe,
)
from ablate.recipes.presets import PRESETS, Preset
from ablate.recipes.short import (
    SHORT_RECIPES,
    AnyRecipe,
    LayerRecipeSpec,
    RecipeSpec,
    SenselessRecipe,
    read_recipe,
    resolve,
)

__all__ = [
    "GEMMS",
    "OPERANDS",
    "PRESETS",
    "SHORT_RECIPES",
    "AnyRecipe",
    "Deoscillate",
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
    "SenselessRecipe",
    "block_shape",
    "describe",
    "describe_gemm",
    "describe_layer",
    "features_fault",
    "group_size",
    "read_recipe",
    "resolve",
    "row_group",
    "token_group",
]
