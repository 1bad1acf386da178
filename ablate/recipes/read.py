"""A recipe from Python or from the command line: a word, or a mapping as a study writes it.

A study file's own recipes are read with the whole file, so that each fault has its line.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import likely, one_of
from ablate.recipes.short import SHORT_RECIPES, RecipeSpec, expand_word, resolve

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.recipes.policy import Recipe


def read_recipe(given: Any) -> Recipe:
    """Return the recipe that a word or a mapping stands for.

    Raises:
        ValueError: an unknown word or key, with the valid ones, or parts that contradict each other.
        TypeError: neither a word nor a mapping.
    """
    words = f"expected {one_of([*SHORT_RECIPES, 'a mapping'])}"
    if isinstance(given, str) and given not in SHORT_RECIPES:
        raise ValueError(f"unknown recipe '{given}' ({likely(given, SHORT_RECIPES, words)})")
    if not isinstance(given, str | dict):
        raise TypeError(f"a recipe cannot be {given!r} ({words})")
    try:
        return resolve(TypeAdapter(RecipeSpec).validate_python(expand_word(given)))
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    """Say what is wrong with a recipe's mapping in one line."""
    fault = error.errors()[0]
    place = list(map(str, fault["loc"]))
    words: Collection[str] = fault.get("ctx", {}).get("words", ())
    what, asked = fault["msg"], str(fault["input"])
    if fault["type"] == "unexpected_keyword_argument" and len(place) == 1:
        what, asked, words = "unknown key", place[0], [field.name for field in fields(RecipeSpec)]
    hint = f" ({likely(asked, words, f'expected {one_of(list(words))}')})" if words else ""
    return f"{'.'.join(place)}: {what}{hint}"
