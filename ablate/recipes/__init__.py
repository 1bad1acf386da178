"""Recipes: the policies of all six operands, and the short forms that study files use."""

from ablate.recipes.policy import GEMMS, MX_BLOCK, Format, Gemm, GemmPolicy, OperandPolicy, Recipe, group_size
from ablate.recipes.short import SHORT_RECIPES, RecipeSpec, SenselessRecipe, describe, resolve

__all__ = [
    "GEMMS",
    "MX_BLOCK",
    "SHORT_RECIPES",
    "Format",
    "Gemm",
    "GemmPolicy",
    "OperandPolicy",
    "Recipe",
    "RecipeSpec",
    "SenselessRecipe",
    "describe",
    "group_size",
    "resolve",
]
