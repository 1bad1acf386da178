"""FP4 numerics: operand policies, quantisers, rotations, random streams and the quantised linear layer.

The public names, each loaded on first use. The product's own modules import from the defining modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablate.layers.apply import apply_recipe
    from ablate.layers.state import RecipeState
    from ablate.numerics.philox import Key
    from ablate.numerics.quantiser import Codes, Quantized, fake_quantize, quantize, round_operand
    from ablate.numerics.rotate import hadamard_last, hadamard_matrix
    from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy, Recipe

_PLACES = {
    "ablate.layers.apply": ("apply_recipe",),
    "ablate.layers.state": ("RecipeState",),
    "ablate.numerics.philox": ("Key",),
    "ablate.numerics.quantiser": ("Codes", "Quantized", "fake_quantize", "quantize", "round_operand"),
    "ablate.numerics.rotate": ("hadamard_last", "hadamard_matrix"),
    "ablate.recipes": ("GemmPolicy", "LayerRecipe", "OperandPolicy", "Recipe"),
}

__all__ = [
    "Codes", "GemmPolicy", "Key", "LayerRecipe", "OperandPolicy", "Quantized", "Recipe", "RecipeState",
    "apply_recipe", "fake_quantize", "hadamard_last", "hadamard_matrix", "quantize", "round_operand",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(place), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
