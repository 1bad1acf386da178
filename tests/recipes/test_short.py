from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from ablate.recipes import LayerRecipe, Recipe, RecipeSpec, SenselessRecipe, describe, resolve


def recipe(**fields):
    return resolve(TypeAdapter(RecipeSpec).validate_python(fields))


ALL = ["fprop", "dgrad", "wgrad"]


def test_todays_words_mean_what_they_meant():
    assert describe(recipe()) == "bf16"
    assert describe(recipe(rest="fp8")) == "fp8"
    six = {p for *_, p in recipe(gemms=ALL, stabiliser="sr+rht", hadamard_size=32).operands()}
    assert len(six) == 1
    policy = six.pop()
    assert (policy.scale, policy.rounding, policy.prescale) == ("floor", "stochastic", 0.75)
    assert (policy.hadamard, policy.signs) == (32, "step")


@pytest.mark.parametrize(
    ("fields", "prescale"),
    [
        ({}, 0.75),
        ({"scale": "even"}, 0.75),
        ({"scale": "uos"}, 0.75),
        ({"scale": "rceil"}, 1.0),
        ({"scale": "ceil"}, 1.0),
        ({"prescale": 1.0}, 1.0),
        ({"format": "nvfp4"}, 1.0),
        ({"scale": "rceil", "prescale": 0.5}, 0.5),
    ],
)
def test_stochastic_rounding_takes_a_prescale_where_values_can_clip(fields, prescale):
    assert recipe(gemms=["wgrad"], stabiliser="sr", **fields).wgrad.left.prescale == prescale


def test_a_gemm_and_an_operand_can_differ():
    mixed = recipe(
        gemms=ALL,
        stabiliser="dht",
        wgrad={"stabiliser": "rht", "hadamard_size": 64, "signs": "fixed", "dy": {"rounding": "stochastic"}},
        dgrad={"format": "nvfp4", "scale": "four_six"},
    )
    assert (mixed.fprop.left.signs, mixed.fprop.left.hadamard) == ("none", 16)
    assert mixed.wgrad.left.hadamard == mixed.wgrad.right.hadamard == 64
    assert mixed.wgrad.left.signs == mixed.wgrad.right.signs == "fixed"
    assert (mixed.wgrad.left.rounding, mixed.wgrad.right.rounding) == ("stochastic", "nearest")
    assert (mixed.dgrad.left.scale, mixed.dgrad.left.hadamard) == ("four_six", 16)


def test_de_oscillation_is_part_of_the_recipe_and_of_its_text():
    plain = recipe(gemms=ALL)
    assert plain.deoscillate is None
    asked = recipe(gemms=ALL, deoscillate={})
    assert (asked.deoscillate.window, asked.deoscillate.threshold) == (200, 4.0)
    assert asked.text != plain.text
    assert describe(asked) == "mxfp4; de-oscillated every 200 steps at 4×"
    late = recipe(preset="tetrajet", deoscillate={"window": 50, "threshold": 2.5, "from_fraction": 0.25})
    assert describe(late).endswith("; de-oscillated every 50 steps at 2.5× from 25% of the budget on")
    assert TypeAdapter(Recipe).validate_python(asdict(late)) == late


def test_another_format_of_an_operand_has_its_own_usual_scale():
    mixed = recipe(gemms=ALL, scale="even", fprop={"w": {"format": "nvfp4"}})
    assert (mixed.fprop.right.scale, mixed.fprop.right.block) == ("two_level", "1x16")
    assert mixed.fprop.left.scale == "even"


def test_a_weight_tile_is_for_the_weight():
    tiled = recipe(gemms=ALL, weight_block="32x32")
    assert tiled.fprop.right.block == tiled.dgrad.right.block == "32x32"
    assert {tiled.fprop.left.block, tiled.dgrad.left.block, tiled.wgrad.left.block} == {"1x32"}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"gemms": ALL, "stabiliser": "sr"}, "mxfp4 SR"),
        ({"gemms": ALL, "stabiliser": "sr", "prescale": 1.0}, "mxfp4 SR×1"),
        ({"gemms": ALL, "stabiliser": "sr", "scale": "even"}, "mxfp4(even) SR×0.75"),
        ({"gemms": ALL, "stabiliser": "sr", "scale": "rceil"}, "mxfp4(rceil) SR"),
        (
            {"gemms": ["wgrad"], "stabiliser": "sr+rht", "rest": "fp8"},
            "Fprop+Dgrad fp8; Wgrad mxfp4 SR RHT16",
        ),
        ({"gemms": ["fprop"], "weight_block": "32x32"}, "Fprop mxfp4 × mxfp4[32x32]; Dgrad+Wgrad bf16"),
        ({"gemms": ALL, "layers": [{"first": 1, "recipe": "bf16"}]}, "mxfp4; the first block bf16"),
    ],
)
def test_the_short_line_says_what_is_unusual(fields, line):
    assert describe(recipe(**fields)) == line


def test_layers_and_phases():
    whole = recipe(
        gemms=ALL,
        layers=[{"first": 1, "last": 2, "recipe": "bf16"}, {"head": True, "recipe": "mxfp8"}],
        phases=[{"from_fraction": 0.9, "recipe": {"gemms": ["fprop"]}}],
    )
    assert [(rule.first, rule.last, rule.head) for rule in whole.rules] == [(1, 2, False), (0, 0, True)]
    assert whole.rules[0].recipe == LayerRecipe()
    assert whole.rules[1].recipe.fprop.left.format == "mxfp8"
    assert whole.phases[0].from_fraction == 0.9
    assert whole.phases[0].recipe.wgrad.left.format == "bf16"


def test_a_preset_can_be_varied_but_not_said_twice():
    varied = recipe(
        preset="tseng", wgrad={"dy": {"rounding": "nearest", "prescale": 1.0}}, fprop="fp8", layers=[]
    )
    assert varied.wgrad.left.rounding == "nearest"
    assert varied.wgrad.right.rounding == "stochastic"
    assert varied.fprop.left.format == "fp8_e4m3"
    assert recipe(preset="nvidia-nvfp4", layers=[]).rules == ()
    assert recipe(preset="nvidia-nvfp4").rules != ()


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"gemms": ["fprop", "fprop"]}, "gemms", "named twice"),
        ({"stabiliser": "sr"}, "stabiliser", "no FP4 GEMM"),
        ({"scale": "even"}, "scale", "no FP4 GEMM"),
        ({"gemms": ["wgrad"], "scale": "even", "wgrad": {"scale": "ceil"}}, "scale", "no FP4 GEMM"),
        ({"gemms": ["wgrad"], "weight_block": "32x32"}, "weight_block", "no FP4 GEMM"),
        ({"gemms": ["wgrad"], "signs": "call"}, "signs", "without a random Hadamard"),
        ({"gemms": ["wgrad"], "prescale": 0.5}, "prescale", "without stochastic rounding"),
        ({"wgrad": {"stabiliser": "sr"}}, "wgrad", "not in FP4"),
        ({"wgrad": {"scale": "even"}}, "wgrad", "not in FP4"),
        ({"gemms": ["wgrad"], "scale": "two_level"}, "wgrad", "scale 'two_level' on mxfp4"),
        ({"gemms": ["wgrad"], "wgrad": {"w": {"block": "32x32"}}}, "wgrad", "wgrad has no operand w"),
        ({"gemms": ["wgrad"], "wgrad": {"dy": {"hadamard": 16}}}, "wgrad", "rotation would not cancel"),
        (
            {"gemms": ["wgrad"], "wgrad": {"dy": {"hadamard": 16, "signs": "step"}, "x": {"hadamard": 16}}},
            "wgrad",
            "signs step on one operand and none on the other",
        ),
        ({"gemms": ALL, "stabiliser": "dht", "weight_block": "32x32"}, "weight_block", "square weight tile"),
        ({"gemms": ALL, "wgrad": {"dy": {"source": "forward"}}}, "wgrad", "source 'forward' on wgrad.dy"),
        ({"gemms": ["wgrad"], "wgrad": {"x": {"source": "forward"}}}, "wgrad", "Fprop's x is in bf16"),
        ({"gemms": ALL, "wgrad": {"x": {"mask": True}}}, "wgrad", "mask on wgrad.x"),
        ({"preset": "tseng", "gemms": ["fprop"]}, "gemms", "beside preset 'tseng'"),
        ({"preset": "tseng", "stabiliser": "dht"}, "stabiliser", "beside preset 'tseng'"),
        ({"preset": "tseng", "wgrad": {"stabiliser": "dht"}}, "wgrad", "without its format"),
        ({"gemms": ALL, "layers": [{"recipe": "bf16"}]}, "layers 0 match", "names none"),
        (
            {"gemms": ALL, "phases": [{"recipe": "bf16"}]},
            "phases 0 from_tokens",
            "from_tokens or at from_fraction",
        ),
        (
            {
                "layers": [
                    {"first": 1, "recipe": "bf16"},
                    {"head": True, "recipe": {"wgrad": {"scale": "even"}}},
                ]
            },
            "layers 1 recipe wgrad",
            "not in FP4",
        ),
        (
            {"phases": [{"from_tokens": 1, "recipe": {"stabiliser": "sr"}}]},
            "phases 0 recipe stabiliser",
            "no FP4 GEMM",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(fields, path, message):
    with pytest.raises(SenselessRecipe, match=message) as caught:
        recipe(**fields)
    assert " ".join(map(str, caught.value.path)) == path
    assert "\n" not in str(caught.value)


def test_a_rotation_taken_off_takes_with_it_what_belongs_to_it():
    off = {"hadamard": 0}
    wgrad = {"dy": off, "x": off}
    for name in ("nvidia-nvfp4", "alto"):
        recipe = resolve(TypeAdapter(RecipeSpec).validate_python({"preset": name, "wgrad": wgrad}))
        for policy in (recipe.wgrad.left, recipe.wgrad.right):
            assert (policy.hadamard, policy.signs, policy.permute, policy.rotated_bf16) == (
                0,
                "none",
                False,
                False,
            )
    kept = {"dy": {**off, "rotated_bf16": True}, "x": off}
    with pytest.raises(SenselessRecipe, match="rotated_bf16 without a Hadamard"):
        resolve(TypeAdapter(RecipeSpec).validate_python({"preset": "nvidia-nvfp4", "wgrad": kept}))
