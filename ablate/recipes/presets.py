"""Published recipes by name, each with its source, what the source states, and our assumptions.

``ablate recipes`` lists them, ``ablate recipes NAME`` prints all six operands. The table of
docs/numerics.md is generated from them; the page says what a name that ends in ``-code`` means, and what is
left out. ``presets.json`` has these keys for each:

``recipe``: as a study file writes it.
``like``: an earlier entry, which gives the keys that this one leaves out.
``source``: what describes it, and the date of that: the month of a paper, the day of a repository's commit.
``published``, ``assumed``: what the source states, and what is our choice.
``checked``: where it was read: a file with 12 digits of its commit and the day; by default the publication.
Bits were *compared with* what ``benchmarks/oracles.py`` runs; what could not be run was *read*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ablate.recipes.short import PUBLISHED, RecipeSpec, resolve

if TYPE_CHECKING:
    from ablate.recipes.policy import Recipe


@dataclass(frozen=True)
class Citation:
    """One publication; ``date``: its year, month or day, as in ISO 8601."""

    authors: str
    title: str
    url: str
    date: str


@dataclass(frozen=True)
class Preset:
    """A published recipe; ``written``: as a study file writes it."""

    name: str
    summary: str
    source: Citation
    written: dict[str, Any]
    published: list[str]
    assumed: list[str]
    checked: str

    @cached_property
    def recipe(self) -> Recipe:
        """Its operand policies."""
        return resolve(RecipeSpec(**self.written))


def _presets() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, written in PUBLISHED.items():
        entry: dict[str, Any] = {"assumed": [], "checked": "read in the publication"}
        entry |= entries.get(written.get("like", ""), {}) | written
        entries[name] = entry
        presets[name] = Preset(
            name=name,
            summary=entry["summary"],
            source=Citation(**entry["source"]),
            written=entry["recipe"],
            published=entry["published"],
            assumed=entry["assumed"],
            checked=entry["checked"],
        )
    return presets


PRESETS = _presets()
