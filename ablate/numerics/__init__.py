"""FP4 numerics: operand policies, quantisers, rotations, random streams and the quantised linear layer."""

from ablate.numerics.hadamard import hadamard_last, hadamard_matrix
from ablate.numerics.philox import Key
from ablate.numerics.quantize import Codes, Quantized, fake_quantize, quantize, round_operand
from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy, Recipe

__all__ = [
    "Codes",
    "GemmPolicy",
    "Key",
    "LayerRecipe",
    "OperandPolicy",
    "Quantized",
    "Recipe",
    "fake_quantize",
    "hadamard_last",
    "hadamard_matrix",
    "quantize",
    "round_operand",
]
