"""What a preset is, and what several families of them are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.recipes.policy import GemmPolicy, OperandPolicy

if TYPE_CHECKING:
    from ablate.recipes.policy import Recipe
    from ablate.recipes.sources import Source


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named recipe. ``published`` is what the source states, ``assumed`` what we had to choose."""

    name: str
    summary: str
    source: Source
    recipe: Recipe
    published: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def both(**fields: Any) -> GemmPolicy:
    """Return a GEMM whose two operands have these fields."""
    return GemmPolicy(left=OperandPolicy(**fields), right=OperandPolicy(**fields))
