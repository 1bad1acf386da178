"""Which recipe each layer of a model follows.

``places.txt`` has recipes, each for a model, with the layers by what they follow, and the rules that decide
nothing. ``REWRITE=1`` writes what stands under them anew.
"""

from pathlib import Path

from ablate.recipes import describe_layer, read_recipe
from ablate.recipes.place import idle_roles, phases_of, places, rule_faults
from tests.golden import check_answers

MODELS = {
    "small": places(
        [
            "0.attention.qkv",
            "0.ffn.gate_up",
            "0.ffn.down",
            "1.ffn.experts.0.down",
            "1.mixing",
            "head",
        ],
        ["head"],
    ),
    "flat": places(["ffn.down", "attention.out"]),
    **{
        f"{n} blocks": places([*(f"{i}.down" for i in range(n)), "head"], ["head"])
        for n in (12, 20, 32, 48, 88)
    },
}


def answers(line):
    model, _, text = line.partition(": ")
    recipe = read_recipe(text)
    layers = MODELS[model]
    followers = {}
    for name, place in layers.items():
        first, *later = phases_of(recipe, place)
        then = (
            f", from {phase.start(1000)} {describe_layer(phase.recipe)}"
            for phase in later
        )
        followers.setdefault(describe_layer(first.recipe) + "".join(then), []).append(
            name
        )
    for label, names in followers.items():
        shown = (
            " ".join(names)
            if len(names) <= 12
            else f"{names[0]} … {names[-1]} ({len(names)})"
        )
        yield f"{label}: {shown}"
    yield from (
        f"fault of rule {index}: {message} ({hint})"
        for index, message, hint in rule_faults(recipe, layers)
    )
    yield from (f"no layer has the role {role}" for role in idle_roles(recipe, layers))


def test_each_layer_follows_what_the_table_says():
    check_answers(Path(__file__).with_name("places.txt"), answers)
