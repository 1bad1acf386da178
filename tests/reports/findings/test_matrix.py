"""Which arms form a matrix of GEMMs and stabiliser: by what they are, not by their names."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from ablate.recipes import PRESETS, RecipeSpec, resolve
from ablate.reports.findings.gemms import find_matrices
from ablate.store.records import RecordedConfig

F, FD, FDW = ("fprop",), ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")


def configured(recipe, **training):
    recipe, training = asdict(recipe), {"learning_rate": 0.002} | training
    return RecordedConfig(recipe=recipe, training=training, whole={"recipe": recipe, "training": training})


def matrices(recipes, **more):
    configs = {
        name: one if isinstance(one, RecordedConfig) else configured(one) for name, one in recipes.items()
    }
    return find_matrices(configs, **more)


def presets(*names):
    return {name: PRESETS[name].recipe for name in names}


LADDER = presets(
    "te-hybrid-fp8", "amd-f-sr", "amd-f", "amd-fd", "amd-fdw", "amd-fd-sr", "amd-fdw-sr", "amd-fdw-dht32",
    "amd-fdw-dht16",
)  # fmt: skip


def test_the_rows_of_amds_table_are_the_rows():
    deoscillated = resolve(RecipeSpec(preset="amd-fdw", deoscillate={"window": 10}))
    (found,) = matrices(LADDER | {"reset": deoscillated, "amd-f-rht16": PRESETS["amd-f-rht16"].recipe})
    assert found.format == "mxfp4"
    assert found.gemms == (F, FD, FDW)
    assert found.stabilisers == ("none", "SR", "DHT32", "DHT16", "de-oscillation", "RHT16")
    assert found.arms == (
        ("amd-f", "amd-f-sr", None, None, None, "amd-f-rht16"),
        ("amd-fd", "amd-fd-sr", None, None, None, None),
        ("amd-fdw", "amd-fdw-sr", "amd-fdw-dht32", "amd-fdw-dht16", "reset", None),
    )


@pytest.mark.parametrize(
    "names",
    [
        ("amd-f", "amd-fd", "amd-fdw"),
        ("amd-fdw", "amd-fdw-sr", "amd-fdw-dht16"),
        ("amd-f", "amd-fd-sr"),
        ("amd-f", "amd-fd-sr", "amd-fdw-dht16"),
        ("amd-f", "amd-f-sr", "te-hybrid-fp8"),
    ],
    ids=["one column", "one row", "a diagonal", "a longer one", "no FP4 GEMM in one"],
)
def test_what_is_no_grid_has_none(names):
    assert matrices(presets(*names)) == ()


def test_what_else_differs_is_another_matrix():
    other = {
        f"{rest} {name}": resolve(RecipeSpec(gemms=list(gemms), stabiliser=stabiliser, rest=rest))
        for rest in ("bf16", "fp8")
        for name, gemms, stabiliser in (("a", F, "none"), ("b", FD, "none"), ("c", FD, "sr"))
    }
    assert [one.names for one in matrices(other)] == [
        ("bf16 a", "bf16 b", "bf16 c"),
        ("fp8 a", "fp8 b", "fp8 c"),
    ]
    cells = (("bf16", F, "none"), ("bf16", FD, "none"), ("fp8", F, "sr"), ("fp8", FD, "sr"))
    mixed = {
        str(cell): resolve(RecipeSpec(rest=cell[0], gemms=list(cell[1]), stabiliser=cell[2]))
        for cell in cells
    }
    assert matrices(mixed) == ()
    # All three GEMMs in FP4 leave no other GEMM that could differ: they belong to the first that takes them.
    both = matrices(other | {"all": resolve(RecipeSpec(gemms=list(FDW)))})
    assert [len(one.names) for one in both] == [4, 3]


def test_a_learning_rate_of_its_own_is_another_arm_unless_each_arm_was_tuned():
    names = ("amd-f", "amd-fd", "amd-f-sr", "amd-fd-sr")
    tuned = {
        name: configured(PRESETS[name].recipe, learning_rate=0.001 * i) for i, name in enumerate(names, 1)
    }
    assert matrices(tuned) == ()
    (found,) = matrices(tuned, free=["learning_rate"])
    assert set(found.names) == set(names)


def test_what_cannot_be_read_is_left_out():
    odd = {"none": RecordedConfig(), "odd": RecordedConfig(recipe={"fprop": {"left": {"format": "fp3"}}})}
    assert find_matrices(odd) == ()
