"""The preset class, its source, and a helper for several families of presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.recipes.policy import GemmPolicy, OperandPolicy

if TYPE_CHECKING:
    from ablate.recipes.policy import Recipe


@dataclass(frozen=True)
class Source:
    """One publication."""

    authors: str
    title: str
    url: str
    year: int


def arxiv(number: str, authors: str, title: str) -> Source:
    """Build the source of a paper on arXiv, whose number begins with the year."""
    return Source(authors, title, f"https://arxiv.org/abs/{number}", 2000 + int(number[:2]))


def github(repository: str, authors: str, title: str, year: int = 2026) -> Source:
    """Build the source of published code."""
    return Source(authors, title, f"https://github.com/{repository}", year)


@dataclass(frozen=True)
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
