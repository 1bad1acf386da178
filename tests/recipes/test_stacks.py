"""Recipes as the flags of others' trainers, by the tables of their stacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ablate.recipes import PRESETS, SHORT_RECIPES, read_recipe
from ablate.recipes.stacks import STACKS, flags_for, te_quantizers

GOLDEN = Path(__file__).with_name("stacks.yaml")
OTHERS = [
    *({"gemms": [gemm], "format": "nvfp4"} for gemm in ("fprop", "dgrad", "wgrad")),
    {"gemms": ["fprop", "dgrad"], "format": "nvfp4", "rest": "mxfp8"},
    {
        "gemms": ["fprop"], "format": "nvfp4", "scale": "four_six_mae", "rest": "bf16-dequantised",
        "fprop": {"x": {"scale": "four_six_mae_row"}},
    },
    {"preset": "nvidia-nvfp4", "layers": [{"match": "*.qkv", "recipe": "bf16"}]},
]  # fmt: skip


def told(recipe, stack):
    try:
        flags = flags_for(read_recipe(recipe), stack, steps=1000)
    except ValueError as error:
        return f"refused: {error}"
    return " ".join([*(f"{name}={value}" for name, value in flags.env.items()), *flags.args])


def test_every_recipe_has_flags_or_a_reason():
    found = {stack: {str(one): told(one, stack) for one in (*SHORT_RECIPES, *OTHERS)} for stack in STACKS}
    if "REWRITE" in os.environ:
        GOLDEN.write_text(yaml.safe_dump(found, sort_keys=False, width=200))
    assert found == yaml.safe_load(GOLDEN.read_text())


@pytest.mark.parametrize("stack", STACKS)
def test_two_recipes_never_have_the_same_flags(stack):
    flags = [told(name, stack) for name in PRESETS]
    # Where the flags name our own code, it reads the recipe itself.
    known = [text for text in flags if not text.startswith("refused") and "ablate.integrations" not in text]
    assert len(set(known)) == len(known)


def test_resets_begin_at_a_step():
    recipe = read_recipe({"preset": "primus-turbo", "deoscillate": {"window": 200, "from_fraction": 0.1}})
    args = flags_for(recipe, "primus", steps=15_000).args
    assert args[args.index("--weight_deosc_start_step") + 1] == "1500"
    with pytest.raises(ValueError, match="step at which the resets begin is not known"):
        flags_for(recipe, "primus")
    recipe = read_recipe({"preset": "primus-turbo", "deoscillate": {"from_tokens": 1_000_000}})
    with pytest.raises(ValueError, match="step at which the resets begin is not known"):
        flags_for(recipe, "primus", steps=15_000)


def test_a_stack_that_falls_back_to_bf16_is_found_out():
    assert flags_for(read_recipe("primus-turbo"), "primus").refuse == ("FP4 .* not work",)
    assert not flags_for(read_recipe("bf16"), "primus").refuse


REFUSED_BY_TE = {
    "a prescale": ({"gemms": ["dgrad"], "stabiliser": "sr"}, "prescale 0.75 on dgrad.dy"),
    "another scale": (
        {"gemms": ["fprop"], "format": "nvfp4", "scale": "four_six_max"},
        "scale 'four_six_max' on fprop.x",
    ),
    "four-or-six with stochastic rounding": (
        {"gemms": ["dgrad"], "format": "nvfp4", "scale": "four_six", "stabiliser": "sr", "prescale": 1.0},
        "stochastic rounding beside scale 'four_six' on dgrad.dy",
    ),
    "signs per step": (
        {"gemms": ["wgrad"], "format": "nvfp4", "stabiliser": "rht"},
        "Hadamard of 16 with signs 'step'",
    ),
    "a row scale in Wgrad alone": (
        {"gemms": ["wgrad"], "format": "nvfp4", "wgrad": {"x": {"scale": "two_level_row"}}},
        "row scale on wgrad.x only",
    ),
    "four-or-six by row in Wgrad": (
        {
            "gemms": ["fprop", "wgrad"], "format": "nvfp4",
            **{gemm: {"x": {"scale": "four_six_mae_row"}} for gemm in ("fprop", "wgrad")},
        },
        "row scale on wgrad.x only .* without four-or-six",
    ),
    "MXFP4": ({"gemms": ["fprop"], "format": "mxfp4"}, "mxfp4"),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "said"), REFUSED_BY_TE.values(), ids=list(REFUSED_BY_TE))
def test_what_transformer_engine_cannot_do(recipe, said):
    with pytest.raises(ValueError, match=said):
        te_quantizers(read_recipe(recipe))
