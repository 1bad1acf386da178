"""A recipe as the text of an option of the command line: a word, or a mapping in YAML; and other mappings.

How it fails: ``UserError`` with one line that names the option.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import UserError, likely
from ablate.recipes import SHORT_RECIPES, Recipe, RecipeSpec, SenselessRecipe, read_recipe, resolve
from ablate.study.faults import Faults
from ablate.study.source import follow, parse


def mapping_of(text: str, *, option: str) -> dict[str, Any]:
    """Return the mapping that the text of an option says."""
    if not text.strip().startswith("{"):
        raise UserError(f"{option}: expected a mapping in braces, as {{width: 512}}, got '{text}'")
    source = parse(text.encode(), option)
    if source.problems:
        raise UserError(*source.problems)
    found: dict[str, Any] = source.data
    return found


def recipe_of(text: str, *, option: str = "--recipe") -> Recipe:
    """Return the recipe that the text of an option says; a mapping's faults are told as those of a file."""
    text = text.strip()
    if text in SHORT_RECIPES:
        return read_recipe(text)
    if not text.startswith("{"):
        otherwise = "`ablate recipes` lists them; or a mapping in braces, as {gemms: [wgrad]}"
        raise UserError(f"{option}: unknown recipe '{text}' ({likely(text, SHORT_RECIPES, otherwise)})")
    source = parse(text.encode(), option)
    faults = Faults(source)
    try:
        recipe = resolve(TypeAdapter(RecipeSpec).validate_python(source.data))
    except ValidationError as error:
        faults.add_validation(error, (), section=RecipeSpec)
    except SenselessRecipe as error:
        faults.add(error.path[: follow(source.data, error.path)[1]], str(error), error.hint)
    if faults:
        raise UserError(*(replace(fault, line=None, column=None) for fault in faults.problems()))
    return recipe
