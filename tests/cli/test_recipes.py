import json
from dataclasses import replace

import pytest

from ablate.recipes import PRESETS
from tests.cli.command import ablate


@pytest.fixture
def recipes(tmp_path):
    return lambda *words: ablate("recipes", *words, cwd=tmp_path).out


def test_the_list_fits_a_terminal_and_names_every_recipe(recipes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = recipes()
    assert max(map(len, output.splitlines())) <= 80
    assert all(f"\n{name} " in output for name in PRESETS)
    assert [row["name"] for row in json.loads(recipes("--json"))["recipes"]] == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_show_says_operands_source_and_assumptions(recipes, name):
    output, preset = recipes("show", name), PRESETS[name]
    assert preset.source.url in output
    assert output.count("\nwgrad") >= 2
    assert all(line in output for line in (*preset.published, *preset.assumed))
    assert f"recipe: {name}" in output


def test_show_says_how_weights_are_de_oscillated(recipes, monkeypatch):
    own = PRESETS["tetrajet"]
    written = own.written | {"deoscillate": {"window": 50, "from_fraction": 0.25}}
    monkeypatch.setitem(PRESETS, "tetrajet", replace(own, written=written))
    output = recipes("show", "tetrajet")
    assert "weights de-oscillated every 50 steps at 4× from 25% of the budget on" in output
    assert "    deoscillate: {window: 50, from_fraction: 0.25}" in output


def test_show_as_json_also_without_the_word_show(recipes):
    content = json.loads(recipes("show", "tseng", "--json"))
    assert content["recipe"]["wgrad"]["left"]["prescale"] == 0.75
    assert json.loads(recipes("tseng", "--json")) == content
