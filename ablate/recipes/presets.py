"""Published recipes by name, each with its source, what the source states, and our assumptions.

``ablate recipes`` lists them, ``ablate recipes NAME`` prints all six operands. The table of
docs/numerics.md is generated from them; the page says what a name that ends in ``-code`` means, and what is
left out. ``presets.json`` has these keys for each:

``written``: the recipe, as a study file writes it.
``like``: an earlier entry, which gives the keys that this one leaves out.
``source``: what describes it, and the date of that: the month of a paper, the day of a repository's commit.
``published``, ``assumed``: what the source states, and what is our choice.
``checked``: where it was read: a file with 12 digits of its commit and the day; by default the publication.
Bits were *compared with* what ``benchmarks/oracles.py`` runs; what could not be run was *read*.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published recipe, by the keys of ``presets.json``."""

    name: str
    summary: str
    source: Citation
    written: dict[str, Any]
    published: list[str]
    assumed: list[str] = Field(default_factory=list)
    checked: str = "read in the publication"

    @cached_property
    def recipe(self) -> Recipe:
        """Its operand policies."""
        return resolve(RecipeSpec(**self.written))


PRESETS: dict[str, Preset] = {}
for _name, _entry in PUBLISHED.items():
    _keys = {**_entry, "name": _name}
    if "like" in _keys:
        _keys = vars(PRESETS[_keys.pop("like")]) | _keys
    PRESETS[_name] = Preset(**_keys)
