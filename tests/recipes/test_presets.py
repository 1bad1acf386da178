import dataclasses
import json

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from ablate.cli.recipes import in_full
from ablate.recipes import PRESETS, Recipe, RecipeSpec, describe, resolve

ALL = list(PRESETS.values())


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_survives_json_and_has_its_source(preset):
    written = json.loads(json.dumps(dataclasses.asdict(preset.recipe)))
    assert TypeAdapter(Recipe).validate_python(written) == preset.recipe
    assert preset.source.url.startswith("https://")
    assert preset.published
    assert preset.checked.startswith(("read in ", "bits compared with "))
    assert len(describe(preset.recipe)) < 230


def test_no_two_presets_are_described_alike():
    assert len({describe(preset.recipe) for preset in ALL}) == len(ALL)


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_is_one_word_and_can_be_written_out(preset):
    assert resolve(RecipeSpec(preset=preset.name)) == preset.recipe
    written = YAML(typ="safe").load(in_full(preset))
    assert resolve(TypeAdapter(RecipeSpec).validate_python(written)) == preset.recipe


def test_no_two_presets_are_the_same_recipe():
    seen = {}
    for preset in ALL:
        key = json.dumps(dataclasses.asdict(preset.recipe), sort_keys=True)
        assert key not in seen, (preset.name, seen.get(key))
        seen[key] = preset.name


def operand(name, gemm, which):
    return {(g, o): p for g, o, p in PRESETS[name].recipe.operands()}[gemm, which]


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_tseng_is_algorithm_2_on_the_backward_gemms(gemm):
    for which in ("dy", "w") if gemm == "dgrad" else ("dy", "x"):
        policy = operand("tseng", gemm, which)
        assert (policy.format, policy.scale, policy.rounding) == ("mxfp4", "floor", "stochastic")
        assert (policy.prescale, policy.hadamard, policy.signs) == (0.75, 64, "call")
    assert operand("tseng", "fprop", "x").format == "bf16"
    assert operand("tseng-fp8", "fprop", "x").format == "fp8_e4m3"
    assert operand("tseng-code", "wgrad", "x").undo == "operand"


def test_nvidia_rounds_gradients_alone_stochastically_and_shares_the_weight_tile():
    rounding = {(g, o): p.rounding for g, o, p in PRESETS["nvidia-nvfp4"].recipe.operands()}
    assert {key for key, value in rounding.items() if value == "stochastic"} == {
        ("dgrad", "dy"),
        ("wgrad", "dy"),
    }
    assert operand("nvidia-nvfp4", "fprop", "w") == operand("nvidia-nvfp4", "dgrad", "w")
    assert operand("nvidia-nvfp4", "fprop", "w").block == "16x16"
    turned = {(g, o) for g, o, p in PRESETS["nvidia-nvfp4"].recipe.operands() if p.hadamard}
    assert turned == {("wgrad", "dy"), ("wgrad", "x")}
    (rule,) = PRESETS["nvidia-nvfp4"].recipe.rules
    assert (rule.first, rule.last) == (2, 8)


def test_the_unbiased_variants_differ_in_that_alone():
    def operands(name, usual=None):
        return {(g, o): usual(p) if usual else p for g, o, p in PRESETS[name].recipe.operands()}

    unbiased = operands("nvidia-nvfp4-unbiased", lambda policy: dataclasses.replace(policy, prescale=1.0))
    assert unbiased == operands("nvidia-nvfp4")
    assert operand("nvidia-nvfp4-unbiased", "wgrad", "dy").prescale == 16 / 17
    scaled = operands(
        "quartet2-unscaled",
        lambda policy: (
            dataclasses.replace(policy, scale="ms_eden") if policy.scale == "ms_eden_unscaled" else policy
        ),
    )
    assert scaled == operands("quartet2")
    assert operand("quartet2-unscaled", "dgrad", "w").scale == "ms_eden_unscaled"
    written = {"gemms": ["wgrad"], "format": "nvfp4", "stabiliser": "sr", "prescale": 16 / 17}
    assert resolve(RecipeSpec(**written)).wgrad.left == operand("nvidia-nvfp4-unbiased", "dgrad", "dy")


@pytest.mark.parametrize("size", [16, 32])
def test_amds_deterministic_hadamard_is_on_all_six_operands_without_signs(size):
    policies = [p for *_, p in PRESETS[f"amd-fdw-dht{size}"].recipe.operands()]
    assert {(p.format, p.hadamard, p.signs, p.rounding) for p in policies} == {
        ("mxfp4", size, "none", "nearest")
    }


def test_amds_ladder_leaves_the_other_gemms_in_fp8():
    assert {p.format for g, _, p in PRESETS["amd-f"].recipe.operands() if g != "fprop"} == {
        "fp8_e4m3",
        "fp8_e5m2",
    }
    assert operand("amd-fd", "dgrad", "w").format == "mxfp4"
    assert operand("amd-fd", "wgrad", "dy").format == "fp8_e5m2"


def test_quartet_quantises_doubly_and_masks_and_its_code_draws_no_signs_that_matter():
    assert operand("quartet", "fprop", "x").mask
    assert operand("quartet", "fprop", "w").scale == "quest"
    assert operand("quartet", "dgrad", "w").source == "forward"
    assert operand("quartet", "dgrad", "dy").source == "high_precision"
    assert operand("quartet", "wgrad", "x").signs == "call"
    assert operand("quartet-code", "wgrad", "x").signs == "none"


def test_what_others_are_known_for():
    assert operand("tetrajet", "wgrad", "x").source == "forward"
    assert operand("tetrajet", "wgrad", "dy").prescale == 1.0
    assert operand("tetrajet", "fprop", "x").scale == "rceil"
    assert operand("fp4-all-the-way", "dgrad", "w").rounding == "nearest"
    assert operand("fp4-all-the-way", "wgrad", "x").rounding == "stochastic"
    assert operand("fouroversix", "dgrad", "dy").scale == "four_six"
    assert operand("primus-turbo", "fprop", "w").block == "32x32"
    assert operand("alto", "wgrad", "x").permute
    assert operand("deepseek-v3-fp8", "dgrad", "w").scale == "128x128"
    assert operand("mxfp8", "wgrad", "dy").scale == "rceil"
    assert operand("te-hybrid-fp8", "wgrad", "dy").format == "fp8_e5m2"
    assert operand("rocm-te-sr", "fprop", "x").rounding == "stochastic_rocm"


@pytest.mark.parametrize(
    "name", ["nvidia-nvfp4", "nvidia-nvfp4-switch", "fouroversix", "alto", "te-nvfp4-1d"]
)
def test_wgrad_rounds_to_bf16_after_its_hadamard(name):
    assert operand(name, "wgrad", "dy").rotated_bf16
    assert operand(name, "wgrad", "x").rotated_bf16


def test_fouroversix_scales_sr_by_16_17_and_keeps_the_last_four_blocks():
    recipe = PRESETS["fouroversix"].recipe
    prescales = {(g, o): p.prescale for g, o, p in recipe.operands()}
    assert {key for key, value in prescales.items() if value == 16 / 17} == {("dgrad", "dy"), ("wgrad", "dy")}
    assert [(rule.first, rule.last) for rule in recipe.rules] == [(0, 4)]
    assert operand("fouroversix-if4", "fprop", "x").format == "if4"
    formats = {(g, o): p.format for g, o, p in PRESETS["fouroversix-wgrad-nvint4"].recipe.operands()}
    assert {key[0] for key, value in formats.items() if value == "nvint4"} == {"wgrad"}


def test_alto_permutes_without_signs_and_shares_a_weight_tile():
    policy = operand("alto", "wgrad", "x")
    assert (policy.hadamard, policy.signs, policy.permute) == (32, "none", True)
    assert operand("alto", "fprop", "w") == operand("alto", "dgrad", "w")
    assert operand("alto", "fprop", "w").block == "32x32"


def test_quartet_2_shares_its_signs_and_comes_in_three_settings():
    for name, group, forward in (
        ("quartet2", 32, "four_six"),
        ("quartet2-code", 128, "two_level"),
        ("quartet2-128", 128, "four_six"),
    ):
        policy = operand(name, "wgrad", "x")
        assert (policy.scale, policy.signs, policy.source) == ("ms_eden", "backward", "forward_bf16")
        assert policy.hadamard == group
        assert operand(name, "fprop", "w").scale == forward


def test_where_ties_go():
    assert operand("quartet-code", "fprop", "x").rounding == "nearest_toward_zero"
    assert operand("quartet-code", "wgrad", "dy").undo == "operand"
    assert operand("tseng-rht", "dgrad", "w").rounding == "nearest_away"
    assert operand("quartet2", "fprop", "x").rounding == "nearest_away"
    assert operand("quartet2-128", "fprop", "x").rounding == "nearest"


def test_tsengs_fp8_forward_gives_wgrad_its_x():
    assert operand("tseng-fp8", "wgrad", "x").source == "forward_bf16"
    assert operand("tseng-fp8", "dgrad", "w").source == "high_precision"


def test_primus_turbo_rounds_gradients_to_nearest_unless_told():
    def stochastic(name):
        return {(g, o) for g, o, p in PRESETS[name].recipe.operands() if p.rounding == "stochastic"}

    assert stochastic("primus-turbo") == stochastic("primus-gpt-oss") == set()
    assert stochastic("primus-turbo-sr") == {("dgrad", "dy"), ("wgrad", "dy")}
    assert stochastic("mfu-mxfp4") == {("dgrad", "dy")}
