import dataclasses
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from ablate.cli.recipes import _yaml
from ablate.recipes import PRESETS, Recipe, RecipeSpec, describe, resolve
from ablate.recipes.table import markdown

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ALL = list(PRESETS.values())


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_survives_json_and_has_its_source(preset):
    written = json.loads(json.dumps(dataclasses.asdict(preset.recipe)))
    assert TypeAdapter(Recipe).validate_python(written) == preset.recipe
    assert preset.source.url.startswith("https://")
    assert preset.published
    assert len(describe(preset.recipe)) < 140


def test_no_two_presets_are_described_alike():
    assert len({describe(preset.recipe) for preset in ALL}) == len(ALL)


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_is_one_word_and_can_be_written_out(preset):
    assert resolve(RecipeSpec(preset=preset.name)) == preset.recipe
    written = YAML(typ="safe").load(_yaml(preset))
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
    assert operand("quartet2", "wgrad", "dy").scale == "ms_eden"
    assert operand("primus-turbo", "fprop", "w").block == "32x32"
    assert operand("alto", "wgrad", "x").permute
    assert operand("deepseek-v3-fp8", "dgrad", "w").scale == "128x128"
    assert operand("mxfp8", "wgrad", "dy").scale == "rceil"
    assert operand("te-hybrid-fp8", "wgrad", "dy").format == "fp8_e5m2"
    assert operand("rocm-te-sr", "fprop", "x").rounding == "stochastic_rocm"


def test_the_docs_table_is_the_codes():
    assert markdown() in PAGE.read_text(encoding="utf-8"), "python -m ablate.recipes.table prints the new one"
