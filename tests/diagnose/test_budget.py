"""Proposals against every other choice, and the recipes that they are written as."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from ablate.diagnose.budget import policies
from ablate.recipes import GEMMS, RecipeSpec, read_recipe, resolve
from ablate.recipes.place import phases_of, places

SIZES = {
    "blocks.0.attn.q_proj": 2,
    "blocks.1.attn.q_proj": 2,
    "blocks.0.mlp.down": 3,
    "blocks.1.mlp.down": 3,
}


def layers_of(recipe):
    """Make the layers of a model, with a head that stays in high precision."""
    names = places([*SIZES, "head"], heads=["head"])
    return {
        name: SimpleNamespace(
            in_features=SIZES.get(name, 1),
            out_features=5,
            place=place,
            recipe_at=lambda _, place=place: phases_of(recipe, place)[0].recipe,
        )
        for name, place in names.items()
    }


def low(recipe, place):
    """List the GEMMs that a recipe has in FP4 in one layer."""
    layer_recipe = phases_of(recipe, place)[0].recipe
    return [gemm for gemm in GEMMS if not layer_recipe.gemm(gemm).is_untouched]


@pytest.mark.parametrize("budget", [0.4, 0.66, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_no_choice_within_the_budget_does_less_harm(budget, seed):
    draw = random.Random(seed)
    recipe = read_recipe("mxfp4")
    layers = layers_of(recipe)
    harm = {cell: draw.uniform(-0.1, 1) for cell in itertools.product(SIZES, GEMMS)}
    proposed = policies(budget, recipe, layers, harm)
    assert proposed[0].share == pytest.approx(10 / 11)  # all in FP4
    within = [policy for policy in proposed if policy.share >= budget]
    assert all(policy in within for policy in proposed if policy.is_proposal)
    by_layer = [[(name, gemm) for gemm in GEMMS] for name in SIZES]
    for units in ([[cell] for cell in harm], by_layer):
        least = math.inf
        for is_left in itertools.product((True, False), repeat=len(units)):
            left = list(itertools.chain(*itertools.compress(units, is_left)))
            if sum(SIZES[name] for name, _ in left) >= budget * 33:
                least = min(least, sum(max(harm[cell], 0) for cell in left))
        assert pytest.approx(least) in [policy.harm for policy in within]
    for policy in proposed:
        written = resolve(TypeAdapter(RecipeSpec).validate_python(policy.recipe))
        for name in SIZES:
            in_bf16 = policy.in_bf16.get(name, ())
            in_fp4 = [gemm for gemm in GEMMS if gemm not in in_bf16]
            assert low(written, layers[name].place) == in_fp4


def test_vendors_rules_and_the_last_blocks_stand_beside_them():
    recipe = read_recipe("mxfp4")
    harm = dict.fromkeys(itertools.product(SIZES, GEMMS), 1)
    found = policies(0.4, recipe, layers_of(recipe), harm)
    # The first 2 and the last 8 blocks are all; 15 % of 2 blocks are the last block.
    assert [policy.name for policy in found[:3]] == [
        "all in FP4",
        "BF16 in the last 15% of the blocks",
        "BF16 in attention",
    ]


def test_single_gemms_are_not_chosen_where_one_takes_anothers_operand():
    recipe = read_recipe("tetrajet")
    harm = {("blocks.0.mlp.down", gemm): n for n, gemm in enumerate(GEMMS)}
    found = policies(0.1, recipe, layers_of(recipe), harm)
    assert not any("GEMMs" in policy.name for policy in found)
