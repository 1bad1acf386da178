import pytest
from ruamel.yaml import YAML

from ablate.recipes import PRESETS
from ablate.recipes.stacks import STACKS
from tests.cli.command import ablate


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_is_shown_with_its_source_and_as_a_study_writes_it(tmp_path, name):
    output, preset = ablate("recipes", name, cwd=tmp_path).out, PRESETS[name]
    assert preset.source.url in output
    assert all(line in output for line in (*preset.published, *preset.assumed))
    written = output[output.index(f"  recipe: {name}\nor in full:\n") :].split(
        "in full:\n"
    )[1]
    assert YAML(typ="safe").load(written)["recipe"] == preset.written


@pytest.mark.parametrize("stack", STACKS)
def test_two_recipes_never_have_the_same_flags(stack, tmp_path):
    names = {preset.recipe: name for name, preset in PRESETS.items()}
    lines = []
    for name in names.values():
        answer = ablate("recipes", name, "--for", stack, cwd=tmp_path)
        lines.append((answer.out or answer.err).partition("\n")[0])
    assert len(set(lines)) == len(lines)


def test_flags_of_a_trainer_come_with_what_its_log_must_hold(tmp_path):
    output = ablate("recipes", "nvidia-nvfp4", "--for", "megatron-te", cwd=tmp_path).out
    assert output.startswith("--fp4-format e2m1 --fp4-recipe nvfp4 ")
    assert "\n# its log must hold: (?P<setup>fp4 \\.+ e2m1)\n" in output
    assert "\n# its log must not hold: transformer_impl \\.+ local\n" in output
