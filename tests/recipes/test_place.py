import pytest

from ablate.recipes import LayerRecipe, LayerRule, Phase, Recipe, RecipeSpec, resolve
from ablate.recipes.place import block_of, idle_roles, phases_of, places, rule_faults

MXFP4 = resolve(RecipeSpec(gemms=["fprop", "dgrad", "wgrad"]))
NAMES = [f"model.layers.{i}.{part}" for i in range(12) for part in ("q_proj", "mlp.down")] + ["lm_head"]
WHERE = places(NAMES, heads=("lm_head",))


def formats(recipe, name, tokens=0, total=None):
    started = [phase.recipe for phase in phases_of(recipe, WHERE[name]) if phase.start(total) <= tokens]
    return started[-1].fprop.left.format


def test_a_block_is_the_first_number_of_the_name():
    names = ("model.layers.11.q_proj", "encoder.2.block.7.out", "lm_head")
    assert [block_of(name) for name in names] == [11, 2, None]
    assert WHERE["model.layers.3.q_proj"].num_blocks == 12


def test_without_rules_blocks_follow_the_recipe_and_the_head_does_not():
    assert formats(MXFP4, "model.layers.0.q_proj") == "mxfp4"
    assert formats(MXFP4, "lm_head") == "bf16"


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"first": 2, "last": 8}, [0, 1, *range(4, 12)]),
        ({"last": 0.15}, [10, 11]),
        ({"last": 0.5}, [6, 7, 8, 9, 10, 11]),
        ({"last": 0.01}, [11]),
        ({"last": 1 / 12}, [11]),
        ({"last": 0.25}, [9, 10, 11]),
    ],
)
def test_first_and_last_blocks(rule, kept):
    recipe = resolve(RecipeSpec(gemms=["fprop"], layers=[{**rule, "recipe": "bf16"}]))
    assert recipe.rules == (LayerRule(**rule),)
    assert [i for i in range(12) if formats(recipe, f"model.layers.{i}.q_proj") == "bf16"] == kept


def test_the_first_rule_that_names_a_layer_decides():
    rules = (
        LayerRule(match="*.down", recipe=LayerRecipe(fprop=MXFP4.fprop)),
        LayerRule(match="*.layers.0.*"),
        LayerRule(head=True, recipe=LayerRecipe(fprop=resolve(RecipeSpec(rest="fp8")).fprop)),
    )
    recipe = Recipe(rules=rules)
    assert formats(recipe, "model.layers.0.mlp.down") == "mxfp4"
    assert formats(recipe, "model.layers.0.q_proj") == "bf16"
    assert formats(recipe, "lm_head") == "fp8_e4m3"
    assert list(rule_faults(recipe, WHERE)) == []
    idle = Recipe(rules=(LayerRule(match="*.dwon"),))
    assert [(index, what) for index, what, _ in rule_faults(idle, WHERE)] == [
        (0, "no layer of this model is called '*.dwon'")
    ]


SMALL = places(
    ["0.attention.qkv", "0.ffn.gate_up", "0.ffn.down", "1.ffn.experts.0.down", "1.mixing", "head"], ["head"]
)


def kept(*layers, where=SMALL, **fields):
    whole = resolve(RecipeSpec(layers=[{"recipe": "bf16"} | one for one in layers], **fields))
    return [name for name in where if phases_of(whole, where[name])[0].recipe == LayerRecipe()]


def test_a_role_names_its_layers_and_with_its_parts_all_of_them():
    low = {"gemms": ["fprop", "dgrad", "wgrad"]}
    for role, names in {
        "attention": "0.attention.qkv",
        "attention.out": "",
        "ffn": "0.ffn.gate_up 0.ffn.down",
        "ffn.gate": "0.ffn.gate_up",
        "ffn.up": "0.ffn.gate_up",
        "experts": "1.ffn.experts.0.down",
        "experts.down": "1.ffn.experts.0.down",
        "head": "",
    }.items():
        assert kept({"role": role}, **low) == [*names.split(), "head"], role
    assert kept({"role": ["head", "ffn.down"], "last": "50%"}, **low) == list(SMALL)[2:]


def test_a_role_that_no_layer_has_is_said_and_a_pattern_refused():
    def faults(*layers, **fields):
        whole = resolve(RecipeSpec(layers=list(layers), **fields))
        return idle_roles(whole, SMALL), [what for _, what, _ in rule_faults(whole, SMALL)]

    low = {"gemms": ["fprop"]}
    absent = {"role": ["mamba.out", "attention"], "recipe": "bf16"}
    assert faults(absent, **low) == (["mamba.out"], [])
    assert faults({"role": "router", "recipe": "bf16"}, **low) == (["router"], [])
    _, (what,) = faults(absent | {"match": "*.dwon"}, **low)
    assert what == "no layer of this model is called '*.dwon'"
    assert faults({"role": ["router", "latent"], "recipe": "mxfp4"}) == (
        ["latent", "router"],
        ["no layer of this model has a role that the recipe sets in low precision"],
    )
    assert faults({"role": "experts", "recipe": "mxfp4"}) == ([], [])
    flat = places(["ffn.down", "attention.out"])
    last = resolve(RecipeSpec(gemms=["fprop"], layers=[{"role": "ffn", "last": 0.15, "recipe": "bf16"}]))
    assert [what for _, what, _ in rule_faults(last, flat)] == ["the model has no blocks of layers"]


@pytest.mark.parametrize(("blocks", "last"), [(88, 14), (32, 5), (48, 8), (20, 3)])
def test_15_percent_of_the_blocks_is_rounded_up(blocks, last):
    where = places([f"layers.{i}.ffn.down" for i in range(blocks)])
    for share in ("15%", 0.15):
        assert len(kept({"last": share}, where=where, gemms=["fprop"])) == last


def test_phases_begin_at_tokens_or_at_a_share_of_the_budget():
    early = Phase(from_tokens=100, recipe=LayerRecipe(fprop=MXFP4.fprop))
    late = Phase(from_fraction=0.5, recipe=LayerRecipe())
    recipe = Recipe(phases=(early, late))
    name = "model.layers.5.q_proj"
    assert [formats(recipe, name, tokens, 1000) for tokens in (0, 99, 100, 499, 500)] == [
        "bf16", "bf16", "mxfp4", "mxfp4", "bf16",
    ]  # fmt: skip
    assert formats(recipe, "lm_head", 200, 1000) == "bf16"
    with pytest.raises(ValueError, match="needs total_tokens"):
        formats(recipe, name, 0, None)
