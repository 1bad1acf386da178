"""FP4 numerics: operand policies, quantisers, rotations, random streams and the quantised linear layer."""

from typing import TYPE_CHECKING, Any

from ablate.layers.state import RecipeState
from ablate.numerics.hadamard import hadamard_last, hadamard_matrix
from ablate.numerics.philox import Key
from ablate.numerics.quantize import Codes, Quantized, fake_quantize, quantize, round_operand
from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy, Recipe

if TYPE_CHECKING:
    from ablate.layers.apply import apply_recipe

__all__ = [
    "Codes",
    "GemmPolicy",
    "Key",
    "LayerRecipe",
    "OperandPolicy",
    "Quantized",
    "Recipe",
    "RecipeState",
    "apply_recipe",
    "fake_quantize",
    "hadamard_last",
    "hadamard_matrix",
    "quantize",
    "round_operand",
]


def __getattr__(name: str) -> Any:
    # Not at the top: it needs the back ends, which need this package.
    if name == "apply_recipe":
        from ablate.layers.apply import apply_recipe

        return apply_recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
