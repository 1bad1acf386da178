"""Recipes as the flags of others' trainers, by the tables of their stacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ablate.recipes import PRESETS, SHORT_RECIPES, read_recipe
from ablate.recipes.stacks import STACKS, flags_for
from tests.golden import check_text

GOLDEN = Path(__file__).with_name("stacks.yaml")
"""What each stack says of each recipe: the named ones, and those that are written there as mappings."""


def told(recipe, stack):
    try:
        flags = flags_for(read_recipe(recipe), stack, steps=1000)
    except ValueError as error:
        return f"refused: {error}"
    return " ".join([*(f"{name}={value}" for name, value in flags.env.items()), *flags.args])


def test_every_recipe_has_flags_or_a_reason():
    known = yaml.safe_load(GOLDEN.read_text())
    written = (one for recipes in known.values() for one in recipes if one.startswith("{"))
    asked = dict.fromkeys((*SHORT_RECIPES, *written))
    found = {stack: {one: told(one, stack) for one in asked} for stack in STACKS}
    check_text(GOLDEN, yaml.safe_dump(found, sort_keys=False, width=200))


@pytest.mark.parametrize("stack", STACKS)
def test_two_recipes_never_have_the_same_flags(stack):
    flags = [told(name, stack) for name in PRESETS]
    # Where the flags name our own code, it reads the recipe itself.
    known = [text for text in flags if not text.startswith("refused") and "ablate.integrations" not in text]
    assert len(set(known)) == len(known)


def test_resets_begin_at_a_step_that_must_be_known():
    recipe = read_recipe({"preset": "primus-turbo", "deoscillate": {"from_fraction": 0.1}})
    with pytest.raises(ValueError, match="step at which the resets begin is not known"):
        flags_for(recipe, "primus")


def test_a_stack_that_falls_back_to_bf16_is_found_out():
    assert flags_for(read_recipe("primus-turbo"), "primus").refuse == ("FP4 .* not work",)
    assert not flags_for(read_recipe("bf16"), "primus").refuse
