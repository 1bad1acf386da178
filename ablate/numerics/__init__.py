"""FP4 numerics: operand policies, quantisers, rotations, random streams and the quantised linear layer."""

from ablate.numerics.hadamard import hadamard_last, hadamard_matrix
from ablate.numerics.philox import Key
from ablate.numerics.quantize import Quantized, fake_quantize, quantize
from ablate.recipes import GemmPolicy, OperandPolicy, Recipe

__all__ = [
    "GemmPolicy",
    "Key",
    "OperandPolicy",
    "Quantized",
    "Recipe",
    "fake_quantize",
    "hadamard_last",
    "hadamard_matrix",
    "quantize",
]
