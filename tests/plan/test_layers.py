from itertools import groupby

import pytest

from ablate.plan.layers import layer_groups
from ablate.recipes import RecipeSpec, resolve
from ablate.run.architecture import LinearLayer

NAMES = [f"blocks.{i}.{part}" for i in range(6) for part in ("attention.out", "ffn.down")] + ["head"]
RULES = [{"match": "blocks.3.*", "recipe": "bf16"}, {"first": 1, "last": 1, "recipe": "bf16"}]
ALL = "blocks.{0}.attention.out blocks.{0}.ffn.down"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, {"Fprop mxfp4; Dgrad+Wgrad bf16": (12, ALL.format("0-5")), "bf16": (1, "head")}),
        (
            {"layers": RULES},
            {
                "Fprop mxfp4; Dgrad+Wgrad bf16": (6, ALL.format("1-2,4")),
                "bf16": (7, f"{ALL.format('0,3,5')} head"),
            },
        ),
        (
            {"phases": [{"from_fraction": 0.5, "recipe": "bf16"}]},
            {
                "Fprop mxfp4; Dgrad+Wgrad bf16, from token 500: bf16": (12, ALL.format("0-5")),
                "bf16": (1, "head"),
            },
        ),
    ],
)
def test_layers_are_grouped_by_what_they_carry_with_ranges_of_blocks(recipe, expected):
    whole = resolve(RecipeSpec(gemms=["fprop"], **recipe))
    layers = tuple(LinearLayer(name=name, inputs=32, outputs=32, is_head=name == "head") for name in NAMES)
    found = layer_groups(whole, layers, 1_000)
    assert [group.role for group in found[:2]] == ["attention.out", "ffn.down"]
    grouped = {text: list(groups) for text, groups in groupby(found, key=lambda group: group.recipe)}
    assert expected == {
        text: (sum(one.count for one in groups), " ".join(name for one in groups for name in one.names))
        for text, groups in grouped.items()
    }
