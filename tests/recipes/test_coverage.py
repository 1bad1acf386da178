"""What a recipe reaches, from names and sizes alone.

``coverage.txt`` has recipes, then patterns of ``skip`` and of ``allow``, with what is said of each.
``REWRITE=1`` writes what stands under them anew.
"""

from pathlib import Path

from ablate.recipes import read_recipe
from ablate.recipes.coverage import WeightMatrix, coverage_faults, coverage_of, in_short
from ablate.recipes.place import places
from tests.golden import check_answers

MATRICES = (
    WeightMatrix(name="layers.0.up", elements=300),
    WeightMatrix(name="layers.1.up", elements=300, also=("again.up",)),
    WeightMatrix(name="layers.0.dense", elements=100),
    WeightMatrix(name="layers.0.mixing", elements=50, out_of_reach="Mixer holds it"),
    WeightMatrix(name="layers.1.mixing", elements=50, out_of_reach="Mixer holds it"),
    WeightMatrix(name="head", elements=100, is_head=True),
)
WHERE = places(
    [matrix.name for matrix in MATRICES if matrix.out_of_reach is None], heads=["head"]
)


def answers(line):
    text, skip, allow = (*line.split(" | "), "", "")[:3]
    recipe = read_recipe(text)
    skip = skip.split()
    yield from f"{coverage_of(recipe, MATRICES, WHERE, skip=skip)}".splitlines()
    for message, hint in coverage_faults(
        recipe, MATRICES, allow=allow.split(), skip=skip
    ):
        yield f"fault: {message} ({hint})"


def test_what_is_said_of_each_recipe():
    check_answers(Path(__file__).with_name("coverage.txt"), answers)


def test_shares_count_every_place_and_every_gemm_by_itself():
    coverage = coverage_of(
        read_recipe("{gemms: [fprop], rest: fp8, wgrad: bf16}"), MATRICES, WHERE
    )
    low = {"matrices": 3, "flops_share": 1000 / 1200}
    high = {"matrices": 0, "flops_share": 0.0}
    assert coverage.as_json() == {
        "matrices": 6, "fprop": low, "dgrad": low, "wgrad": high,
        "uncovered": {
            **dict.fromkeys(("layers.0.mixing", "layers.1.mixing"), "Mixer holds it"),
            "head": "the head keeps high precision unless a rule names it",
        },
    }  # fmt: skip


def test_names_that_differ_in_numbers_stand_together():
    names = ["model.0.a.1.w", "model.0.a.2.w", "model.0.b", "3", "4"]
    assert in_short(names) == ["model.*.a.*.w (2)", "model.0.b", "3", "4"]
