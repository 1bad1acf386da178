"""Recipes as the flags of others' trainers, by the tables of their stacks."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml

from ablate.integrations import applied_line
from ablate.recipes import SHORT_RECIPES, read_recipe
from ablate.recipes.stacks import STACKS, flags_for
from tests.golden import check_text

GOLDEN = Path(__file__).with_name("stacks.yaml")
"""What each stack says of each recipe: the named ones, and those that are written there as mappings."""


def flags_or_reason(recipe, stack):
    try:
        flags = flags_for(read_recipe(recipe), stack, steps=1000)
    except ValueError as error:
        return f"refused: {error}"
    return " ".join(
        [*(f"{name}={value}" for name, value in flags.env.items()), *flags.args]
    )


def test_every_recipe_has_flags_or_a_reason():
    known = yaml.safe_load(GOLDEN.read_text())
    written = (
        recipe
        for recipes in known.values()
        for recipe in recipes
        if recipe.startswith("{")
    )
    asked = dict.fromkeys((*SHORT_RECIPES, *written))
    answers = {
        stack: {recipe: flags_or_reason(recipe, stack) for recipe in asked}
        for stack in STACKS
    }
    check_text(GOLDEN, yaml.safe_dump(answers, sort_keys=False, width=200))


def test_resets_begin_at_a_step_that_must_be_known():
    recipe = read_recipe(
        {"preset": "primus-turbo", "deoscillate": {"from_fraction": 0.1}}
    )
    with pytest.raises(ValueError, match="part of unknown steps"):
        flags_for(recipe, "primus")


def test_a_phase_in_fp8_is_a_healing_after_a_step():
    flags = flags_for(read_recipe("rocm-te-healing"), "primus-bridge", steps=550)
    healing = {
        name: value for name, value in flags.env.items() if name.startswith("HEALING")
    }
    assert healing == {"HEALING_ITER": "340", "HEALING_PRECISION": "FP8_DS"}
    assert "not to the bit" in flags.notes[-1]
    at_a_count = {"from_tokens": 64, "recipe": {"rest": "fp8-delayed"}}
    for phase, lack in (
        (at_a_count, "at a count of tokens"),
        ({"from_fraction": 0.5, "recipe": "fp8"}, "but one to fp8-delayed"),
    ):
        recipe = read_recipe({"preset": "rocm-te-mxfp4", "phases": [phase]})
        with pytest.raises(ValueError, match=lack):
            flags_for(recipe, "primus-bridge", steps=550)


FIRST = {
    # TransformerEngine's tags v2.8 to v2.18, release_v2.19 and 2.20.2: where each name appears first in
    # common/recipe/__init__.py, or pytorch/custom_recipes
    "quantizer_factory": "2.19",
    "NVTE_NVFP4_4OVER6": "2.17",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "2.16",
    "NVTE_BACKWARD_OVERRIDE": "2.15",
    "nvfp4": "2.8",
}


@pytest.mark.parametrize("stack", ["megatron-te", "megatron-bridge"])
def test_flags_say_the_first_version_that_knows_all_of_them(stack):
    for recipe, text in yaml.safe_load(GOLDEN.read_text())[stack].items():
        newest = next((first for name, first in FIRST.items() if name in text), None)
        if newest is not None and not text.startswith("refused"):
            flags = flags_for(read_recipe(recipe), stack)
            assert flags.needs == {"transformer-engine": newest}


@pytest.mark.parametrize(
    ("stated", "installed", "present"),
    [
        ("nemo:26.08 transformer-engine==2.9.1", "2.17.0", "2.9.1"),
        ("nemo:25.11", "2.15.0", "2.15.0"),
        ("transformer-engine==2.16.0.dev0+abc", None, None),
    ],
)
def test_a_version_below_is_refused_as_stated_else_as_installed(
    stated, installed, present, monkeypatch
):
    def version(package):
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("ablate.recipes.stacks.version", version)
    fault = flags_for(read_recipe("te-nvfp4-row"), "megatron-te").too_old(stated)
    expected = (
        present
        and f"transformer-engine {present} is too old: the flags work from 2.16 on"
    )
    assert fault == expected


LOGS = yaml.safe_load(Path(__file__).with_name("stack_logs.yaml").read_text())


@pytest.mark.parametrize("stack", LOGS)
def test_a_log_tells_a_run_in_fp4_from_one_that_fell_back(stack):
    log = LOGS[stack]
    flags = flags_for(read_recipe(log["recipe"]), stack.split(",")[0], steps=550)
    assert flags.expect

    def matches(pattern, lines):
        return any(re.search(pattern, line) for line in log[lines])

    for pattern in flags.expect:
        assert matches(pattern, "in_fp4")
        assert not matches(pattern, "fell_back")
    for pattern in flags.refuse:
        assert matches(pattern, "fell_back")
        assert not matches(pattern, "in_fp4")


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "primus-bridge"])
def test_a_log_in_high_precision_needs_no_proof(stack):
    high = flags_for(read_recipe("bf16"), stack)
    assert not high.expect
    assert not high.refuse


def test_a_factory_of_ours_says_that_its_recipe_is_followed():
    recipe = read_recipe({"gemms": ["wgrad"], "format": "nvfp4"})
    (pattern,) = flags_for(recipe, "megatron-te").expect
    assert re.search(pattern, applied_line(recipe))
