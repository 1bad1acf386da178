import pytest
from ruamel.yaml import YAML

from ablate.recipes import PRESETS
from tests.cli.command import ablate


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_is_shown_with_its_source_and_as_a_study_writes_it(tmp_path, name):
    output, preset = ablate("recipes", name, cwd=tmp_path).out, PRESETS[name]
    assert preset.source.url in output
    assert all(line in output for line in (*preset.published, *preset.assumed))
    written = output[output.index(f"  recipe: {name}\nor in full:\n") :].split("in full:\n")[1]
    assert YAML(typ="safe").load(written)["recipe"] == preset.written
