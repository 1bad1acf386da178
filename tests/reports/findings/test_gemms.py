"""Steps, matrices and published figures of arms: by what the arms are, not by their names."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import yaml

from ablate.recipes import PRESETS, Recipe, RecipeSpec, resolve
from ablate.reports.findings.gemms import (
    Step,
    find_cells,
    find_matrices,
    find_steps,
    greatest_step,
    kind_of,
    published_for,
)
from ablate.results.cost import Cost
from ablate.store.records import RecordedConfig
from tests.golden import rows_of

F, FD, FDW = ("fprop",), ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")


def configured(recipe, **training):
    recipe, training = asdict(recipe), {"learning_rate": 0.002} | training
    return RecordedConfig(
        recipe=recipe, training=training, whole={"recipe": recipe, "training": training}
    )


def configs_of(arms):
    """Return the configurations of arms, some of which are recipes."""
    return {
        name: configured(arm) if isinstance(arm, Recipe) else arm
        for name, arm in arms.items()
    }


def of(*gemms, **more):
    return resolve(RecipeSpec(gemms=list(gemms), **more))


def presets(*names):
    return {name: PRESETS[name].recipe for name in names}


# ---- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arms", "steps"),
    [
        (
            {"bf16": of(), "f": of(*F), "fd": of(*FD), "all": of(*FDW), "fp8": of(rest="fp8")},
            [("fprop", "bf16", "f"), ("dgrad", "f", "fd"), ("wgrad", "fd", "all")],
        ),
        ({"a": of(), "b": of(*F, deoscillate={"window": 9})}, []),
        ({"a": of(*F, deoscillate={"window": 9}), "b": of(*FD, deoscillate={"window": 9})},
         [("dgrad", "a", "b")]),
        ({"a": configured(of()), "b": configured(of(*F), learning_rate=1.0)}, []),
    ],
)  # fmt: skip
def test_steps_are_pairs_that_differ_in_one_gemm(arms, steps):
    found = find_steps(
        configs_of(arms), lambda *pair: Cost(kind="point", note="/".join(pair))
    )
    assert [(step.gemm, *step.cost.note.split("/")) for step in found] == steps
    assert all(step.cost.note == f"{step.from_arm}/{step.to_arm}" for step in found)


WGRAD = ("wgrad", 0.1, 0.2, "interval")


@pytest.mark.parametrize(
    ("steps", "greatest"),
    [
        ([("fprop", 0.01, 0.04, "interval"), WGRAD], "wgrad"),
        ([("fprop", 0.01, 0.12, "interval"), WGRAD], None),
        ([WGRAD], None),
        ([("fprop", 0.01, 0.04, "point"), WGRAD], None),
    ],
)
def test_the_greatest_step_needs_intervals_that_do_not_overlap(steps, greatest):
    found = []
    for gemm, low, high, kind in steps:
        cost = Cost(kind=kind, low=low, high=high)
        found.append(Step(gemm=gemm, from_arm="x", to_arm="y", cost=cost))
    assert greatest_step(found) == greatest


# ---- matrices --------------------------------------------------------------------------------------------


def matrices(recipes, **more):
    return find_matrices(find_cells(configs_of(recipes), **more))


def test_the_rows_of_amds_table_are_the_rows():
    deoscillated = resolve(RecipeSpec(preset="amd-fdw", deoscillate={"window": 10}))
    ladder = presets(
        "te-hybrid-fp8", "amd-f-sr", "amd-f", "amd-fd", "amd-fdw", "amd-fd-sr", "amd-fdw-sr", "amd-fdw-dht32",
        "amd-fdw-dht16",
    )  # fmt: skip
    (found,) = matrices(ladder | {"reset": deoscillated} | presets("amd-f-rht16"))
    assert (found.format, found.gemms) == ("mxfp4", (F, FD, FDW))
    assert found.stabilisers == (
        "none",
        "SR",
        "DHT32",
        "DHT16",
        "de-oscillation",
        "RHT16",
    )
    assert found.arms == (
        ("amd-f", "amd-f-sr", None, None, None, "amd-f-rht16"),
        ("amd-fd", "amd-fd-sr", None, None, None, None),
        ("amd-fdw", "amd-fdw-sr", "amd-fdw-dht32", "amd-fdw-dht16", "reset", None),
    )


@pytest.mark.parametrize(
    "recipes",
    [
        presets("amd-f", "amd-fd", "amd-fdw"),
        presets("amd-fdw", "amd-fdw-sr", "amd-fdw-dht16"),
        presets("amd-f", "amd-fd-sr"),
        presets("amd-f", "amd-fd-sr", "amd-fdw-dht16"),
        presets("amd-f", "amd-f-sr", "te-hybrid-fp8"),
        {
            "none": RecordedConfig(),
            "odd": RecordedConfig(recipe={"fprop": {"left": {"format": "fp3"}}}),
        },
    ],
    ids=[
        "one column",
        "one row",
        "a diagonal",
        "a longer one",
        "no FP4 GEMM in one",
        "of other logs",
    ],
)
def test_what_is_no_grid_has_none(recipes):
    assert matrices(recipes) == ()


def test_what_else_differs_is_another_matrix():
    arms = {}
    for rest in ("bf16", "fp8"):
        arms |= {
            f"{rest} a": of(*F, rest=rest),
            f"{rest} b": of(*FD, rest=rest),
            f"{rest} c": of(*FD, rest=rest, stabiliser="sr"),
        }
    names = [("bf16 a", "bf16 b", "bf16 c"), ("fp8 a", "fp8 b", "fp8 c")]
    assert [matrix.names for matrix in matrices(arms)] == names
    mixed = {name: arms[name] for name in ("bf16 a", "bf16 b", "fp8 c")}
    assert matrices(mixed | {"d": of(*F, rest="fp8", stabiliser="sr")}) == ()
    # All three GEMMs in FP4 leave no other GEMM that could differ: they belong to the first that takes them.
    found = matrices(arms | {"all": of(*FDW)})
    assert [len(matrix.names) for matrix in found] == [4, 3]


def test_a_learning_rate_of_its_own_is_another_arm_unless_each_arm_was_tuned():
    tuned = {}
    for name, recipe in presets("amd-f", "amd-fd", "amd-f-sr", "amd-fd-sr").items():
        tuned[name] = configured(recipe, learning_rate=0.001 * len(tuned))
    assert matrices(tuned) == ()
    (found,) = matrices(tuned, free=["learning_rate"])
    assert set(found.names) == set(tuned)


# ---- published -------------------------------------------------------------------------------------------

RECIPES = """
preset: amd-fdw                                            | none     | 26–27 % more tokens
preset: amd-fdw-sr                                         | SR       | does not converge
gemms: ALL, stabiliser: dht, hadamard_size: 16             | DHT16    | 8–9 % more tokens
preset: nvidia-nvfp4 | SR*+RHT16* | relative loss error under 1 %, about \
1.5 % in the decay; 9.0 % ± 0.6 more tokens
gemms: [dgrad, wgrad]                                      | none     | +0.11 nats (345M)
preset: te-hybrid-fp8                                      |          |
gemms: ALL, deoscillate: {}                                |          |
gemms: [wgrad]                                             | none     |
gemms: ALL, stabiliser: dht, hadamard_size: 64             | DHT64    |
# What is published of all operands is not of a part of them.
gemms: ALL, dgrad: {dy: {rounding: stochastic}}            | SR*      |
gemms: ALL, fprop: {stabiliser: sr}                        | SR*      |
gemms: ALL, fprop: {stabiliser: sr8}                       | SR8*     |
gemms: ALL, wgrad: {stabiliser: dht}                       | DHT16*   |
gemms: ALL, wgrad: {stabiliser: rht}                       | RHT16*   |
preset: rocm-te-sr                                         | SR(rocm) |
"""


@pytest.mark.parametrize(("recipe", "stabiliser", "figures"), rows_of(RECIPES))
def test_a_recipe_has_the_figures_published_for_its_kind(recipe, stabiliser, figures):
    spec = yaml.safe_load(f"{{{recipe.replace('ALL', '[fprop, dgrad, wgrad]')}}}")
    resolved = resolve(RecipeSpec(**spec))
    kind = kind_of(resolved)
    assert (kind.stabiliser if kind else "") == stabiliser
    assert "; ".join(one.figure for one in published_for(resolved)) == figures
