import pytest
from ruamel.yaml import YAML

from ablate.recipes import PRESETS
from ablate.recipes.stacks import STACKS
from tests.cli.command import ablate


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_is_shown_with_its_source_and_as_a_study_writes_it(tmp_path, name):
    preset = PRESETS[name]
    output = ablate(f"recipes {name}", cwd=tmp_path).out
    assert preset.source.url in output
    assert all(line in output for line in (*preset.published, *preset.assumed))
    _, written = output.split(f"  recipe: {name}\nor in full:\n")
    assert YAML(typ="safe").load(written)["recipe"] == preset.written


@pytest.mark.parametrize("stack", STACKS)
def test_two_recipes_never_have_the_same_flags(stack, tmp_path):
    names = {preset.recipe: name for name, preset in PRESETS.items()}
    lines = set()
    for name in names.values():
        answer = ablate(f"recipes {name} --for {stack}", cwd=tmp_path)
        lines.add((answer.out or answer.err).partition("\n")[0])
    assert len(lines) == len(names)
