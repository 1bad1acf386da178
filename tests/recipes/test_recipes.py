"""Recipes as study files write them, and what becomes of them; the published ones against their operands.

``recipes.txt`` has recipes, each with a line that describes it, or says where and how it contradicts itself.
Where lines are meant to change, ``REWRITE=1`` writes them anew. ``presets.yaml`` has the published recipes in
full: what each operand was held against its publication with.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from ablate.recipes import (
    PRESETS,
    RecipeSpec,
    SenselessRecipe,
    describe,
    read_recipe,
    resolve,
)
from ablate.recipes.short import as_written
from tests.golden import check_answers

HERE = Path(__file__).parent
YAML_1_2 = YAML(typ="safe", pure=True)
PUBLISHED = YAML_1_2.load(HERE / "presets.yaml")
EQUAL = {"rocm-te-mxfp4": "amd-fdw", "rocm-te-mxfp4-h16": "amd-fdw-dht16"}
"""Code that does what a paper describes."""


def recipe(written):
    return resolve(TypeAdapter(RecipeSpec).validate_python(written))


def outcome(line):
    if line.startswith("#"):
        return
    try:
        yield describe(
            recipe(YAML_1_2.load(line.replace("ALL", "[fprop, dgrad, wgrad]")))
        )
    except SenselessRecipe as fault:
        yield f"{'.'.join(map(str, fault.path))}: {fault}"


def test_each_recipe_has_its_line():
    check_answers(HERE / "recipes.txt", outcome)


def test_a_recipe_is_read_from_text():
    assert read_recipe(" {gemms: [wgrad]}") == recipe({"gemms": ["wgrad"]})
    with pytest.raises(
        ValueError, match=r"^a recipe cannot be '\{gemms: \[': not valid YAML$"
    ):
        read_recipe("{gemms: [")
    with pytest.raises(
        ValueError,
        match=r"^hadamard_size: expected a Hadamard of this size, got none \(write",
    ):
        read_recipe({"gemms": ["wgrad"], "stabiliser": "sr", "hadamard_size": 32})


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_recipe_is_what_was_published(name):
    preset = PRESETS[name]
    assert preset.recipe == recipe({"preset": name}) == recipe(PUBLISHED[name])
    assert recipe(as_written(preset.recipe)) == preset.recipe
    written = json.loads(json.dumps(dataclasses.asdict(preset.recipe)))
    assert read_recipe(written) == read_recipe(preset.recipe.text) == preset.recipe
    assert preset.source.url.startswith("https://")
    assert preset.published
    assert re.fullmatch(r"20\d\d(-\d\d){0,2}", preset.source.date)
    assert re.fullmatch(
        r"(read in|bits compared with) (?!.* at [0-9a-f]{12}(?! \(20)).+",
        preset.checked,
    )


def test_no_two_published_recipes_are_the_same_or_described_alike():
    assert list(PRESETS) == list(PUBLISHED)
    lines = {describe(preset.recipe) for preset in PRESETS.values()}
    for name, paper in EQUAL.items():
        assert PRESETS[name].recipe == PRESETS[paper].recipe
    assert (
        len(lines)
        == len({preset.recipe for preset in PRESETS.values()})
        == len(PRESETS) - len(EQUAL)
    )
    assert max(map(len, lines)) < 230
