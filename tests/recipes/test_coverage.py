"""What a recipe reaches, from names and sizes alone.

``coverage.txt`` has recipes, then patterns of ``skip`` and of ``allow``, with what is said of each.
``REWRITE=1`` writes what stands under them anew.
"""

from pathlib import Path

from ablate.recipes import read_recipe
from ablate.recipes.coverage import Matrix, coverage_faults, coverage_of, in_short
from ablate.recipes.place import places
from tests.golden import check_answers

MATRICES = (
    Matrix(name="layers.0.up", elements=300),
    Matrix(name="layers.1.up", elements=300, also=("again.up",)),
    Matrix(name="layers.0.dense", elements=100),
    Matrix(name="layers.0.mixing", elements=50, out_of_reach="Mixer holds it"),
    Matrix(name="layers.1.mixing", elements=50, out_of_reach="Mixer holds it"),
    Matrix(name="head", elements=100, is_head=True),
)
WHERE = places([one.name for one in MATRICES if one.out_of_reach is None], heads=["head"])


def told(line):
    text, skip, allow = (*line.split(" | "), "", "")[:3]
    recipe, skip = read_recipe(text), skip.split()
    yield from f"{coverage_of(recipe, MATRICES, WHERE, skip=skip)}".splitlines()
    for what, hint in coverage_faults(recipe, MATRICES, allow=allow.split(), skip=skip):
        yield f"fault: {what} ({hint})"


def test_what_is_said_of_each_recipe():
    check_answers(Path(__file__).with_name("coverage.txt"), told)


def test_shares_count_every_place_and_every_gemm_by_itself():
    found = coverage_of(read_recipe("{gemms: [fprop], rest: fp8, wgrad: bf16}"), MATRICES, WHERE)
    low, high = {"matrices": 3, "flops_share": 1000 / 1200}, {"matrices": 0, "flops_share": 0.0}
    assert found.as_json() == {
        "matrices": 6, "fprop": low, "dgrad": low, "wgrad": high,
        "uncovered": {
            **dict.fromkeys(("layers.0.mixing", "layers.1.mixing"), "Mixer holds it"),
            "head": "the head keeps high precision unless a rule names it",
        },
    }  # fmt: skip


def test_names_that_differ_in_numbers_stand_together():
    names = ["model.0.a.1.w", "model.0.a.2.w", "model.0.b", "3", "4"]
    assert in_short(names) == ["model.*.a.*.w (2)", "model.0.b", "3", "4"]
