import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.cli.recipes import command
from ablate.recipes import PRESETS


def run(*arguments, width="80"):
    return CliRunner(env={"COLUMNS": width}).invoke(command, list(arguments), catch_exceptions=False)


def test_the_list_fits_a_terminal_and_names_every_recipe():
    output = run().output
    assert max(map(len, output.splitlines())) <= 80
    assert all(f"\n{name} " in output for name in PRESETS)


def test_json_lists_every_recipe():
    rows = json.loads(run("--json").output)["recipes"]
    assert [row["name"] for row in rows] == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_show_says_operands_source_and_assumptions(name):
    output = run("show", name).output
    preset = PRESETS[name]
    assert preset.source.url in output
    assert output.count("\nwgrad") >= 2
    assert all(line in output for line in (*preset.published, *preset.assumed))
    assert f"recipe: {name}" in output


def test_show_says_how_weights_are_de_oscillated(monkeypatch):
    own = PRESETS["tetrajet"]
    written = own.written | {"deoscillate": {"window": 50, "from_fraction": 0.25}}
    monkeypatch.setitem(PRESETS, "tetrajet", replace(own, written=written))
    output = run("show", "tetrajet").output
    assert "weights de-oscillated every 50 steps at 4× from 25% of the budget on" in output
    assert "    deoscillate: {from_fraction: 0.25, window: 50, threshold: 4.0}" in output


def test_show_as_json_also_without_the_word_show():
    content = json.loads(run("show", "tseng", "--json").output)
    assert content["recipe"]["wgrad"]["left"]["prescale"] == 0.75
    assert json.loads(run("tseng", "--json").output) == content


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "tetrajt"], "no recipe 'show tetrajt' .did you mean 'tetrajet'"),
        (["shwo", "tseng"], "no recipe 'shwo tseng'"),
        (["mxpf4"], "did you mean 'mxfp4'"),
        (["show", "mxfp4"], "'mxfp4' is a word of study files"),
    ],
)
def test_an_unknown_name_has_a_hint(words, said):
    with pytest.raises(UserError, match=said):
        run(*words)


def test_listing_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from ablate.cli import cli; cli(['recipes'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
