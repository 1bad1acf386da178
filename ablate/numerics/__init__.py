"""FP4 numerics: the public names of quantisers, rotations, random streams, policies and quantised layers.

The product's own modules import from the defining modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ablate.numerics.philox import Key
from ablate.numerics.quantiser import (
    Codes,
    Quantized,
    fake_quantize,
    quantize,
    round_operand,
)
from ablate.numerics.rotate import hadamard_last, hadamard_matrix
from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy, Recipe

if TYPE_CHECKING:
    from ablate.layers.apply import apply_recipe
    from ablate.layers.state import RecipeState, recompute_contexts

# These import this package, so they are loaded on first use.
_PLACES = {
    "apply_recipe": "ablate.layers.apply",
    "RecipeState": "ablate.layers.state",
    "recompute_contexts": "ablate.layers.state",
}

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
    "recompute_contexts",
    "round_operand",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
