"""A recipe as the text of an option of the command line: a word, or a mapping in YAML.

How it fails: ``UserError`` with one line that names the option.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ablate.base.errors import UserError, first_line, likely
from ablate.recipes import SHORT_RECIPES, Recipe, read_recipe


def recipe_of(text: str, *, option: str = "--recipe") -> Recipe:
    """Return the recipe that the text of an option says."""
    value: Any = text
    if text.lstrip().startswith("{"):
        try:
            value = YAML(typ="safe").load(text)
        except YAMLError as error:
            raise UserError(f"{option}: is not YAML: {first_line(error)}") from None
    elif text not in SHORT_RECIPES:
        hint = likely(text, SHORT_RECIPES, "`ablate recipes` lists them; or a mapping {…}")
        raise UserError(f"{option}: unknown recipe '{text}' ({hint})")
    try:
        return read_recipe(value)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
