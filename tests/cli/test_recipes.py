from dataclasses import replace

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


def test_it_says_how_weights_are_de_oscillated(tmp_path, monkeypatch):
    own = PRESETS["tetrajet"]
    written = own.written | {"deoscillate": {"window": 50, "from_fraction": 0.25}}
    monkeypatch.setitem(PRESETS, "tetrajet", replace(own, written=written))
    output = ablate("recipes", "tetrajet", cwd=tmp_path).out
    assert "weights de-oscillated every 50 steps at 4× from 25% of the budget on" in output
