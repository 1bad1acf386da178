"""Forward passes of a quantised model as if its linear layers were all in bf16, for evaluations.

The weights are those that training holds, unrounded. Nothing random is drawn, and nothing that training reads
changes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ablate.layers.linear import quantised_layers
from ablate.recipes import LayerRecipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_BF16 = LayerRecipe()


@contextmanager
def forward_in_bf16(model: nn.Module) -> Iterator[None]:
    """Within this context every quantised layer computes in bf16, whatever its recipe says."""
    layers = quantised_layers(model).values()
    for layer in layers:
        layer.override = _BF16
    try:
        yield
    finally:
        for layer in layers:
            layer.override = None


def is_forward_in_bf16(model: nn.Module, tokens: int) -> bool:
    """Whether Fprop of every quantised layer is plain bf16 by its own recipe after this many tokens."""
    return all(layer.recipe_at(tokens).fprop.is_untouched for layer in quantised_layers(model).values())
