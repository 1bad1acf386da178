from ablate.plan.layers import layer_groups
from ablate.recipes import RecipeSpec, resolve
from ablate.recipes.place import places

NAMES = [f"blocks.{i}.{part}" for i in range(6) for part in ("attention.out", "ffn.down")] + ["head"]
WHERE = places(NAMES, heads=("head",))


def groups(**recipe):
    return [
        (group.names, group.count, group.recipe)
        for group in layer_groups(resolve(RecipeSpec(**recipe)), WHERE.values(), 1_000)
    ]


def test_blocks_of_a_kind_are_one_line():
    assert groups(gemms=["fprop"]) == [
        (("blocks.0-5.attention.out", "blocks.0-5.ffn.down"), 12, "Fprop mxfp4; Dgrad+Wgrad bf16"),
        (("head",), 1, "bf16"),
    ]


def test_rules_cut_the_ranges():
    layers = [{"match": "blocks.3.*", "recipe": "bf16"}, {"first": 1, "last": 1, "recipe": "bf16"}]
    found = groups(gemms=["fprop", "dgrad", "wgrad"], layers=layers)
    low, high = sorted(found, key=lambda group: group[2] == "bf16")
    assert low[:2] == (("blocks.1-2,4.attention.out", "blocks.1-2,4.ffn.down"), 6)
    assert high[:2] == (("blocks.0,3,5.attention.out", "blocks.0,3,5.ffn.down", "head"), 7)


def test_phases_are_told():
    phases = [{"from_fraction": 0.5, "recipe": "bf16"}]
    assert groups(gemms=["fprop"], phases=phases)[0][2] == (
        "Fprop mxfp4; Dgrad+Wgrad bf16, from token 500: bf16"
    )


def test_every_layer_is_in_one_group():
    assert sum(
        count for _, count, _ in groups(gemms=["fprop"], layers=[{"first": 2, "recipe": "bf16"}])
    ) == len(NAMES)
