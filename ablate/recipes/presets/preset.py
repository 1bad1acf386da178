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


SNAPSHOTS = {
    "AMD-AGI/ALTO": "74e251d769ca",
    "AMD-AGI/Primus": "fd1eeabbad15",
    "AMD-AGI/Primus-Turbo": "a6a16cdce46b",
    "IST-DASLab/CloverLM": "806f17598423",
    "IST-DASLab/Quartet": "00ccd38e544a",
    "IST-DASLab/Quartet-II": "8776a90b7aa0",
    "NVIDIA/TransformerEngine": "d0067d0da6cb",
    "amazon-science/mxfp4-llm": "0cc57fecd911",
    "microsoft/microxcaling": "7bc41952de39",
    "mit-han-lab/fouroversix": "dadfad6901d4",
    "pytorch/ao": "36027d82d1ad",
    "thu-ml/TetraJet-v2-NVFP4Training": "ca5953f643d8",
}
"""The versions of public code that the presets were checked against (12 digits of the commit)."""


def compared(repository: str, path: str) -> str:
    """Say that bits were compared with this file, which ``benchmarks/oracles.py`` runs."""
    return f"bits compared with {repository} at {SNAPSHOTS[repository]}, {path}"


def read_in(repository: str, path: str) -> str:
    """Say that this file was read, but could not be run for a comparison."""
    return f"read in {repository} at {SNAPSHOTS[repository]}, {path}"


@dataclass(frozen=True)
class Preset:
    """A named recipe. ``published`` is stated by the source; ``assumed`` is our choice.

    ``checked``: the file, with its version, that its numbers were held against.
    """

    name: str
    summary: str
    source: Source
    recipe: Recipe
    published: tuple[str, ...]
    assumed: tuple[str, ...] = ()
    checked: str = "read in the publication"


def both(**fields: Any) -> GemmPolicy:
    """Build a GEMM whose two operands have the same fields."""
    return GemmPolicy(left=OperandPolicy(**fields), right=OperandPolicy(**fields))
