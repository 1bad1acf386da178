"""Recipes: the policies of all six operands, and the short forms that study files use."""

from ablate.recipes.build import SenselessRecipe
from ablate.recipes.describe import describe, describe_gemm, describe_layer
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
from ablate.recipes.read import read_recipe
from ablate.recipes.short import (
    SHORT_RECIPES,
    LayerRecipeSpec,
    RecipeSpec,
    RecipeWord,
    expand_word,
    resolve,
)
from ablate.recipes.sizes import (
    block_shape,
    features_fault,
    group_size,
    row_group,
    scale_columns,
    token_group,
)

__all__ = [
    "GEMMS",
    "OPERANDS",
    "PRESETS",
    "SHORT_RECIPES",
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
    "RecipeWord",
    "SenselessRecipe",
    "block_shape",
    "describe",
    "describe_gemm",
    "describe_layer",
    "expand_word",
    "features_fault",
    "group_size",
    "read_recipe",
    "resolve",
    "row_group",
    "scale_columns",
    "token_group",
]
