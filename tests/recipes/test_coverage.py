"""What a recipe reaches, from names and sizes alone."""

import pytest

from ablate.recipes import RecipeSpec, resolve
from ablate.recipes.coverage import Matrix, coverage_faults, coverage_of, in_short
from ablate.recipes.place import places

MATRICES = (
    Matrix(name="layers.0.up", elements=300),
    Matrix(name="layers.1.up", elements=300, also=("again.up",)),
    Matrix(name="layers.0.mixing", elements=50, out_of_reach="Mixer holds it"),
    Matrix(name="layers.1.mixing", elements=50, out_of_reach="Mixer holds it"),
    Matrix(name="head", elements=100, is_head=True),
)
WHERE = places(["layers.0.up", "layers.1.up", "head"], heads=["head"])


def recipe(**fields):
    return resolve(RecipeSpec(**fields))


def test_shares_count_every_place_and_every_gemm_by_itself():
    found = coverage_of(recipe(gemms=["fprop"], rest="fp8", wgrad="bf16"), MATRICES, WHERE)
    assert found.share("fprop") == found.share("dgrad") == 900 / 1100
    assert found.share("wgrad") == found.count("wgrad") == 0
    assert found.as_json() == {
        "matrices": 5,
        "fprop": {"matrices": 2, "flops_share": 900 / 1100},
        "dgrad": {"matrices": 2, "flops_share": 900 / 1100},
        "wgrad": {"matrices": 0, "flops_share": 0.0},
        "uncovered": {
            "layers.0.mixing": "Mixer holds it",
            "layers.1.mixing": "Mixer holds it",
            "head": "the head keeps high precision unless a rule names it",
        },
    }


def test_a_backward_pass_of_dequantised_operands_is_said():
    found = coverage_of(recipe(gemms=["fprop"], rest="bf16-dequantised"), MATRICES, WHERE)
    assert (found.count("fprop"), found.count("dgrad")) == (2, 0)
    assert found.notes == ("a backward GEMM in high precision multiplies what Fprop multiplied, dequantised",)


def test_a_phase_in_low_precision_is_enough():
    late = recipe(phases=[{"from_tokens": 100, "recipe": "mxfp4"}])
    assert coverage_of(late, MATRICES, WHERE).count("dgrad") == 2
    assert [what for what, _ in coverage_faults(late, MATRICES, allow=())]


@pytest.mark.parametrize("fields", [{"rest": "bf16"}, {"rest": "fp16"}])
def test_a_recipe_in_high_precision_asks_for_nothing(fields):
    assert not list(coverage_faults(recipe(**fields), MATRICES, allow=()))
    assert set(coverage_of(recipe(**fields), MATRICES, WHERE).uncovered) == {one.name for one in MATRICES}


def test_a_layer_is_named_by_each_of_its_names():
    found = coverage_of(recipe(gemms=["fprop"]), MATRICES, WHERE, skip=["again.*"])
    assert found.uncovered["layers.1.up"] == "skip names it"
    assert not list(coverage_faults(recipe(gemms=["fprop"]), MATRICES, allow=["*"], skip=["again.up"]))


def test_roles_that_no_layer_has_and_layers_of_no_role_are_said():
    layers = [{"role": ["mamba.out", "ffn.up", "router"], "recipe": "bf16"}]
    asked = recipe(gemms=["fprop"], layers=layers)
    where = places(["layers.0.up", "layers.1.up", "head"], heads=["head"])
    assert coverage_of(asked, MATRICES, where).notes == ("no linear layer has the role mamba.out, router",)
    where = {**where, **places(["layers.0.mixing", "layers.1.mixing"])}
    said = "the recipe names roles, and that of layers.*.mixing (2) is not known"
    assert coverage_of(asked, MATRICES, where).notes[1:] == (said,)
    assert said in str(coverage_of(asked, MATRICES, where))
    assert coverage_of(recipe(gemms=["fprop"]), MATRICES, where).notes == ()


def test_what_is_skipped_needs_no_other_permission():
    low = recipe(gemms=["fprop"])
    [(what, hint)] = coverage_faults(low, MATRICES, allow=(), skip=["layers.0.*"])
    assert "1 matrix" in what
    assert hint.endswith("['layers.1.mixing']")


def test_names_that_differ_in_numbers_stand_together():
    names = ["model.0.a.1.w", "model.0.a.2.w", "model.0.b", "3", "4"]
    assert in_short(names) == ["model.*.a.*.w (2)", "model.0.b", "3", "4"]
