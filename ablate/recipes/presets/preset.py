"""The preset class, and a helper for several families of presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.recipes.policy import GemmPolicy, OperandPolicy

if TYPE_CHECKING:
    from ablate.recipes.policy import Recipe
    from ablate.recipes.sources import Source


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named recipe. ``published`` is stated by the source; ``assumed`` is our choice."""

    name: str
    summary: str
    source: Source
    recipe: Recipe
    published: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def both(**fields: Any) -> GemmPolicy:
    """Build a GEMM whose two operands have the same fields."""
    return GemmPolicy(left=OperandPolicy(**fields), right=OperandPolicy(**fields))
